"""Places under the arena: what they have in common, and each kind of them."""
