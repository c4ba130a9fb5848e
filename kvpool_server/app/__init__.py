"""The server as one program: what it is made of, and its life."""
