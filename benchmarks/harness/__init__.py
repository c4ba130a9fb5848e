"""What all cases measure with."""
