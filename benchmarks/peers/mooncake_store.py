"""Mooncake Store beside us: a master, a process that holds the segment, and a client, over loopback TCP.

The segment lies in a process of its own, as kvpool's arena does, so that bytes really travel between processes.
`python -m benchmarks.peers.mooncake_store MASTER HOST:PORT BYTES` is that process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness.engine import EngineSpec
from benchmarks.harness.measuring import free_port, process, wait_until

LOCAL_BUFFER_BYTES = 64 << 20
BEST_SETTINGS = {"MC_STORE_MEMCPY": "0", "MC_TCP_ENABLE_CONNECTION_POOL": "1"}
"""Else each transfer makes a connection; a copy within the host would be no TCP at all."""

BATCH_KEYS = 1024
"""Puts of 4,096 keys at once fail over TCP (TRANSFER_FAIL); up to 1,024 the rate grows with their number."""


class Store:
    """A client of Mooncake Store that moves bytes from and to registered buffers."""

    def __init__(self, master: str):
        self._store = _setup(master, f"127.0.0.1:{free_port()}", 0)

    def register(self, buffer: npt.NDArray[np.uint8]) -> None:
        assert self._store.register_buffer(buffer.ctypes.data, buffer.nbytes) == 0, "Mooncake refused a buffer"

    def put(self, keys: list[str], addresses: list[int], nbytes: int) -> None:
        for first in range(0, len(keys), BATCH_KEYS):
            batch = slice(first, first + BATCH_KEYS)
            codes = self._store.batch_put_from(keys[batch], addresses[batch], [nbytes] * len(keys[batch]))
            assert not any(codes), f"Mooncake put: codes {set(codes)}"

    def get(self, keys: list[str], addresses: list[int], nbytes: int) -> None:
        for first in range(0, len(keys), BATCH_KEYS):
            batch = slice(first, first + BATCH_KEYS)
            codes = self._store.batch_get_into(keys[batch], addresses[batch], [nbytes] * len(keys[batch]))
            assert set(codes) == {nbytes}, f"Mooncake get: codes {set(codes)}"

    def exist(self, keys: list[str]) -> list[int]:
        found: list[int] = self._store.batch_is_exist(keys)
        return found

    def remove_all(self) -> None:
        assert self._store.remove_all(True) >= 0, "Mooncake refused to remove"

    def close(self) -> None:
        self._store.close()


@contextlib.contextmanager
def master() -> Iterator[str]:
    """A master on a free port; its address."""
    address = f"127.0.0.1:{free_port()}"
    port = int(address.rpartition(":")[2])
    with process(master_command(port)) as running:
        wait_until(lambda: listens(port), "mooncake_master", running)
        yield address


def master_command(port: int) -> list[str]:
    """Starts a master."""
    binary = Path(importlib.util.find_spec("mooncake").submodule_search_locations[0]) / "mooncake_master"  # type: ignore[union-attr,index]
    return [str(binary), f"--rpc_port={port}", f"--metrics_port={free_port()}", "--default_kv_lease_ttl=10s"]


def holder_command(master: str, segment_bytes: int) -> list[str]:
    """Starts the process that holds a segment; it says "ready"."""
    holder = [sys.executable, "-m", "benchmarks.peers.mooncake_store"]
    return [*holder, master, f"127.0.0.1:{free_port()}", str(segment_bytes)]


@contextlib.contextmanager
def mooncake_store(segment_bytes: int) -> Iterator[Store]:
    """A store with one segment in another process, and a client of it here."""
    with master() as address, process(holder_command(address, segment_bytes)) as holder_process:
        assert holder_process.stdout is not None
        while (line := holder_process.stdout.readline()) and line != "ready\n":
            pass
        store = Store(address)
        try:
            yield store
        finally:
            store.close()


def engine(model: Path, master: str, folder: Path, segment_bytes: int, options: dict[str, Any]) -> EngineSpec:
    """A vLLM engine with MooncakeStoreConnector, over TCP.

    Args:
        folder: where its settings are written.
        segment_bytes: of the host's memory, which the engine adds to the store.
    """
    config: dict[str, Any] = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": segment_bytes,
        "local_buffer_size": 256 << 20,
    }
    path = folder / "mooncake.json"
    path.write_text(json.dumps(config))
    transfer = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return EngineSpec(model, transfer, options, {"MOONCAKE_CONFIG_PATH": str(path), "PYTHONHASHSEED": "0"})


def addresses(buffer: npt.NDArray[np.uint8], nbytes: int) -> list[int]:
    """Addresses of the consecutive parts of `nbytes` of a buffer."""
    return list(range(buffer.ctypes.data, buffer.ctypes.data + buffer.nbytes, nbytes))


def _setup(master: str, local: str, segment_bytes: int) -> Any:
    from mooncake.store import MooncakeDistributedStore

    for name, value in BEST_SETTINGS.items():
        os.environ.setdefault(name, value)
    store = MooncakeDistributedStore()
    code = store.setup(local, "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", master)
    if code:
        raise RuntimeError(f"Mooncake Store setup at {master} failed with code {code}")
    return store


def listens(port: int) -> bool:
    """Whether somebody listens there, on loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def main(arguments: Sequence[str]) -> None:
    """Holds a segment until SIGTERM."""
    stop = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    store = _setup(arguments[0], arguments[1], int(arguments[2]))
    print("ready", flush=True)
    signal.sigwait(stop)
    store.close()


if __name__ == "__main__":
    main(sys.argv[1:])
