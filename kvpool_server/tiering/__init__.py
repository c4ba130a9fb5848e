"""Blocks on their way up from the tiers and down to them."""
