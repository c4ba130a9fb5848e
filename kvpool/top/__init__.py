"""`kvpool top`: a pool's numbers as they change."""
