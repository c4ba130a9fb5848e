"""Transports: how chunk bytes travel between a caller and the arena."""
