"""Storage: the pool and what it is made of. No network, no clock of its own, no generated code."""
