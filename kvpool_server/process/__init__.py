"""What a process of the server needs from its host: addresses, children, logs, memory."""
