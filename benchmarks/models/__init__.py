"""Tiny models with random weights."""
