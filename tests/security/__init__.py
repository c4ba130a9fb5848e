"""What an intruder tries, and is refused."""
