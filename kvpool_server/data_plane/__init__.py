"""The data port: processes that map the arena and move its bytes, so that many cores do."""
