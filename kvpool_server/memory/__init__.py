"""The arena's memory, and how clients get it."""
