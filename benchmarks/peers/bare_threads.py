"""What several TCP connections over loopback can do at all: threads of one process, and a server process for each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash

from benchmarks.harness.traffic import Bytes
from benchmarks.peers.bare_socket import BareSocket, bare_socket


class BareThreads:
    """Moves a batch over all connections at once, a thread each.

    Args:
        summed: each thread also computes xxh3 of every message that it moves.
    """

    def __init__(self, connections: list[BareSocket], threads: ThreadPoolExecutor, summed: bool = False):
        self._connections = connections
        self._threads = threads
        self._summed = summed

    def put(self, source: Bytes) -> None:
        """Sends uint8 [count, message_bytes]."""
        self._share(source, self._put)

    def get(self, sink: Bytes) -> None:
        """Receives uint8 [count, message_bytes]."""
        self._share(sink, self._get)

    def with_sums(self) -> BareThreads:
        """The same connections, summed."""
        return BareThreads(self._connections, self._threads, summed=True)

    def _share(self, messages: Bytes, move: Callable[[BareSocket, Bytes], None]) -> None:
        shares = np.array_split(messages, len(self._connections))
        list(self._threads.map(move, self._connections, shares))

    def _put(self, connection: BareSocket, share: Bytes) -> None:
        if not self._summed:
            connection.put(share)
            return
        for nth in range(len(share)):
            xxhash.xxh3_64(share[nth].data).intdigest()
            connection.put(share[nth : nth + 1])

    def _get(self, connection: BareSocket, share: Bytes) -> None:
        if not self._summed:
            connection.get(share)
            return
        for nth in range(len(share)):
            connection.get(share[nth : nth + 1])
            xxhash.xxh3_64(share[nth].data).intdigest()


@contextlib.contextmanager
def bare_threads(num_connections: int, message_bytes: int, memory_bytes: int = 0) -> Iterator[BareThreads]:
    """Connections to servers in processes of their own, for messages of up to `message_bytes`.

    Args:
        memory_bytes: of all servers together; 0: one message each, which stays in the servers' caches.
    """
    each_bytes = max(message_bytes, memory_bytes // num_connections)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(bare_socket(each_bytes)) for _ in range(num_connections)]
        threads = stack.enter_context(ThreadPoolExecutor(num_connections))
        yield BareThreads(connections, threads)
