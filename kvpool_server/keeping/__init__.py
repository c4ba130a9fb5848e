"""Memory that outlives its server: what keeps it, the table of what lies in it, and a new server's adoption of both."""
