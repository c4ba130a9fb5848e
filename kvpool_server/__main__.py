"""The `kvpool-server` command, also as `python -m kvpool_server`."""

from __future__ import annotations

import gc
import os
import sys

from kvpool_server.keeping import keeper


def main() -> None:
    """Entry point of the console script: becomes the keeper of a server, or the server."""
    arguments = sys.argv[1:]
    if keeper.is_wanted(arguments):
        keeper.become(arguments)
    gc.disable()  # Imports leave little garbage. `keep_collections_short` enables the collector behind them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy would start a thread for each core, which spins a while.
    from kvpool_server.app import command  # A keeper loads nothing of it.

    command.main()


if __name__ == "__main__":
    main()
