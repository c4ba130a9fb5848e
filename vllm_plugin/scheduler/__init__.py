"""What runs on the scheduler's thread."""
