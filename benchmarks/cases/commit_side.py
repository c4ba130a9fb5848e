"""One side of `benchmarks.cases.commit`: measures the kvpool that is first on its Python path.

Reads the name of a measure a line, and answers with its seconds. Uses nothing of the benchmarks, which the other
checkout may not have, and only what both commits' clients can do.
"""

from __future__ import annotations

import inspect
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvpool import BlockRun, Client, ClientConfig, GroupSpec, NamespaceSpec
from kvpool.client.client import InPlace
from kvpool.protocol.errors import KVPoolError

MIB = 1 << 20
BLOCKS, BLOCK_BYTES, SMALL_BYTES = 32, 2 * MIB, 64
SMALL_BLOCKS, LOOKUPS = 64, 100
START_S = 60.0


def names(count: int) -> list[bytes]:
    """Block hashes."""
    return [number.to_bytes(32, "big") for number in range(count)]


def spec(model: str, block_bytes: int) -> NamespaceSpec:
    """One group, one shard."""
    return NamespaceSpec(model, (GroupSpec("full_attention", 16, 8, 128, 128, 1, block_bytes),))


class Measures:
    """What can be measured, by name. Each returns seconds."""

    def __init__(self, endpoint: str):
        self._client = _ready_client(endpoint)
        # Commits differ in where they keep the calls of operators, and the release that nobody waits for.
        self._admin: Any = getattr(self._client, "admin", self._client)
        self._calls: Any = getattr(self._client, "rpc", self._client)
        random = np.random.default_rng(0)
        self._source = random.integers(0, 256, BLOCKS * BLOCK_BYTES, np.uint8).reshape(BLOCKS, BLOCK_BYTES)
        self._sink = np.ones_like(self._source)
        self._large = self._client.open_namespace(spec("large", BLOCK_BYTES)), BlockRun(0, names(BLOCKS))
        self._small = self._client.open_namespace(spec("small", SMALL_BYTES)), BlockRun(0, names(SMALL_BLOCKS))
        self.put()
        self.get()
        self.small_put()
        assert np.array_equal(self._source, self._sink), "the pool returned other bytes"

    def lookup(self) -> float:
        return self._lookups(lambda lease_id: self._client.release([lease_id]))

    def lookup_of_an_engine(self) -> float:
        return self._lookups(self._calls.release_quietly)

    def _lookups(self, release: Callable[[int], object]) -> float:
        namespace, run = self._small
        started = time.perf_counter()
        for _ in range(LOOKUPS):
            found = self._client.lookup(namespace, [run])
            assert found.hits[0].num_leading == SMALL_BLOCKS
            release(found.lease_id)
        return time.perf_counter() - started

    def put(self) -> float:
        return self._put(*self._large, list(self._source))

    def small_put(self) -> float:
        return self._put(*self._small, [bytes(SMALL_BYTES)] * SMALL_BLOCKS)

    def _put(self, namespace: Any, run: BlockRun, blocks: Sequence[Any]) -> float:
        self._admin.remove(namespace, [run])
        started = time.perf_counter()
        self._client.put_blocks(namespace, run, blocks)
        return time.perf_counter() - started

    def get(self) -> float:
        namespace, run = self._large
        found = self._client.lookup(namespace, [run])
        started = time.perf_counter()
        self._client.get(namespace, found.lease_id, [run], self._target())
        seconds = time.perf_counter() - started
        self._client.release([found.lease_id])
        return seconds

    def _target(self) -> Any:
        """Where a get's blocks go, in the way of an engine on the CPU, which has changed: arrays, or a callback."""
        takes_arrays = "InPlace" in str(inspect.signature(self._client.get).parameters["drain"].annotation)
        return InPlace(list(self._sink)) if takes_arrays else self._drain

    def _drain(self, indices: Sequence[int], buffers: Sequence[Any]) -> None:
        for idx, buffer in zip(indices, buffers, strict=True):
            self._sink[idx] = buffer


def _ready_client(endpoint: str) -> Client:
    """A client over shared memory, once the server's memory is backed."""
    deadline = time.monotonic() + START_S
    while True:
        client = Client(ClientConfig(endpoint, transport="shm", timeout_ms=10_000))
        try:
            stats = getattr(client, "admin", client).stats()
            if stats.prefaulted_bytes == stats.arena_bytes:
                return client
        except KVPoolError:
            if time.monotonic() > deadline:
                raise
        client.close()
        time.sleep(0.1)


def main() -> None:
    """Answers until the end of input."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "kvpool_server", "--listen", endpoint, "--http-listen", ""]
    command += ["--data-listen", "127.0.0.1:0", "--memory", "1GiB"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        measures = Measures(endpoint)
        for line in sys.stdin:
            name = line.strip()
            print(0 if name == "ready" else getattr(measures, name.replace(" ", "_"))(), flush=True)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
