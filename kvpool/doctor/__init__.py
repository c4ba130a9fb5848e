"""`kvpool doctor`: checks of all that makes a pool slow or useless, one module for each family of checks."""
