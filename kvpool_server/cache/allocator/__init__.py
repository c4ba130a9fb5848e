"""Where entries lie in the arena."""
