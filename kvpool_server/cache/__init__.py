"""Which blocks a pool holds, and who may touch them. Not thread-safe: one event loop owns a pool."""
