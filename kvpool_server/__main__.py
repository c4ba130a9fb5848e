"""The `kvpool-server` command, also as `python -m kvpool_server`."""

from __future__ import annotations

import sys

from kvpool_server.keeping import keeper


def main() -> None:
    """Entry point of the console script: becomes the keeper of a server, or the server."""
    arguments = sys.argv[1:]
    if keeper.is_wanted(arguments):
        keeper.become(arguments)
    from kvpool_server.app import command  # A keeper loads nothing of it.

    command.main()


if __name__ == "__main__":
    main()
