"""Which blocks have left the pool, and why: a table of fixed size, in which later departures replace earlier ones.

A block is known by 64 bits of its name, mixed with a secret of its group: nobody can choose which departures are
forgotten, and one group's blocks are not another's. Of the departures between a block's and now, each replaces it with
a chance of one in `NUM_SLOTS`: half of what left 700,000 departures ago is still known.
"""

from __future__ import annotations

import itertools
import operator
import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.types import MissCause
from kvpool_server.cache.entry import Entry, Group

NUM_SLOTS = 1 << 20
"""12 bytes each, which take memory once blocks have left."""
BATCH = 1024
"""Departures are entered once so many wait, or when somebody asks."""
MAX_WAITING_GROUPS = 64
"""Or once they are of so many groups, each of which takes 10 us to enter."""
_CAUSE_BITS = 4
_CAUSES = (1 << _CAUSE_BITS) - 1
_MASK = np.uint64(NUM_SLOTS - 1)


class Departures:
    """Those of one pool. Not thread-safe: the pool's event loop owns it.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._started_at = clock()
        self._secret = secrets.randbits(64)
        self._tags = np.zeros(0, np.uint64)  # Of `NUM_SLOTS` from the first departure on.
        self._notes = np.zeros(0, np.uint32)  # Seconds since the start, and the cause.
        self._waiting: defaultdict[tuple[Group, int], list[bytes]] = defaultdict(list)
        self._num_waiting = 0

    def left(self, entries: Sequence[Entry], cause: MissCause) -> None:
        """Entries have left, or are about to."""
        if not entries:
            return
        note = int(self._clock() - self._started_at) << _CAUSE_BITS | cause
        for group, members in itertools.groupby(entries, operator.attrgetter("group")):
            self._waiting[group, note] += [entry.block_hash for entry in members]
        self._num_waiting += len(entries)
        if self._num_waiting >= BATCH or len(self._waiting) >= MAX_WAITING_GROUPS:
            self._enter()

    def _enter(self) -> None:
        if not len(self._tags):
            self._tags, self._notes = np.zeros(NUM_SLOTS, np.uint64), np.zeros(NUM_SLOTS, np.uint32)
        waiting, self._waiting = self._waiting, defaultdict(list)
        self._num_waiting = 0
        for (group, note), names in waiting.items():
            tags = self._tags_of(group, names)
            slots = tags & _MASK
            self._tags[slots] = tags
            self._notes[slots] = note

    def cause(self, group: Group, name: bytes) -> MissCause | None:
        """Why a block has left; None if it is not known to have left."""
        if self._waiting:
            self._enter()
        if not len(self._tags):
            return None
        tag = int.from_bytes(name[:8], "little") ^ self._salt(group)
        slot = tag & NUM_SLOTS - 1
        if int(self._tags[slot]) != tag:
            return None
        return MissCause(int(self._notes[slot]) & _CAUSES)

    def causes(self, group: Group, names: Sequence[bytes]) -> npt.NDArray[np.uint32]:
        """The cause of each block's departure, of blocks of one prefix of which the first is known to have left.

        0 (`NEVER_STORED`) from the first block on behind which none is known to have left. A block before that was
        stored, too, for nobody stores a block without those before it: if its departure is forgotten, it counts for
        the cause of the block before it.
        """
        tags = self._tags_of(group, names)
        slots = tags & _MASK
        causes = np.where(self._tags[slots] == tags, self._notes[slots] & _CAUSES, 0)
        known = np.flatnonzero(causes)
        last = int(known[-1]) + 1
        known_before = np.zeros(last, np.intp)
        known_before[known] = known
        causes[:last] = causes[np.maximum.accumulate(known_before)]
        return causes

    def _tags_of(self, group: Group, names: Sequence[bytes]) -> npt.NDArray[np.uint64]:
        """A name is `HASH_BYTES` of a hash; the first 8 bytes tell it from others."""
        words = np.frombuffer(b"".join(names), "<u8").reshape(len(names), -1)
        return words[:, 0] ^ np.uint64(self._salt(group))

    def _salt(self, group: Group) -> int:
        return xxhash.xxh3_64_intdigest(group.fingerprint + group.idx.to_bytes(4, "little"), self._secret)
