"""The pool with its tiers: demotes blocks from the arena to tiers, and promotes them again."""
