"""Mooncake Store as processes over loopback TCP: a master, and a client that gives memory to its cluster.

The segment lies in a process of its own, as kvpool's arena does, so that bytes travel between processes.
`python -m testbed.mooncake MASTER HOST:PORT BYTES` holds a segment until SIGTERM.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed.ports import free_port

LOCAL_BUFFER_BYTES = 64 << 20
BEST_SETTINGS = {"MC_STORE_MEMCPY": "0", "MC_TCP_ENABLE_CONNECTION_POOL": "1"}
"""Without the pool each transfer opens a connection; with memcpy a transfer within one host would not use TCP."""


def master_command(port: int) -> list[str]:
    """The command line of a master that listens on `port`."""
    binary = Path(importlib.util.find_spec("mooncake").submodule_search_locations[0]) / "mooncake_master"  # type: ignore[union-attr,index]
    return [str(binary), f"--rpc_port={port}", f"--metrics_port={free_port()}", "--default_kv_lease_ttl=10s"]


def segment_command(master: str, segment_bytes: int) -> list[str]:
    """The command line of a process that holds a segment and prints "ready" once the cluster has it.

    Args:
        master: its HOST:PORT.
    """
    holder = [sys.executable, "-m", "testbed.mooncake"]
    return [*holder, master, f"127.0.0.1:{free_port()}", str(segment_bytes)]


def open_store(master: str, local: str, segment_bytes: int) -> Any:
    """A `MooncakeDistributedStore` that gives `segment_bytes` to the cluster; 0 for a client alone.

    Raises:
        RuntimeError: Mooncake refused.
    """
    from mooncake.store import MooncakeDistributedStore

    for name, value in BEST_SETTINGS.items():
        os.environ.setdefault(name, value)
    store = MooncakeDistributedStore()
    code = store.setup(local, "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", master)
    if code:
        raise RuntimeError(f"Mooncake Store setup at {master} failed with code {code}")
    return store


def main(arguments: Sequence[str]) -> None:
    """Holds a segment until SIGTERM."""
    stop = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    store = open_store(arguments[0], arguments[1], int(arguments[2]))
    print("ready", flush=True)
    signal.sigwait(stop)
    store.close()


if __name__ == "__main__":
    main(sys.argv[1:])
