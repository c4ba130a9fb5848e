"""What a process of the server needs from its host: addresses, logs, its event loop and memory."""
