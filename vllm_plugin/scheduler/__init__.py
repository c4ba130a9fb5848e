"""What runs on the scheduler's thread: no other thread calls these modules."""
