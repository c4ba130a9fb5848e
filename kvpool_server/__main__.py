"""`python -m kvpool_server`."""

from kvpool_server.cli import main

main()
