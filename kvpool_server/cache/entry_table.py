"""Entries in their slots: how they come, become readable, and go.

The file stands in the order of an entry's life: reserve; commit, take_back or abandon, or restore; offer; evict, drop;
settle, free_ended.
Who holds entries, and until when, the pool knows: it says so by `Entry.leases`, and with tickets. Not thread-safe: the
pool's event loop owns it.

A slot is free again only when no lease covers it and no ticket, nor the grace after one, could still write to it.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

from kvpool.types import BlockRun, PutStatus
from kvpool_server.cache.allocator.arena import Arena
from kvpool_server.cache.allocator.placement import Placement
from kvpool_server.cache.entry import Entry, Group, Record
from kvpool_server.cache.eviction import TICK, Policy
from kvpool_server.cache.leases import Ticket
from kvpool_server.cache.observer import Observer
from kvpool_server.cache.quarantine import Quarantine


class EntryTable:
    """See the module.

    Args:
        arena: slots to give out.
        clock: monotonic seconds.
        grace_ms: how long the slot of an expired ticket waits for a late writer.
        policy: makes what decides who goes, for each slot size and each set of quotas.
        counters: counts who was evicted, among others' doings.

    Attributes:
        observer: hears what becomes readable and what stops being so. Give one before the first call.
        space: which slots to take, and whom to evict for them.
        quarantine: slots of dropped entries.
        num_live, num_complete: entries in an index, and those of them that are readable.
    """

    def __init__(
        self,
        arena: Arena,
        clock: Callable[[], float],
        grace_ms: int,
        policy: Callable[[], Policy],
        counters: Counter[str],
    ):
        self.observer = Observer()
        self.placement = Placement(arena, policy, counters)
        self.quarantine = Quarantine()
        self.num_live = 0
        self.num_complete = 0
        self._arena = arena
        self._clock = clock
        self._grace_s = grace_ms / 1000
        self._counters = counters
        self._stamp = 0

    def next_stamp(self, groups: Sequence[Group]) -> int:
        """The stamp of a call that uses entries of these groups."""
        self._stamp += TICK
        for group in groups:
            self.placement.touch(group.spec.slot_bytes, self._stamp)
        return self._stamp

    # In

    def reserve(self, group: Group, runs: Sequence[BlockRun], ticket: Ticket) -> list[PutStatus]:
        """Has a ticket cover its shards of every block that is neither there nor being written; of each, what it is.

        Raises:
            OutOfSpaceError: there is no room for all of them; nothing changed.
        """
        offsets = iter(self._make_room(group, runs))
        stamp = self.next_stamp([group])
        evictor = self.placement.evictor(group)
        statuses = []
        for run in runs:
            parent, parent_hash = group.index.get(run.parent_hash), run.parent_hash
            renewed: list[Entry] = []
            stored: list[Entry] = []
            for block_hash in run.block_hashes:
                entry = group.index.get(block_hash)
                if entry is None:
                    entry = self._insert(group, block_hash, parent, parent_hash, next(offsets), stamp)
                    stored.append(entry)
                else:
                    renewed.append(entry)
                statuses.append(_reserve(entry, ticket))
                parent, parent_hash = entry, block_hash
            evictor.renewed(renewed, stamp)
            if stored:
                evictor.stored(stored, stamp)
        return statuses

    def commit(self, entry: Entry, ticket: Ticket, checksums: Sequence[int]) -> bool:
        """Makes a ticket's shards of an entry present, unless it was dropped meanwhile."""
        entry.pending &= ~ticket.shards.mask
        if not entry.live:
            self.settle(entry)
            return False
        start = ticket.shards.start
        for nth, value in enumerate(checksums):
            entry.checksums[start + nth] = value
        entry.present |= ticket.shards.mask
        if entry.complete:
            self.num_complete += 1
            self.observer.stored(entry)
        self.offer(entry)
        return True

    def take_back(self, entry: Entry, ticket: Ticket) -> None:
        """Frees what a ticket's writer has not written, and will not write."""
        entry.pending &= ~ticket.shards.mask
        if not entry.live:
            self.settle(entry)
        elif not entry.present and not entry.pending:
            self.drop(entry)
        else:
            self.offer(entry)

    def abandon(self, entry: Entry, ticket: Ticket) -> None:
        """Drops what the writer of a ticket that has expired may still write, for it may be alive and late.

        Nobody else may be handed its slot before the grace is over, and nobody need wait for that: the entry goes, the
        next put gets a fresh one.
        """
        grace_ends = ticket.deadline + self._grace_s
        entry.pending &= ~ticket.shards.mask
        if entry.live:
            self.drop(entry, grace_ends)
        else:
            self.quarantine.hold(entry, grace_ends)

    def restore(self, group: Group, record: Record, parent: Entry | None, stamp: int) -> Entry:
        """Puts in an entry whose bytes lie in its slot, which is taken. To be offered once its children are there."""
        entry = self._insert(group, record.block_hash, parent, record.parent_hash, record.offset, stamp)
        entry.checksums = array("Q", record.checksums)
        entry.present = group.full_mask
        self.num_complete += 1
        return entry

    def offer(self, entry: Entry) -> None:
        """Lets the policies choose an entry, if nothing speaks against that any more."""
        if entry.live and not entry.children and not entry.pending:
            self.placement.evictor(entry.group).add(entry)

    # Out

    def evict(self, victims: Sequence[Entry]) -> None:
        """Drops who was chosen to make room."""
        for victim in victims:
            if victim.complete:
                self.observer.evicted(victim)
            self.drop(victim)
        self._counters["evicted_blocks"] += len(victims)

    def drop(self, entry: Entry, not_before: float = 0.0) -> None:
        """Takes an entry out of the index; its slot is freed once nobody can touch it, and not before a time."""
        assert entry.live
        entry.live = False
        self.placement.evictor(entry.group).dropped(entry)
        entry.group.forget(entry.block_hash)
        self.num_live -= 1
        if entry.complete:
            self.num_complete -= 1
            self.observer.removed(entry)
        if (parent := entry.parent) is not None:
            entry.parent = None
            parent.children -= 1
            self.offer(parent)
        if entry.pending:
            not_before = max(not_before, entry.pending_until + self._grace_s)
        # What another ticket that has expired, too, has yet to let go of is freed then, and only then.
        if not entry.movable or not_before > self._clock():
            self.quarantine.hold(entry, not_before)
        else:
            self._arena.free(entry.offset)

    def settle(self, entry: Entry) -> None:
        """Frees a dropped entry's slot if nobody can touch it any more."""
        if self.quarantine.settle(entry, self._clock()):
            self._arena.free(entry.offset)

    def free_ended(self, now: float) -> None:
        """Frees the slots whose time has come: out of quarantine, and of an extent that is being emptied."""
        for entry in self.quarantine.pop_ended(now):
            self._arena.free(entry.offset)
        if self.placement.drain.held:
            self.evict(self.placement.drain.idle(now))

    # Helpers

    def _make_room(self, group: Group, runs: Sequence[BlockRun]) -> list[int]:
        """Slots for the blocks that are not there yet."""
        there, count = group.find(runs)
        if not count:
            return []
        # Nothing that the put itself names may be evicted for it.
        parents = [group.index.get(run.parent_hash) for run in runs]
        kept = [*there, *(parent for parent in parents if parent is not None)]
        for entry in kept:
            entry.leases += 1
        try:
            victims = self.placement.victims(group, count)
        finally:
            for entry in kept:
                entry.leases -= 1
        self.evict(victims)
        offsets = self._arena.take(group.spec.slot_bytes, count)
        assert offsets is not None, "evicting made too little room"
        return offsets

    def _insert(
        self, group: Group, block_hash: bytes, parent: Entry | None, parent_hash: bytes, offset: int, stamp: int
    ) -> Entry:
        entry = group.index[block_hash] = Entry(group, block_hash, parent, offset, stamp, parent_hash)
        self._arena.assign(offset, entry)
        if parent is not None:
            parent.children += 1
        self.num_live += 1
        return entry


def _reserve(entry: Entry, ticket: Ticket) -> PutStatus:
    mask = ticket.shards.mask
    if entry.present & mask == mask:
        return PutStatus.PRESENT
    if entry.pending & mask:
        return PutStatus.BUSY
    entry.pending |= mask
    if ticket.deadline < math.inf:  # Such a writer may be late. One that ends its tickets itself is not.
        entry.pending_until = max(entry.pending_until, ticket.deadline)
    entry.present &= ~mask
    ticket.entries.append(entry)
    return PutStatus.GRANTED
