"""The cluster, as the server's threads call it: a process (`worker.py`), and the memory that is shared with it.

All calls block, and end: with an answer, or with StoreError when the process has died, or was killed because it did not
answer. A store that has failed so is dead for good; its owner starts another.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool_server.tiers.mooncake.worker import Order, Request

LANE_BYTES = 64 << 20
"""Staged at once, for each lane. What is not used takes no memory over TCP; RDMA pins all of it."""
START_S = 9.0
ANSWER_S = 90.0
"""Mooncake gives a transfer up by itself after 60 s at most; beyond that the process hangs."""
END_S = 3.0
"""Saying goodbye to a master that is there takes 2 s."""


class StoreError(Exception):
    """The process has not started, has died, or does not answer; the message says which."""


class Lane:
    """One call at a time.

    Attributes:
        memory: where what is put lies, and what is got comes to: uint8 [LANE_BYTES].
    """

    def __init__(self, store: Store, connection: Connection, memory: npt.NDArray[np.uint8], offset: int):
        self.memory = memory
        self._store = store
        self._connection = connection
        self._offset = offset

    def ask(self, what: str, keys: Sequence[str], offsets: Sequence[int] = (), sizes: Sequence[int] = ()) -> list[int]:
        """Mooncake's codes, one a key. `offsets` are those in `memory`. Raises StoreError."""
        request: Request = (what, keys, [self._offset + offset for offset in offsets], sizes)
        try:
            self._connection.send(request)
            codes: list[int] | None = self.hear(ANSWER_S)
        except (EOFError, OSError):
            self._store.kill()
            raise StoreError("Mooncake's client has died") from None
        if codes is None:
            self._store.kill()
            raise StoreError(f"Mooncake's client did not answer within {ANSWER_S:.0f} s, and was killed")
        return codes

    def hear(self, within_s: float) -> Any:
        """What the process says; None if it says nothing in time. Raises EOFError or OSError when it has died."""
        return self._connection.recv() if self._connection.poll(within_s) else None

    def close(self) -> None:
        """Hangs up."""
        self._connection.close()


class Store:
    """Starts the process, and waits until it has found the master, START_S at most. Raises StoreError."""

    def __init__(self, order: Order, num_lanes: int):
        self._is_dead = False
        memory_fd = os.memfd_create("kvpool-tier-mooncake")
        ends = [socket.socketpair() for _ in range(num_lanes)]
        try:
            os.ftruncate(memory_fd, num_lanes * LANE_BYTES)
            memory = np.frombuffer(mmap.mmap(memory_fd, 0), np.uint8)
            theirs = [end.fileno() for _, end in ends]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvpool_server.tiers.mooncake.worker"],
                stdin=subprocess.PIPE,
                pass_fds=[memory_fd, *theirs],
                env={**os.environ, "PYTHONPATH": _path()},
            )
        finally:
            os.close(memory_fd)
            for _, end in ends:
                end.close()
        self._lanes = [
            Lane(self, Connection(end.detach()), memory[nth * LANE_BYTES :][:LANE_BYTES], nth * LANE_BYTES)
            for nth, (end, _) in enumerate(ends)
        ]
        self._free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        for lane in self._lanes:
            self._free.put(lane)
        try:
            self._begin(replace(order, memory_fd=memory_fd, lane_fds=theirs))
        except BaseException:
            self.kill()
            self.end()
            raise

    def _begin(self, order: Order) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(order.encode())
            self._process.stdin.flush()
            problem: str | None = self._lanes[0].hear(START_S)
        except (EOFError, OSError):
            raise StoreError("Mooncake's client died at its start; its log is on stderr") from None
        if problem is None:
            raise StoreError(f"no mooncake_master answers at {order.master} within {START_S:.0f} s")
        if problem:
            raise StoreError(problem)

    @property
    def alive(self) -> bool:
        """Whether it is worth calling."""
        return not self._is_dead and self._process.poll() is None

    @contextlib.contextmanager
    def lane(self) -> Iterator[Lane]:
        """One that nobody else uses meanwhile; waits for one if need be."""
        lane = self._free.get()
        try:
            yield lane
        finally:
            self._free.put(lane)

    def kill(self) -> None:
        """Ends it now: whoever waits for an answer hears of it. From any thread. Idempotent."""
        self._is_dead = True
        self._process.kill()

    def end(self) -> None:
        """Lets it say goodbye to the master, END_S at most. Idempotent."""
        self._is_dead = True
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for lane in self._lanes:
            lane.close()


def _path() -> str:
    """Where the process imports from: the same release as the server, wherever that was started."""
    parts = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(part for part in parts if part)
