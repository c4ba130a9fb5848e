"""What a model's KV is, and what names it."""
