"""Authentication and authorisation of callers: credentials in, principals out, and the table of each role's calls."""
