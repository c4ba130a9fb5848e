"""A process of its own that moves the bytes of transfers over TCP.

A thread that moves bytes gives up Python's lock and takes it again at every system call. So does an engine at every
kernel that it launches, and then waits behind all threads that move bytes: its steps take twice as long. The threads of
another process have a lock of their own.

`Mover` is the engine's side, `mover_process.py` the other. The process lends buffers in memory that both share, and
asks the caller of a transfer to fill or drain them: one message each way a batch. Whatever becomes of the process, the
engine goes on: while it starts, cannot start, or has no channel free, transfers stay in the engine's process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import NamedTuple

from kvpool.protocol.errors import PoolTimeoutError, TransferError
from kvpool.transport.base import Bytes, Drain, Fill, Sink, Source, Sum, Transfer
from kvpool.transport.child_process import ChildProcess
from kvpool.transport.data_port import time_out
from kvpool.transport.segment import Segment
from kvpool.transport.staging import STAGING_BYTES
from kvpool.transport.tcp_connection import Peer

log = logging.getLogger(__name__)

MOVER_CONNECTIONS = 4
"""Most connections of a transfer, unless the configuration says how many."""

NUM_CHANNELS = 2
"""Transfers at once: a rank stores with one thread, and loads with another."""

START_S = 30.0
START_AGAIN_S = 60.0
"""Until a process that has died, hung or not started is started again."""

LATE_S = 2.0
"""A process hangs if it says nothing for so long after a transfer's deadline, or takes as long to be told something."""


class Batch(NamedTuple):
    """What the process asks for: that regions [first, stop) are copied to or from the shared memory at `offset`."""

    first: int
    stop: int
    offset: int


class CallbackError(Exception):
    """The caller's callback has raised; the caller knows what."""


class _Process:
    """One start of the process. `idle`: the channels that no transfer has."""

    def __init__(self, peer: Peer, num_connections: int, segment: Segment):
        ends = [socket.socketpair() for _ in range(NUM_CHANNELS)]
        fds = [theirs.fileno() for _, theirs in ends]
        memory = {"memory_fd": segment.fd, "nbytes": segment.nbytes}
        settings = {"peer": asdict(peer), "num_connections": num_connections, "channel_fds": fds, **memory}
        try:
            self._child = ChildProcess("kvpool.transport.mover_process", settings, [segment.fd, *fds])
        finally:
            for ours, theirs in ends:
                time_out(ours, LATE_S)
                theirs.close()
        self.idle = [Connection(ours.detach()) for ours, _ in ends]

    def wait_until_ready(self) -> None:
        """Raises OSError or EOFError if the process does not start."""
        deadline = time.monotonic() + START_S
        for channel in self.idle:
            if not channel.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"no answer within {START_S:g} s")
            channel.recv()

    def kill(self) -> None:
        """Ends the process; transfers under way get EOFError. Idempotent."""
        self._child.kill()
        self._child.end(0.0)


class Mover:
    """Starts the process when a transfer wants it. Thread-safe.

    Args:
        num_connections: most of one transfer.

    Attributes:
        memory: what bytes pass through, uint8 [STAGING_BYTES].
    """

    def __init__(self, peer: Peer, num_connections: int):
        self._peer = peer
        self._num_connections = num_connections
        self._segment = Segment.create(STAGING_BYTES)
        self.memory: Bytes = self._segment.bytes
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._start_at = 0.0
        self._closed = False

    def write(self, transfer: Transfer, source: Source) -> bool:
        """As a transport's; False, and nothing is done, if no process takes the transfer."""
        return self._move(transfer, source.fill, source.sum, is_write=True)

    def read(self, transfer: Transfer, sink: Sink) -> bool:
        """As a transport's; False, and nothing is done, if no process takes the transfer."""
        return self._move(transfer, sink.drain, sink.sum, is_write=False)

    def close(self) -> None:
        """Ends the process, and transfers under way, which then fail. Idempotent."""
        with self._lock:
            self._closed = True
            process, self._process = self._process, None
            self._segment.close()
        if process is not None:
            process.kill()

    def _move(self, transfer: Transfer, act: Fill | Drain | None, sum: Sum, is_write: bool) -> bool:
        if act is None or max(transfer.region_bytes, transfer.batch_bytes) > len(self.memory):
            return False
        if (taken := self._take()) is None:
            return False
        process, channel = taken
        ends_at = time.monotonic() + transfer.timeout_s + LATE_S
        failure: Exception | None = None
        try:
            channel.send((is_write, transfer))
            while isinstance(said := self._hear(channel, ends_at), Batch):
                failure = failure or self._act(said, transfer.region_bytes, act, sum, is_write)
                channel.send(failure is None)
        except BaseException as error:
            self._drop(process)
            if isinstance(error, TimeoutError | BlockingIOError):
                late = f"the process that moves bytes to or from {self._peer} hung, and was killed"
                raise PoolTimeoutError(late) from failure
            if isinstance(error, OSError | EOFError):
                raise TransferError(f"the process that moves bytes to or from {self._peer} has ended") from failure
            raise
        with self._lock:
            process.idle.append(channel)
        if failure is not None and isinstance(said, CallbackError):
            raise failure
        if said is not None:
            raise said from failure
        return True

    @staticmethod
    def _hear(channel: Connection, ends_at: float) -> Batch | Exception | None:
        """What the process says next; None: the transfer has ended well."""
        if not channel.poll(max(LATE_S, ends_at - time.monotonic())):
            raise TimeoutError
        said: Batch | Exception | None = channel.recv()
        return said

    def _act(self, batch: Batch, region_bytes: int, act: Fill | Drain, sum: Sum, is_write: bool) -> Exception | None:
        """Has the caller fill or drain a batch; returns what a callback raises."""
        count = batch.stop - batch.first
        rows = list(self.memory[batch.offset : batch.offset + count * region_bytes].reshape(count, region_bytes))
        try:
            if not is_write:
                sum(batch.first, [[row] for row in rows])
            if (wait := act(batch.first, rows)) is not None:
                wait()
            if is_write:
                sum(batch.first, [[row] for row in rows])
        except Exception as error:
            return error
        return None

    def _take(self) -> tuple[_Process, Connection] | None:
        """A channel of this caller's own."""
        if os.getpid() != self._process_id:  # A fork, which shares the channels.
            return None
        with self._lock:
            process = self._process
            if process is not None and process.idle:
                return process, process.idle.pop()
            if process is None and not self._closed and time.monotonic() >= self._start_at:
                self._start_at = float("inf")
                with contextlib.suppress(RuntimeError):  # The interpreter ends, or has no thread left.
                    threading.Thread(target=self._start, name="kvpool-start-mover", daemon=True).start()
        return None

    def _start(self) -> None:
        process: _Process | None = None
        try:
            process = _Process(self._peer, self._num_connections, self._segment)
            process.wait_until_ready()
        except (OSError, EOFError) as error:
            if process is not None:
                self._drop(process)
            self._start_at = time.monotonic() + START_AGAIN_S
            log.warning(
                "kvpool: no process for the bytes to and from %s (%s): this process moves them, which slows its steps",
                self._peer,
                error or "it has ended",
            )
            return
        with self._lock:
            if not self._closed:
                self._process = process
                return
        process.kill()

    def _drop(self, process: _Process) -> None:
        with self._lock:
            if self._process is process:
                self._process, self._start_at = None, time.monotonic() + START_AGAIN_S
        process.kill()
