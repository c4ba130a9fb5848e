"""Changes of the pool's blocks that have not been published yet, and the blocks that are held now.

The pool's loop writes, the publisher's thread reads; the lock is held for a copy of references at most. Changes of one
turn of the loop become one batch. The writer never waits: if the reader is too far behind, batches are dropped, their
numbers stay unused, and a subscriber that sees the gap asks for a snapshot.

While a snapshot is read, which may take seconds, later changes wait to be applied to the blocks that are held: so
nothing is copied, and nobody holds the lock for long.

Invariant: a snapshot is the sum of all batches up to its number, dropped ones included.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvpool_server.cache.entry import Entry, Group, Observer

BATCH_BLOCKS = 1_024
MAX_QUEUED_BLOCKS = 1 << 20
MAX_UNAPPLIED = 1 << 20
"""Changes that wait for the end of snapshots. With more, the snapshots are given up."""
APPLIED_AT_ONCE = 1_024
"""Changes that have waited and are applied under one lock: about half a millisecond."""


class Change(NamedTuple):
    """One block became readable (`stored`), or ceased to be."""

    stored: bool
    group: Group
    block_hash: bytes
    parent_hash: bytes


Held = dict[Group, dict[bytes, Change]]
"""group -> block hash -> how it became readable; in that order."""


class ChangeBatch(NamedTuple):
    """The content of one message.

    Args:
        seq: its number, one more than that of the message before.
        ts: seconds since the epoch.
        changes: all of one namespace, in the order in which they happened.
        cleared: the pool was empty before these changes.
    """

    seq: int
    ts: float
    changes: list[Change]
    cleared: bool = False


class SnapshotLostError(Exception):
    """A snapshot was read too slowly, and cannot be completed."""


def split(changes: list[Change], max_blocks: int) -> list[list[Change]]:
    """Cuts changes, in their order, into lists of one namespace and at most `max_blocks` each."""
    lists: list[list[Change]] = []
    namespace = None
    for change in changes:
        if change.group.namespace != namespace or len(lists[-1]) == max_blocks:
            namespace = change.group.namespace
            lists.append([])
        lists[-1].append(change)
    return lists


class Ledger(Observer):
    """The changes of one stream's blocks.

    Args:
        defer: schedules a function for the end of this turn of the pool's loop.
        first_seq: the first batch's number. Microseconds since the epoch by default: a restarted server's numbers lie
            beyond all of its predecessor's, and the predecessor's subscribers see a gap.
        max_queued_blocks: blocks that wait for the reader; batches beyond are dropped.
    """

    def __init__(
        self,
        defer: Callable[[Callable[[], None]], object],
        counters: dict[str, int],
        first_seq: int | None = None,
        max_queued_blocks: int = MAX_QUEUED_BLOCKS,
        batch_blocks: int = BATCH_BLOCKS,
    ):
        self.batch_blocks = batch_blocks
        self.wake: Callable[[], None] = lambda: None
        self._defer = defer
        self._counters = counters
        self._max_queued_blocks = max_queued_blocks
        self._pending: list[Change] = []
        self._lock = threading.Lock()
        self._next_seq = time.time_ns() // 1_000 if first_seq is None else first_seq
        self._queue: deque[ChangeBatch] = deque()
        self._queued_blocks = 0
        self._has_gap = False
        self._held: Held = {}
        self._unapplied: deque[Change] = deque()
        self._readers: set[object] = set()
        self._is_withdrawn = False
        self._append([], cleared=True)

    def stored(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._note(Change(True, entry.group, entry.block_hash, entry.parent_hash))

    def removed(self, entry: Entry) -> None:
        """A block is removed only after it was stored."""
        self._note(Change(False, entry.group, entry.block_hash, b""))

    def withdraw(self) -> None:
        """The server draws nobody to its blocks any more: all count as gone, and later changes are not told.

        Snapshots that are being read are given up: their reader asks again, and gets one of an empty pool.
        """
        if self._is_withdrawn:
            return
        self.flush()
        self._is_withdrawn = True
        with self._lock:
            self._readers.clear()
            self._unapplied.clear()
            self._held = {}  # Another object: a reader may be walking the old one.
            self._append([], cleared=True)
        self.wake()

    def _note(self, change: Change) -> None:
        if self._is_withdrawn:
            return
        if not self._pending:
            self._defer(self.flush)
        self._pending.append(change)

    def flush(self) -> None:
        """Ends a turn: its changes become batches."""
        changes, self._pending = self._pending, []
        with self._lock:
            for part in split(changes, self.batch_blocks):
                if self._readers or self._unapplied:
                    self._unapplied.extend(part)
                else:
                    for change in part:
                        self._apply(change)
                self._enqueue(part)
            if len(self._unapplied) > MAX_UNAPPLIED:
                self._readers.clear()
        self.wake()

    def _apply(self, change: Change) -> None:
        if change.stored:
            self._held.setdefault(change.group, {})[change.block_hash] = change
            return
        blocks = self._held[change.group]
        del blocks[change.block_hash]
        if not blocks:
            del self._held[change.group]

    def _enqueue(self, changes: list[Change]) -> None:
        if self._has_gap or self._queued_blocks + len(changes) > self._max_queued_blocks:
            self._has_gap = True
            self._next_seq += 1
            self._counters["dropped_kv_event_batches"] += 1
            return
        self._append(changes)

    def _append(self, changes: list[Change], cleared: bool = False) -> None:
        self._queue.append(ChangeBatch(self._next_seq, time.time(), changes, cleared))
        self._next_seq += 1
        self._queued_blocks += len(changes)

    # The publisher's thread

    def pop_batches(self) -> list[ChangeBatch]:
        """Removes and returns the batches to be published now, by number. After a gap an empty batch shows the gap."""
        with self._lock:
            if self._has_gap:
                self._has_gap = False
                # Leaves numbers for a snapshot: a subscriber skips numbers that it knows, and must skip none of those.
                self._next_seq += 1 + sum(_num_batches(self._held, self.batch_blocks).values())
                self._append([])
            batches = list(self._queue)
            self._queue.clear()
            self._queued_blocks = 0
            return batches

    def last_seq(self) -> int:
        """The newest batch's number, published or not."""
        with self._lock:
            return self._next_seq - 1

    def catch_up(self) -> bool:
        """Applies some of the changes that have waited for snapshots to be read; False if none waits or must wait."""
        with self._lock:
            if self._readers or not self._unapplied:
                return False
            for _ in range(min(APPLIED_AT_ONCE, len(self._unapplied))):
                self._apply(self._unapplied.popleft())
        return True

    def snapshot(self) -> Iterator[ChangeBatch | None]:
        """All blocks held, as batches: the first clears, and the last has the newest batch's number.

        Yields None while changes wait for `catch_up`. Close it if it is not read to its end. Raises SnapshotLostError
        if too many changes have come since it began.
        """
        reader = object()
        while True:
            with self._lock:
                if not self._unapplied:
                    self._readers.add(reader)  # Later changes wait.
                    held = self._held  # `withdraw` puts another object in its place.
                    num_batches, last_seq = _num_batches(held, self.batch_blocks), self._next_seq - 1
                    break
            yield None
        try:
            seq, now = last_seq - sum(num_batches.values()), time.time()
            self._check(reader)
            yield ChangeBatch(seq, now, [], cleared=True)
            for namespace in num_batches:
                groups = [group for group in held if group.namespace == namespace]
                changes = (change for group in groups for change in held[group].values())
                while part := list(itertools.islice(changes, self.batch_blocks)):
                    seq += 1
                    yield ChangeBatch(seq, now, part)
                    self._check(reader)
        finally:
            with self._lock:
                self._readers.discard(reader)

    def _check(self, reader: object) -> None:
        if reader not in self._readers:
            raise SnapshotLostError(f"{MAX_UNAPPLIED} changes have come since the snapshot began, or the server drains")


def _num_batches(held: Held, batch_blocks: int) -> dict[str, int]:
    """By namespace: the number of batches that its blocks fill."""
    num_blocks: Counter[str] = Counter()
    for group, blocks in held.items():
        num_blocks[group.namespace] += len(blocks)
    return {namespace: -(-count // batch_blocks) for namespace, count in num_blocks.items()}
