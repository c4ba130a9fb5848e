"""A directory as a tier: extents of slots, as in the arena, and a journal of what lies where."""
