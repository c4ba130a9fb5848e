"""Mooncake Store as a peer: a master, a process that holds the segment, and a client, over loopback TCP."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.measuring import process, timed, wait_until
from benchmarks.harness.traffic import Bytes
from testbed.engine import EngineSpec
from testbed.mooncake import master_command, open_store, segment_command
from testbed.ports import free_endpoint, is_listening

BATCH_KEYS = 1024
"""Puts of 4,096 keys at once fail over TCP (TRANSFER_FAIL); up to 1,024 the rate grows with their number."""


class Store:
    """A client of Mooncake Store that moves bytes from and to registered buffers.

    Args:
        master: HOST:PORT of the cluster's master; kept as `address`.
    """

    def __init__(self, master: str):
        self.address = master
        self._store = open_store(master, free_endpoint(), 0)

    def register(self, buffer: Bytes) -> None:
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

    def measures(self, source: Bytes, sink: Bytes) -> tuple[Callable[[], float], Callable[[], float]]:
        """A put into the empty store and a get, which time themselves: uint8 [num_blocks, nbytes], registered."""
        nbytes = source.shape[1]
        keys = [f"benchmark@{idx}" for idx in range(len(source))]
        froms, intos = _addresses(source), _addresses(sink)

        def put() -> float:
            self.remove_all()
            return timed(lambda: self.put(keys, froms, nbytes))

        return put, lambda: timed(lambda: self.get(keys, intos, nbytes))

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
    address = free_endpoint()
    port = int(address.rpartition(":")[2])
    with process(master_command(port)) as running:
        wait_until(lambda: is_listening(port), "mooncake_master", running)
        yield address


@contextlib.contextmanager
def segment(address: str, nbytes: int) -> Iterator[subprocess.Popen[str]]:
    """A process that has joined a cluster with a segment."""
    with process(segment_command(address, nbytes)) as holder:
        assert holder.stdout is not None
        while (line := holder.stdout.readline()) and line != "ready\n":
            pass
        yield holder


@contextlib.contextmanager
def mooncake_store(segment_bytes: int) -> Iterator[Store]:
    """A store with one segment in another process, and a client of it here."""
    with master() as address, segment(address, segment_bytes):
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
    environment = {
        "MOONCAKE_CONFIG_PATH": str(path),
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",  # Else each transfer connects.
        "PYTHONHASHSEED": "0",
    }
    return EngineSpec(model, transfer, options, environment)


def _addresses(blocks: Bytes) -> list[int]:
    return [block.ctypes.data for block in blocks]
