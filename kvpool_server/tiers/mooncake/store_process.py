"""The server's side of Mooncake's client: a child process (`worker.py`), and memory shared with it for staging.

All calls block, and end with an answer or with StoreError: the process has died, or was killed because it hangs or
sends what is no answer. A StoreProcess that has failed stays dead; `store_workers.py` starts another. The memory is
sealed: the process cannot make it shorter, which would end the server with a bus error.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import numpy as np
import numpy.typing as npt

from kvpool.holdings import printable
from kvpool_server.child_process import ChildProcess
from kvpool_server.tiers.mooncake.messages import CODES, TEXT, Call, MessageError, MessageSocket, Request
from kvpool_server.tiers.mooncake.worker import TRANSFERS, StoreConfig

WORKER_MODULE = "kvpool_server.tiers.mooncake.worker"
STAGING_BYTES = 64 << 20
"""Staging memory of each channel for transfers. Over TCP unused pages take no memory; RDMA pins all of it."""
NUM_QUESTION_CHANNELS = 2
"""Channels without staging memory: a question to the master waits for no transfer."""
START_S = 9.0
ANSWER_S = 90.0
"""Mooncake gives a transfer up after 60 s at most; a process that answers no transfer for longer hangs."""
QUIET_S = 3.0
"""The process of a call without an answer is pinged each time that so long has passed."""
PONG_S = 4.0
"""A process that does not answer a ping within so long is stopped, or hangs."""
END_S = 3.0
"""Leaving a master that answers takes 2 s."""


class StoreError(Exception):
    """The process has not started, has died, or does not answer as it should; the message says which."""


class StoreChannel:
    """One connection to the process, for one call at a time. `memory` stages a call's blocks: uint8 [nbytes]."""

    def __init__(self, store: StoreProcess, messages: MessageSocket, memory: npt.NDArray[np.uint8], offset: int):
        self.memory = memory
        self.messages = messages
        self._store = store
        self._offset = offset

    def call(
        self, what: Call, keys: Sequence[str], offsets: Sequence[int] = (), sizes: Sequence[int] = ()
    ) -> list[int]:
        """Mooncake's code for each key. `offsets` are positions in `memory`. Raises StoreError."""
        sent_at = time.monotonic()
        try:
            self.messages.send(Request(what, list(keys), [self._offset + offset for offset in offsets], list(sizes)))
            while (codes := self.messages.receive(CODES, QUIET_S)) is None:
                self._store.check_alive(sent_at)
            if len(codes) != len(keys):
                raise MessageError(f"{len(codes)} codes for {len(keys)} keys")
        except (EOFError, OSError):
            self._store.kill()
            raise StoreError("Mooncake's client process has died") from None
        except MessageError as error:
            self._store.kill()
            raise StoreError(f"Mooncake's client process has sent {error}, and was killed") from None
        if what in TRANSFERS:
            self._store.answered_at = time.monotonic()
        return codes


class StoreProcess:
    """Starts the process, and waits START_S at most until the process has found the master. Raises StoreError.

    Attributes:
        answered_at: when the process last answered a transfer, monotonic seconds. Transfers wait for their turn, so
            that one of them may take longer than ANSWER_S.
    """

    def __init__(self, config: StoreConfig, num_transfers: int):
        self.answered_at = 0.0
        self._is_dead = False
        self._ping_lock = threading.Lock()
        memory_fd = os.memfd_create("kvpool-tier-mooncake", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        ends = [socket.socketpair() for _ in range(num_transfers + NUM_QUESTION_CHANNELS + 1)]
        try:
            os.ftruncate(memory_fd, num_transfers * STAGING_BYTES)
            fcntl.fcntl(memory_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            memory = np.frombuffer(mmap.mmap(memory_fd, 0), np.uint8)
            theirs = [end.fileno() for _, end in ends]
            settings = asdict(replace(config, memory_fd=memory_fd, channel_fds=theirs))
            self._process = ChildProcess(WORKER_MODULE, settings, [memory_fd, *theirs])
        finally:
            os.close(memory_fd)
            for _, end in ends:
                end.close()
        starts = range(0, len(ends) * STAGING_BYTES, STAGING_BYTES)
        self._channels = [
            StoreChannel(self, MessageSocket(end), memory[start : start + STAGING_BYTES], start)
            for start, (end, _) in zip(starts, ends, strict=True)
        ]
        self._transfers: queue.SimpleQueue[StoreChannel] = queue.SimpleQueue()
        self._questions: queue.SimpleQueue[StoreChannel] = queue.SimpleQueue()
        *others, self._ping_channel = self._channels
        for nth, channel in enumerate(others):
            (self._transfers if nth < num_transfers else self._questions).put(channel)
        try:
            self._wait_until_ready(config.master)
        except BaseException:
            self.kill()
            self.end()
            raise

    def _wait_until_ready(self, master: str) -> None:
        try:
            problem = self._channels[0].messages.receive(TEXT, START_S)
        except (EOFError, OSError):
            raise StoreError("Mooncake's client process died at its start; its log is on stderr") from None
        except MessageError as error:
            raise StoreError(f"Mooncake's client process has sent {error} at its start") from None
        if problem is None:
            raise StoreError(f"no mooncake_master answers at {master} within {START_S:.0f} s")
        if problem:
            raise StoreError(printable(problem))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether calls may succeed."""
        return not self._is_dead and self._process.poll() is None

    @contextlib.contextmanager
    def transfer_channel(self) -> Iterator[StoreChannel]:
        """A channel with staging memory, for this caller alone; waits until one is free."""
        yield from _borrowed(self._transfers)

    @contextlib.contextmanager
    def question_channel(self) -> Iterator[StoreChannel]:
        """A channel without staging memory, for this caller alone; waits until one is free."""
        yield from _borrowed(self._questions)

    def check_alive(self, sent_at: float) -> None:
        """For the caller of a call that has no answer yet. Raises StoreError, and kills the process, if it hangs.

        Args:
            sent_at: when the call was sent, monotonic seconds.
        """
        problem = ""
        if time.monotonic() - max(sent_at, self.answered_at) > ANSWER_S:
            problem = f"did not answer within {ANSWER_S:.0f} s"
        with self._ping_lock:
            if not problem and not self._is_dead:
                self._ping_channel.messages.send(Request("ping"))
                if self._ping_channel.messages.receive(CODES, PONG_S) is None:
                    problem = f"did not answer a ping within {PONG_S:.0f} s"
        if problem:
            self.kill()
            raise StoreError(f"Mooncake's client process {problem}, and was killed")

    def kill(self) -> None:
        """Kills the process: every caller that waits for an answer gets StoreError. From any thread. Idempotent."""
        self._is_dead = True
        self._process.kill()

    def request_end(self) -> None:
        """Has the process leave the cluster, without waiting. Idempotent."""
        self._is_dead = True
        self._process.request_end()

    def end(self) -> None:
        """Lets the process leave the cluster, END_S at most. Idempotent."""
        self._is_dead = True
        self._process.end(END_S)
        for channel in self._channels:
            channel.messages.close()


def _borrowed(free: queue.SimpleQueue[StoreChannel]) -> Iterator[StoreChannel]:
    channel = free.get()
    try:
        yield channel
    finally:
        free.put(channel)
