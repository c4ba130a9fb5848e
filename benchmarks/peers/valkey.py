"""Valkey, or Redis, as the plain alternative: a batch of blocks as one MSET or MGET over a Unix socket.

Optional: measured where a server is on PATH and Python's `redis` is installed. Nothing is persisted.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.measuring import process, wait_until
from benchmarks.harness.traffic import Bytes

BINARIES = ("valkey-server", "redis-server")


class Valkey:
    """A client of one server."""

    def __init__(self, path: Path):
        import redis

        self._redis = redis.Redis(unix_socket_path=str(path))

    def put(self, source: Bytes) -> None:
        """Stores uint8 [num_blocks, block_bytes]."""
        self._redis.mset({f"block@{idx}": memoryview(block) for idx, block in enumerate(source)})

    def get(self, sink: Bytes) -> None:
        """Brings the blocks of the last put into uint8 [num_blocks, block_bytes]."""
        values: list[Any] = self._redis.mget([f"block@{idx}" for idx in range(len(sink))])
        for into, value in zip(sink, values, strict=True):
            memoryview(into)[:] = value

    def clear(self) -> None:
        self._redis.flushall()

    def close(self) -> None:
        self._redis.close()


def missing() -> str:
    """Why there is nothing to measure; empty if there is."""
    if _binary() is None:
        return f"neither {' nor '.join(BINARIES)} is on PATH"
    if importlib.util.find_spec("redis") is None:
        return "Python's redis is not installed"
    return ""


def version() -> str:
    """The version that the server reports."""
    return subprocess.run([str(_binary()), "--version"], capture_output=True, text=True, check=True).stdout.strip()


@contextlib.contextmanager
def valkey() -> Iterator[Valkey]:
    """A server, and a client of it. Not where something is `missing`."""
    with tempfile.TemporaryDirectory(prefix="kvpool-valkey-") as folder:
        path = Path(folder) / "socket"
        options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no", "--dir", folder]
        with process([str(_binary()), *options, "--logfile", "log"]) as running:
            wait_until(path.exists, "the Valkey server", running)
            client = Valkey(path)
            try:
                yield client
            finally:
                client.close()


def _binary() -> str | None:
    return next(filter(None, map(shutil.which, BINARIES)), None)
