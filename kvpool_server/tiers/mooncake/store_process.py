"""The server's side of Mooncake's client: a child process (`worker.py`), and memory shared with it for staging.

All calls block, and end with an answer or with StoreError: the process has died, or was killed because it did not
answer in time. A StoreProcess that has failed stays dead; its owner starts another.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool_server.child_process import ChildProcess
from kvpool_server.tiers.mooncake.worker import Request, StoreConfig

STAGING_BYTES = 64 << 20
"""Staging memory of each channel. Over TCP unused pages take no memory; RDMA pins all of it."""
START_S = 9.0
ANSWER_S = 90.0
"""Mooncake gives a transfer up after 60 s at most; a process that takes longer hangs."""
END_S = 3.0
"""Leaving a master that answers takes 2 s."""


class StoreError(Exception):
    """The process has not started, has died, or does not answer; the message says which."""


class StoreChannel:
    """One connection to the process, for one call at a time. `memory` stages a call's blocks: uint8 [STAGING_BYTES]."""

    def __init__(self, store: StoreProcess, connection: Connection, memory: npt.NDArray[np.uint8], offset: int):
        self.memory = memory
        self._store = store
        self._connection = connection
        self._offset = offset

    def call(self, what: str, keys: Sequence[str], offsets: Sequence[int] = (), sizes: Sequence[int] = ()) -> list[int]:
        """Mooncake's code for each key. `offsets` are positions in `memory`. Raises StoreError."""
        request: Request = (what, keys, [self._offset + offset for offset in offsets], sizes)
        try:
            self._connection.send(request)
            codes: list[int] | None = self.receive(ANSWER_S)
        except (EOFError, OSError):
            self._store.kill()
            raise StoreError("Mooncake's client process has died") from None
        if codes is None:
            self._store.kill()
            raise StoreError(f"Mooncake's client process did not answer within {ANSWER_S:.0f} s, and was killed")
        return codes

    def receive(self, timeout_s: float) -> Any:
        """The next message; None if there is none in time. Raises EOFError or OSError when the process has died."""
        return self._connection.recv() if self._connection.poll(timeout_s) else None

    def close(self) -> None:
        """Idempotent."""
        self._connection.close()


class StoreProcess:
    """Starts the process, and waits START_S at most until the process has found the master. Raises StoreError."""

    def __init__(self, config: StoreConfig, num_channels: int):
        self._is_dead = False
        memory_fd = os.memfd_create("kvpool-tier-mooncake")
        ends = [socket.socketpair() for _ in range(num_channels)]
        try:
            os.ftruncate(memory_fd, num_channels * STAGING_BYTES)
            memory = np.frombuffer(mmap.mmap(memory_fd, 0), np.uint8)
            theirs = [end.fileno() for _, end in ends]
            settings = asdict(replace(config, memory_fd=memory_fd, channel_fds=theirs))
            self._process = ChildProcess("kvpool_server.tiers.mooncake.worker", settings, [memory_fd, *theirs])
        finally:
            os.close(memory_fd)
            for _, end in ends:
                end.close()
        self._channels = [
            StoreChannel(self, Connection(end.detach()), memory[start : start + STAGING_BYTES], start)
            for start, (end, _) in zip(range(0, memory.nbytes, STAGING_BYTES), ends, strict=True)
        ]
        self._free: queue.SimpleQueue[StoreChannel] = queue.SimpleQueue()
        for channel in self._channels:
            self._free.put(channel)
        try:
            self._wait_until_ready(config.master)
        except BaseException:
            self.kill()
            self.end()
            raise

    def _wait_until_ready(self, master: str) -> None:
        try:
            problem: str | None = self._channels[0].receive(START_S)
        except (EOFError, OSError):
            raise StoreError("Mooncake's client process died at its start; its log is on stderr") from None
        if problem is None:
            raise StoreError(f"no mooncake_master answers at {master} within {START_S:.0f} s")
        if problem:
            raise StoreError(problem)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether calls may succeed."""
        return not self._is_dead and self._process.poll() is None

    @contextlib.contextmanager
    def channel(self) -> Iterator[StoreChannel]:
        """A channel for this caller alone; waits until one is free."""
        channel = self._free.get()
        try:
            yield channel
        finally:
            self._free.put(channel)

    def kill(self) -> None:
        """Kills the process: every caller that waits for an answer gets StoreError. From any thread. Idempotent."""
        self._is_dead = True
        self._process.kill()

    def end(self) -> None:
        """Lets the process leave the cluster, END_S at most. Idempotent."""
        self._is_dead = True
        self._process.end(END_S)
        for channel in self._channels:
            channel.close()
