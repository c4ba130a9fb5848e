"""Replays traces of prompts against the server's own pool, to compare eviction policies and capacities."""
