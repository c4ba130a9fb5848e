"""What engines report of their prompt tokens, and what the server keeps of it."""
