"""The client: calls, streams, configuration."""
