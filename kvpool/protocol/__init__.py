"""What travels between clients and servers: values, names, errors, and their form on the wire."""
