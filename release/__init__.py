"""What a release needs besides the code; MAINTAINING.md says how one is made."""
