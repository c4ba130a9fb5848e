"""Traces of prompts, replayed against the server's own pool: which policy, and how much memory, would serve them."""
