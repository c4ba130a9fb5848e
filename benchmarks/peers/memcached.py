"""memcached with `--memory-file`: its objects outlive a process that ends by SIGUSR1.

Optional: measured where `memcached` is on PATH. Source: https://docs.memcached.org/features/restart/.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.measuring import process, until_true
from testbed.ports import free_port, is_listening

BATCH = 1_000


def missing() -> str:
    """Why there is nothing to measure; empty if there is."""
    return "" if shutil.which("memcached") else "memcached is not on PATH"


class Memcached:
    """A server of one memory file in a tmpfs. Use `memcached`."""

    def __init__(self, folder: Path, memory_mib: int):
        self._port = free_port()
        self._command = ["memcached", "-u", "root", "-l", "127.0.0.1", "-p", str(self._port), "-m", str(memory_mib)]
        self._command += ["--memory-file", str(folder / "memory")]
        self._stack = contextlib.ExitStack()
        self.start()

    def start(self) -> None:
        """Begins a server on the same file; returns once it listens."""
        self._running: subprocess.Popen[str] = self._stack.enter_context(process(self._command))
        until_true(lambda: is_listening(self._port), "memcached does not listen", 60.0)

    def end(self, number: signal.Signals) -> None:
        self._running.send_signal(number)
        self._running.wait(60.0)
        time.sleep(1.1)  # A server takes no memory that was left in this very second.

    def fill(self, count: int, nbytes: int) -> None:
        """Sets the objects 0 to `count`, each of `nbytes`."""
        with self._connect() as connection:
            for first in range(0, count, BATCH):
                names = range(first, min(first + BATCH, count))
                connection.sendall(
                    b"".join(b"set %d 0 0 %d noreply\r\n%b\r\n" % (n, nbytes, bytes(nbytes)) for n in names)
                )
            assert self._num_found(connection, [count - 1]) == 1

    def found(self, count: int) -> int:
        """How many of the objects 0 to `count` are there."""
        with self._connect() as connection:
            parts = (range(first, min(first + BATCH, count)) for first in range(0, count, BATCH))
            return sum(self._num_found(connection, part) for part in parts)

    def close(self) -> None:
        self._stack.close()

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), timeout=60.0)

    @staticmethod
    def _num_found(connection: socket.socket, names: range | list[int]) -> int:
        for first in range(0, len(names), 64):  # A line of a request is bounded.
            connection.sendall(b"get " + b" ".join(b"%d" % name for name in names[first : first + 64]) + b"\r\n")
        received, ends = bytearray(), -(-len(names) // 64)
        while received.count(b"END\r\n") < ends:
            part = connection.recv(1 << 20)
            assert part, "memcached hung up"
            received += part
        return received.count(b"VALUE ")


@contextlib.contextmanager
def memcached(memory_mib: int) -> Iterator[Memcached]:
    """A server whose memory file is in /dev/shm. Not where something is `missing`."""
    with tempfile.TemporaryDirectory(prefix="kvpool-memcached-", dir="/dev/shm") as folder:
        server = Memcached(Path(folder), memory_mib)
        try:
            yield server
        finally:
            server.close()
