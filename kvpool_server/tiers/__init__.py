"""Places under the arena: what they have in common, each of them, and what moves blocks up and down."""
