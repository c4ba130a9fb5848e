"""Who may do what: certificates, tokens, keys, names of principals."""
