"""The data port: processes that map the arena and move its bytes, on many cores."""
