"""The RPCs: from the wire to the pool and back."""
