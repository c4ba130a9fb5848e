"""One write or read over the connections to a data port: its caller and helpers move its parts, a connection each.

The caller fills or drains batches in order, and moves parts like a helper in between. So a transfer without helpers is
complete: the kernel and the server's data worker carry what was sent or requested while the caller does something else.
Bytes in the caller's arrays are sent from there and received there; others pass through buffers of the staging memory.
Who moves a part also computes its checksums, while its bytes are in that core's cache.

When a transfer has returned or raised, no helper works for it; a helper that is still connecting will not begin. A
failure hangs up on the connections of all of them, so that nobody goes on waiting for the peer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvpool.protocol.errors import KVPoolError, PoolTimeoutError, TransferError
from kvpool.transport.base import Bytes, Local, Pieces, Transfer, Wait
from kvpool.transport.data_port import pack_offsets
from kvpool.transport.helpers import Helpers, Staging
from kvpool.transport.tcp_connection import Connection, Part, Peer

MAX_CONNECTIONS = 32
"""Of one client, for all of its callers."""

PART_BYTES = (2 << 20, 8 << 20)
"""Bytes of a part, unless one region has more: at least, which stay in a core's cache until they are summed, and at
most, which cost the threads of one interpreter fewer turns. Neighbours travel together."""

PARTS_A_MOVER = 4
"""A part is at most this fraction of a thread's share of what is left, down to the least: parts become smaller towards
the end, so that a thread with a slow connection, for instance after a lost packet, does not end long after the others.

Source: Polychronopoulos and Kuck, "Guided Self-Scheduling", IEEE Transactions on Computers 36 (12), 1987.
"""

AHEAD, AHEAD_ALONE = 2, 8
"""Parts in flight on a connection: beside others, and on the only one."""

SPARE_BUFFERS = 2
"""Buffers beyond those of the batches in flight: for a batch that is drained, and for one whose drain is not over."""


class ConnectionPool:
    """Connections to one peer, each used by one thread at a time. Thread-safe."""

    def __init__(self, peer: Peer, max_connections: int = MAX_CONNECTIONS):
        self.peer = peer
        self._max_connections = max_connections
        self._changed = threading.Condition()
        self._used: set[Connection] = set()
        self._idle: list[Connection] = []
        self._closed = False

    def acquire(self, timeout_s: float) -> Connection:
        """A connection of the caller's own until `release`.

        Raises TransferError if the pool is closed, PoolTimeoutError if all stay busy for `timeout_s`.
        """
        with self._changed:
            self._changed.wait_for(self._can_acquire, max(timeout_s, 0))
            if self._closed:
                raise TransferError(f"the transport to {self.peer} is closed; open the namespace again")
            if not self._can_acquire():
                raise PoolTimeoutError(
                    f"all {self._max_connections} connections to {self.peer} stayed busy for {timeout_s:.3f} s"
                )
            connection = self._idle.pop() if self._idle else Connection(self.peer)
            self._used.add(connection)
            return connection

    def release(self, connection: Connection) -> None:
        with self._changed:
            self._used.discard(connection)
            connection.reuse()
            if self._closed:
                connection.close()
            else:
                self._idle.append(connection)
            self._changed.notify()

    def close(self) -> None:
        """Ends transfers under way, which then fail, and closes the connections. Idempotent."""
        with self._changed:
            self._closed = True
            for connection in self._used:
                connection.hang_up()
            for connection in self._idle:
                connection.close()
            self._idle = []
            self._changed.notify_all()

    def _can_acquire(self) -> bool:
        return self._closed or bool(self._idle) or len(self._used) < self._max_connections


@dataclass(eq=False, slots=True)
class Batch:
    """Regions [start, stop), which one callback sees.

    Args:
        nth: its place in the transfer.

    Attributes:
        parts_left: parts that have not been moved.
        buffer: uint8 [bytes of the batch]; None while there is none.
        wait: returns when the callback has filled the buffer, or no longer reads it.
    """

    nth: int
    start: int
    stop: int
    parts_left: int = 0
    buffer: Bytes | None = None
    wait: Wait | None = None


Move = tuple[Part, Batch]


@dataclass(eq=False)
class TcpTransfer:
    """What the caller of a transfer shares with its helpers. Without `rows` of the caller's, batches have buffers."""

    is_write: ClassVar[bool]

    _transfer: Transfer
    _local: Local
    _connections: ConnectionPool
    _helpers: Helpers

    def __post_init__(self) -> None:
        transfer, rows = self._transfer, self._local.rows
        self._rows = rows
        self._num_movers = 1 + self._helpers.num_threads
        self._deadline = time.monotonic() + transfer.timeout_s
        self._changed = threading.Condition()
        # Guarded by the lock.
        self._used: list[Connection] = []
        self._num_followers = 0
        self._is_ending = False
        self._failure: BaseException | None = None
        self._buffers: list[Bytes] = []

        permitted = transfer.offsets if transfer.permitted_offsets is None else transfer.permitted_offsets
        offsets, count = pack_offsets(permitted), len(transfer.offsets)
        ranges = transfer.batches() if rows is None or not count else [(0, count)]
        self._batches = [Batch(nth, start, stop) for nth, (start, stop) in enumerate(ranges)]
        self._moves: deque[Move] = deque()
        for batch in self._batches:
            first = batch.start
            while first < batch.stop:
                stop = min(first + self._regions_a_part(count - first), batch.stop)
                self._moves.append((Part(transfer, offsets, first, stop, self._deadline, self.is_write), batch))
                batch.parts_left += 1
                first = stop
        self._num_helpers = min(self._num_movers, len(self._moves)) - 1
        self._ahead = AHEAD if self._num_helpers else AHEAD_ALONE

    def _regions_a_part(self, num_left: int) -> int:
        """How many of the regions that are left make the next part."""
        region_bytes = max(1, self._transfer.region_bytes)
        nbytes = PART_BYTES[0]
        if self._num_movers > 1:
            share = num_left * region_bytes // (self._num_movers * PARTS_A_MOVER)
            nbytes = max(nbytes, min(PART_BYTES[1], share))
        return max(1, nbytes // region_bytes)

    @contextlib.contextmanager
    def _buffered(self, staging: Staging) -> Iterator[None]:
        """Has buffers for as many batches as can be under way."""
        if self._rows is not None:
            yield
            return
        wanted = SPARE_BUFFERS
        if self._num_helpers:
            parts_in_flight = (1 + self._num_helpers) * self._ahead
            wanted += -(-parts_in_flight * len(self._batches) // len(self._moves))
        nbytes = max(batch.stop - batch.start for batch in self._batches) * self._transfer.region_bytes
        with staging.borrowed(nbytes, min(wanted, len(self._batches)), self._transfer.timeout_s) as self._buffers:
            self._num_buffers = len(self._buffers)
            try:
                yield
            finally:
                for batch in self._batches:  # After a failure: others may then borrow the buffers.
                    if batch.buffer is not None and batch.wait is not None:
                        with contextlib.suppress(Exception):
                            batch.wait()

    def _run(self, lead: Callable[[Connection], None], follow: Callable[[Connection], None]) -> None:
        shares = [self._helpers.submit(lambda: self._join(follow, is_helper=True)) for _ in range(self._num_helpers)]
        try:
            self._join(lead)
        finally:
            for share in shares:
                share.cancel()
            self._wait_for_followers()
        if self._failure is not None:
            raise self._failure

    def _wait_for_followers(self) -> None:
        """Returns when no helper works for the transfer, whatever interrupts this thread."""
        while True:
            try:
                with self._changed:
                    self._is_ending = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: not self._num_followers)
                return
            except KeyboardInterrupt as error:
                self._fail(error)

    def _join(self, work: Callable[[Connection], None], is_helper: bool = False) -> None:
        """Works with a connection of this thread's own. A helper that gets none leaves all to the others."""
        connection: Connection | None = None
        has_begun = False
        try:
            connection = self._connections.acquire(0.0 if is_helper else self._remaining_s())
            connection.open(self._deadline)
            with self._changed:
                if not self._is_ending:
                    self._used.append(connection)
                    self._num_followers += is_helper
                    has_begun = True
            if has_begun:
                work(connection)
        except BaseException as error:
            if has_begun or not (is_helper and isinstance(error, KVPoolError)):
                self._fail(error)
        finally:
            if connection is not None:
                with self._changed:
                    self._used = [each for each in self._used if each is not connection]
                self._connections.release(connection)
            if has_begun and is_helper:
                with self._changed:
                    self._num_followers -= 1
                    self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """Ends the transfer with its first error."""
        with self._changed:
            self._failure = self._failure or error
            self._is_ending = True
            for connection in self._used:
                connection.hang_up()
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], object]) -> bool:
        """Waits with or without the lock; False if the transfer ends. Raises PoolTimeoutError at the deadline."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_ending or condition(), max(self._remaining_s(), 0)):
                self._raise_late()
        return not self._is_ending

    def _remaining_s(self) -> float:
        return self._deadline - time.monotonic()

    def _check_deadline(self) -> None:
        if self._remaining_s() < 0:
            self._raise_late()

    def _raise_late(self) -> None:
        raise PoolTimeoutError(
            f"a transfer to or from {self._connections.peer} took more than {self._transfer.timeout_s:.3f} s"
        )

    def _regions(self, part: Part, batch: Batch) -> Sequence[Pieces]:
        """Where the bytes of a part lie, region by region."""
        if self._rows is not None:
            return self._rows[part.first : part.stop]
        return [[row] for row in self._in_rows(batch)[part.first - batch.start : part.stop - batch.start]]

    def _views(self, part: Part, batch: Batch) -> list[Bytes]:
        """The same as few arrays."""
        if self._rows is not None:
            return [piece for region in self._rows[part.first : part.stop] for piece in region]
        assert batch.buffer is not None
        nbytes = self._transfer.region_bytes
        return [batch.buffer[(part.first - batch.start) * nbytes : (part.stop - batch.start) * nbytes]]

    def _in_rows(self, batch: Batch) -> list[Bytes]:
        """A batch's buffer as one array a region."""
        assert batch.buffer is not None
        nbytes = (batch.stop - batch.start) * self._transfer.region_bytes
        return list(batch.buffer[:nbytes].reshape(batch.stop - batch.start, -1))

    def _free(self, batch: Batch) -> None:
        """Lets other batches have the buffer. With the lock held."""
        if batch.buffer is not None:
            self._buffers.append(batch.buffer)
            batch.buffer = None
        self._changed.notify_all()
