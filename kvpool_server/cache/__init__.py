"""The pool and what it is made of. It uses no network, no clock of its own and no generated code."""
