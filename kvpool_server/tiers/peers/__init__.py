"""Other kvpool servers as a tier: what any of them holds in its memory, this one reads."""
