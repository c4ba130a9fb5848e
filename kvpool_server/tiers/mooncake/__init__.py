"""A Mooncake Store cluster as a tier."""
