"""Who may call what: certificates in, principals out, and the table of what each role may."""
