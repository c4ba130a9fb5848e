"""Replays traces of prompts against the server's own pool, without bytes and without RPCs."""
