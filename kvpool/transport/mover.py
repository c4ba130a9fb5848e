"""Processes of their own that move the bytes of transfers over TCP.

A thread that moves bytes gives up Python's lock and takes it again at every system call. So does an engine at every
kernel that it launches, and then waits behind all threads that move bytes: its steps take twice as long. So does a
server's event loop. The threads of another process have a lock of their own.

`Movers` is the caller's side, `mover_process.py` the other. A process lends buffers in memory that both share, and asks
the caller of a transfer to fill or drain them: one message each way a batch. A process of a server maps its arena, and
reads there: one message each way a transfer, and the checksums. Whatever becomes of a process, its parent goes on:
while none is free, or can be started, transfers stay in the parent's process.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from kvpool.protocol.errors import ConfigError, PoolTimeoutError, TransferError
from kvpool.transport.base import Act, Bytes, Local, Sum, Transfer, call_back
from kvpool.transport.child_process import ChildProcess
from kvpool.transport.chunk_sums import ChunkSums
from kvpool.transport.data_port import time_out
from kvpool.transport.helpers import STAGING_BYTES
from kvpool.transport.segment import Segment
from kvpool.transport.tcp_connection import Peer

log = logging.getLogger(__name__)

MOVERS = 2
"""Processes: a rank stores with one thread, and loads with another."""

MAX_PEERS = 64
"""Servers that one server reads from, and to which a process keeps connections; the longest unread gives way."""

MEMORY_BYTES = STAGING_BYTES // MOVERS
"""Of each process."""

START_S = 30.0
START_AGAIN_S = 60.0
"""Until another process is started after one has died, hung or not started."""

LATE_S = 2.0
"""A process hangs if it says nothing for so long after a transfer's deadline, or takes as long to be told something."""


SumArray = np.ndarray[Any, np.dtype[np.uint64]]


class Batch(NamedTuple):
    """What a process asks for: that regions [first, stop) are copied to or from its memory at `offset`."""

    first: int
    stop: int
    offset: int


class ArenaRows(NamedTuple):
    """Where in the arena a transfer's regions are read to, and how many bytes each checksum covers."""

    offsets: list[int]
    chunk_bytes: int


class CallbackError(Exception):
    """The caller's callback has raised; the caller knows what."""


class Mover:
    """One process, for one transfer at a time; its memory is the `nth` part of the segment."""

    def __init__(self, num_connections: int, segment: Segment, nth: int, arena: Segment | None):
        self.nth = nth
        self._memory = segment.bytes[nth * MEMORY_BYTES : (nth + 1) * MEMORY_BYTES]
        ours, theirs = socket.socketpair()
        time_out(ours, LATE_S)
        self._channel = Connection(ours.detach())
        with theirs:
            fds = {"segment_fd": segment.fd, "channel_fd": theirs.fileno()}
            settings = {"num_connections": num_connections, "nth": nth, "arena_bytes": 0}
            if arena is not None:
                fds["arena_fd"], settings["arena_bytes"] = arena.fd, arena.nbytes
            self._child = ChildProcess("kvpool.transport.mover_process", {**settings, **fds}, list(fds.values()))

    @property
    def pid(self) -> int:
        return self._child.pid

    def wait_until_ready(self) -> None:
        """Raises OSError or EOFError if the process does not start."""
        if not self._channel.poll(START_S):
            raise TimeoutError(f"no answer within {START_S:g} s")
        self._channel.recv()

    def kill(self) -> None:
        """Ends the process; the transfer under way gets TransferError. Idempotent."""
        self._child.kill()
        self._child.end(0.0)

    def move(
        self, peer: Peer, transfer: Transfer, local: Local, into: ArenaRows | None, is_write: bool
    ) -> SumArray | None:
        """As a transport's `read` and `write`; returns the checksums of rows. The process may have ended afterwards."""
        ends_at = time.monotonic() + transfer.timeout_s + LATE_S
        failure: Exception | None = None
        try:
            self._channel.send((peer, is_write, transfer, into))
            while isinstance(said := self._hear(ends_at), Batch):
                assert local.act is not None
                failure = failure or self._act(said, transfer.region_bytes, local.act, local.sum, is_write)
                self._channel.send(failure is None)
        except BaseException as error:
            self.kill()  # It may still read or write the buffers.
            if isinstance(error, TimeoutError | BlockingIOError):
                late = f"the process that moves bytes to or from {peer} hung, and was killed"
                raise PoolTimeoutError(late) from failure
            if isinstance(error, OSError | EOFError):
                raise TransferError(f"the process that moves bytes to or from {peer} has ended") from failure
            raise
        if failure is not None and isinstance(said, CallbackError):
            raise failure
        if isinstance(said, Exception):
            raise said from failure
        return said

    @property
    def has_ended(self) -> bool:
        return self._child.poll() is not None

    def _hear(self, ends_at: float) -> Batch | Exception | SumArray | None:
        """What the process says next. Checksums or None: the transfer has ended well."""
        if not self._channel.poll(max(LATE_S, ends_at - time.monotonic())):
            raise TimeoutError
        return self._channel.recv()  # type: ignore[no-any-return]

    def _act(self, batch: Batch, region_bytes: int, act: Act, sum: Sum, is_write: bool) -> Exception | None:
        """Has the caller fill or drain a batch; returns what a callback raises."""
        count = batch.stop - batch.first
        rows = list(self._memory[batch.offset : batch.offset + count * region_bytes].reshape(count, region_bytes))
        try:
            call_back(act, sum, batch.first, rows, is_write=is_write)
        except Exception as error:
            return error
        return None


class Movers:
    """The processes of one transport, or of a server, started when transfers want them. Thread-safe.

    Args:
        num_connections: most of one transfer.
        arena: the server's memory, in which rows lie; the server closes it later than this.

    Attributes:
        memory: what bytes pass through, uint8 [STAGING_BYTES]; None: this host shares none, so nothing is started.
    """

    def __init__(self, num_connections: int, arena: Segment | None = None):
        self._num_connections, self._arena = num_connections, arena
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._movers: dict[int, Mover | None] = {}  # None: not made yet.
        self._idle: list[Mover] = []
        self._start_at = 0.0
        self._is_closed = self._has_warned = False
        self._segment: Segment | None = None
        try:
            self._segment = Segment.create(STAGING_BYTES)
        except ConfigError as error:
            self._is_closed = True
            self._warn(error)
        self.memory: Bytes | None = None if self._segment is None else self._segment.bytes

    def close(self) -> None:
        """Ends the processes, and transfers under way, which then fail. Idempotent."""
        with self._lock:
            self._is_closed, self._idle = True, []
            if self._segment is not None:
                self._segment.close()
            for mover in self._movers.values():
                if mover is not None:
                    mover.kill()

    def move(
        self, peer: Peer, transfer: Transfer, local: Local, *, is_write: bool = False, sums: ChunkSums | None = None
    ) -> bool:
        """As a transport's `write` and `read`; False, and nothing is done, if no process takes the transfer.

        With `sums` the process reads into rows of the arena, and `sums` takes the checksums.
        """
        if local.act is None and sums is None:
            return False
        if local.act is not None and max(transfer.region_bytes, transfer.batch_bytes) > MEMORY_BYTES:
            return False
        if (mover := self._take()) is None:
            return False
        try:
            values = mover.move(peer, transfer, local, self._rows_of(local, sums), is_write)
            if sums is not None and values is not None:
                sums.values = values
        finally:
            with self._lock:
                if mover.has_ended:
                    self._forget(mover)
                else:
                    self._idle.append(mover)
        return True

    def _rows_of(self, local: Local, sums: ChunkSums | None) -> ArenaRows | None:
        if sums is None or self._arena is None:
            return None
        assert local.rows is not None
        start = self._arena.bytes.ctypes.data
        places = [piece.__array_interface__["data"][0] - start for (piece,) in local.rows]
        return ArenaRows(places, sums.chunk_bytes)

    def _take(self) -> Mover | None:
        """A mover of this caller's own."""
        if os.getpid() != self._process_id:  # A fork, which shares the channels.
            return None
        with self._lock:
            while self._idle:
                if not (mover := self._idle.pop()).has_ended:
                    return mover
                self._forget(mover)
            nth = next((nth for nth in range(MOVERS) if nth not in self._movers), None)
            if nth is not None and not self._is_closed and time.monotonic() >= self._start_at:
                self._start_at = time.monotonic() + START_AGAIN_S
                self._movers[nth] = None
                try:
                    threading.Thread(target=self._start, args=(nth,), name="kvpool-start-mover", daemon=True).start()
                except RuntimeError:  # The interpreter ends, or has no thread left.
                    del self._movers[nth]
        return None

    def _start(self, nth: int) -> None:
        mover: Mover | None = None
        try:
            assert self._segment is not None
            mover = Mover(self._num_connections, self._segment, nth, self._arena)
            with self._lock:
                self._movers[nth] = mover
                if self._is_closed:
                    mover.kill()
            mover.wait_until_ready()
        except Exception as error:
            if mover is not None:
                mover.kill()
            with self._lock:
                del self._movers[nth]
            if not self._is_closed:
                self._warn(error)
            return
        with self._lock:
            self._start_at = 0.0
            self._idle.append(mover)

    def _warn(self, error: Exception) -> None:
        """Says once why no process moves bytes."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "kvpool: no process for bytes over TCP (%s): this process moves them, which slows its other work",
                str(error) or "it has ended",
            )

    def _forget(self, mover: Mover) -> None:
        del self._movers[mover.nth]
        self._start_at = time.monotonic() + START_AGAIN_S
