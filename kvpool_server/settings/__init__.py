"""The server's settings."""
