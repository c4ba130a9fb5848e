"""The page of the server's HTTP port: static files, and JSON with the server's numbers."""
