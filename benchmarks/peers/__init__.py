"""What kvpool is measured beside."""
