"""What more memory, or less, would be worth: hit ratios at other arena sizes, from the pool's own traffic."""
