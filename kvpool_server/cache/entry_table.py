"""Entries in their slots: how they are reserved, become readable, and are dropped.

The file stands in the order of an entry's life: reserve; commit, revoke or expire, or restore; evict, drop; free.
The pool decides which lease or ticket covers an entry, and says so by `Entry.leases` and by the ticket that it passes.
Entries stay leased while a transfer of an ended lease or ticket is under way (`Holds`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvpool.protocol.types import BlockRun, MissCause, PutStatus
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.departures import Departures
from kvpool_server.cache.entry import BlockIndex, Entry, Group, Observer
from kvpool_server.cache.eviction import SearchCutError
from kvpool_server.cache.hints import Pins
from kvpool_server.cache.leases import Ticket
from kvpool_server.cache.placement import Placement
from kvpool_server.cache.steps import STEP_BLOCKS, Steps

_OVER = -math.inf
"""The end of a quarantine that is known to be over: nothing but a hold keeps the entry there."""


class Quarantine:
    """Dropped entries that somebody may still read or write, by slot.

    Each stays until its time is over and no lease or ticket covers it. The heap has one item of an entry until its time
    is known to be over, however many tickets of it expire: one whose time has grown gets a later item when it is due.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[Entry, float]] = {}
        self._ends: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, entry: Entry) -> bool:
        return entry.offset in self._held  # No other entry has its slot.

    def __iter__(self) -> Iterator[Entry]:
        return (entry for entry, _ in self._held.values())

    def add(self, entry: Entry, until: float) -> None:
        """Puts a dropped entry in quarantine until a time, or `_OVER`; never shortens its stay."""
        _, before = self._held.get(entry.offset, (entry, _OVER))
        self._held[entry.offset] = (entry, max(until, before))
        if before == _OVER < until:
            heapq.heappush(self._ends, (until, entry.offset))

    def remove_if_over(self, entry: Entry) -> bool:
        """Removes an entry whose time is known to be over and that no hold covers; True if its slot is to be freed."""
        is_over = entry.movable and self._held.get(entry.offset) == (entry, _OVER)
        if is_over:
            del self._held[entry.offset]
        return is_over

    def visit_due(self, now: float) -> Iterator[Entry | None]:
        """Visits the entries whose items are due: yields an entry that it has removed, or None if the entry stays."""
        while self._ends and self._ends[0][0] <= now:
            _, offset = heapq.heappop(self._ends)
            entry, until = self._held[offset]
            if until > now:
                heapq.heappush(self._ends, (until, offset))
                yield None
            else:
                self._held[offset] = (entry, _OVER)
                yield entry if self.remove_if_over(entry) else None


@dataclass(eq=False)
class EntryTable:
    """The entries of one pool.

    Args:
        grace_s: how long the slot of an expired ticket stays in quarantine, for a late writer.

    Attributes:
        num_live, num_complete: entries that are not dropped, and the readable ones of them.
        quarantine: the dropped entries whose slots are not free.
    """

    _arena: Arena
    _placement: Placement
    departures: Departures
    _clock: Callable[[], float]
    _grace_s: float
    _counters: dict[str, int]
    _pins: Pins
    num_live: int = field(default=0, init=False)
    num_complete: int = field(default=0, init=False)
    quarantine: Quarantine = field(default_factory=Quarantine, init=False)
    observers: list[Observer] = field(default_factory=list, init=False)

    def reserve(self, group: Group, runs: Sequence[BlockRun], ticket: Ticket) -> list[PutStatus] | None:
        """Has a ticket cover its shards of every block that is neither present nor being written.

        Returns the status of each block; None if room has to be made in further calls, by evicting more victims, or by
        zeroing (`Arena.claim`). Raises OutOfSpaceError if there are too few slots; nothing has changed then.
        """
        allocated = self._allocate(group, runs)
        if allocated is None:
            return None
        offsets = iter(allocated)
        stamp = ticket.stamp = ticket.stamp or self._placement.next_stamp([group])
        evictor = self._placement.evictor(group)
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

    def commit(self, entries: Sequence[Entry], ticket: Ticket, checksums: Sequence[int]) -> tuple[int, int]:
        """Makes a ticket's shards of its entries present, but for entries that were dropped meanwhile.

        Returns how many entries have these shards now, and how many of them are complete. The checksums are entries x
        shards, entry-major.
        """
        shards, num_committed, complete = ticket.shards, 0, list[Entry]()
        for nth, entry in enumerate(entries):
            entry.pending &= ~shards.mask
            if entry.live and entry.is_leaving:
                self.drop(entry)
            if not entry.live:
                self.free_if_unheld(entry)
                continue
            for shard, value in enumerate(checksums[nth * shards.count : (nth + 1) * shards.count], shards.start):
                entry.checksums[shard] = value
            entry.present |= shards.mask
            num_committed += 1
            if entry.complete:
                complete.append(entry)
            self.make_candidate(entry)
        if complete:
            self.num_complete += len(complete)
            complete[0].group.num_complete += len(complete)
            for observer in self.observers:
                observer.stored(complete)
        return num_committed, len(complete)

    def revoke(self, entry: Entry, ticket: Ticket) -> None:
        """Ends a ticket's reservation of an entry whose writer has stopped; frees the slot if it holds no shard."""
        entry.pending &= ~ticket.shards.mask
        if not entry.live:
            self.free_if_unheld(entry)
        elif not entry.present and not entry.pending:
            self.departures.left([entry], MissCause.PUT_FAILED)
            self.drop(entry)
        else:
            self.make_candidate(entry)

    def expire(self, entry: Entry, ticket: Ticket) -> None:
        """Drops an entry of an expired ticket. Its slot stays in quarantine for the grace: the writer may be late."""
        self.abandon(entry, ticket, ticket.deadline + self._grace_s)

    def abandon(self, entry: Entry, ticket: Ticket, not_before: float = 0.0) -> None:
        """Drops an entry to which a ticket's bytes may still be written; frees its slot not before a time.

        If the entry stayed, another writer could get its shards.
        """
        entry.pending &= ~ticket.shards.mask
        if entry.live:
            self.departures.left([entry], MissCause.PUT_FAILED)
            self.drop(entry, not_before)
        else:
            self._free_after(entry, not_before)

    def make_candidate(self, entry: Entry) -> None:
        """Queues an entry as a candidate for eviction, if it is a live leaf that is not being written."""
        if entry.live and not entry.children and not entry.pending:
            self._placement.evictor(entry.group).add(entry)

    def release(self, entry: Entry) -> None:
        """Ends a lease of an entry: after the last, a leaf is a candidate again, a dropped entry's slot is freed."""
        entry.leases -= 1
        if not entry.leases:
            if entry.live:
                self.make_candidate(entry)
            else:
                self.free_if_unheld(entry)

    def evict(self, victims: Sequence[Entry], evicted_for: Group | None = None) -> None:
        """Drops entries to free their slots, for a put into a group or in advance."""
        for victim in victims:
            if victim.pinned_until and victim.pinned_until > self._clock():
                self._counters["pin_given_back_blocks"] += 1
            if victim.complete:
                for observer in self.observers:
                    observer.evicted(victim)
            self.drop(victim)
        self.departures.left(victims, MissCause.EVICTED, evicted_for)
        self._counters["evicted_blocks"] += len(victims)

    def drop(self, entry: Entry, not_before: float = 0.0) -> None:
        """Removes an entry from the index; frees its slot once no hold covers it, and not before a time."""
        assert entry.live
        entry.live = False
        self._placement.evictor(entry.group).dropped(entry)
        if entry.pinned_until:
            self._pins.unpin(entry)
        entry.group.forget(entry)
        self.num_live -= 1
        if entry.complete:
            self.num_complete -= 1
            entry.group.num_complete -= 1
            for observer in self.observers:
                observer.removed(entry)
        if (parent := entry.parent) is not None:
            entry.parent = None
            parent.children -= 1
            if not parent.is_leaving:  # Such a parent is dropped soon, too.
                self.make_candidate(parent)
        if entry.pending:
            not_before = max(not_before, entry.pending_until + self._grace_s)
        self._free_after(entry, not_before)

    def _free_after(self, entry: Entry, until: float) -> None:
        """Frees a dropped entry's slot once a time is over and no hold covers the entry."""
        is_over = until <= self._clock()
        if is_over and entry.movable and entry not in self.quarantine:
            self._free(entry)  # As almost every slot.
        else:
            self.quarantine.add(entry, _OVER if is_over else until)
            self.free_if_unheld(entry)

    def free_if_unheld(self, entry: Entry) -> None:
        """Frees a dropped entry's slot if its quarantine is over and no hold covers it."""
        if self.quarantine.remove_if_over(entry):
            self._free(entry)

    def _free(self, entry: Entry) -> None:
        entry.group.num_slots -= 1
        self._arena.free(entry.offset)

    def free_expired(self, now: float, count: int) -> int:
        """Visits up to `count` slots whose quarantine may be over, and as many of the extent that is being drained.

        Returns how many slots in quarantine were visited and how many entries were evicted, in all.
        """
        num_visited = 0
        for entry in itertools.islice(self.quarantine.visit_due(now), count):
            num_visited += 1
            if entry is not None:
                self._free(entry)
        if victims := self._placement.drain.victims(now, count):
            self.evict(victims)
        return num_visited + len(victims)

    def drop_in_steps(self, entries: Sequence[Entry], cause: MissCause) -> Steps[int]:
        """Drops those of these entries that are live; returns how many, each removed block once."""
        dropped = 0
        for idx, entry in enumerate(entries):
            if idx and not idx % STEP_BLOCKS:
                yield
            if entry.live:
                # A clear that is under way has counted its blocks as removed already.
                dropped += cause is not MissCause.REMOVED or not entry.is_leaving
                self.departures.left([entry], cause)
                self.drop(entry)
        return dropped

    def drop_leaving(self, groups: Sequence[Group], count: int) -> int:
        """Drops up to `count` of the entries that have left the indexes of groups; returns how many."""
        dropped = 0
        for group in groups:
            if not group.leaving:
                continue
            leaving = list(itertools.islice(group.leaving.values(), count - dropped))
            self.departures.left(leaving, MissCause.REMOVED)
            for entry in leaving:
                self.drop(entry)
            dropped += len(leaving)
            if not group.leaving:
                group.leaving = BlockIndex()
        return dropped

    def _allocate(self, group: Group, runs: Sequence[BlockRun]) -> list[int] | None:
        """Slots for the blocks that have no entry yet; None if a later step has to. Raises OutOfSpaceError."""
        entries, count = group.find(runs)
        if not count:
            return []
        # The put must not evict any block that it names, or that its runs continue.
        parents = [group.index.get(run.parent_hash) for run in runs]
        kept = [*entries, *(parent for parent in parents if parent is not None)]
        for entry in kept:
            entry.leases += 1
        try:
            victims, are_enough = self._placement.victims(group, count)
        except SearchCutError:
            return None
        finally:
            for entry in kept:
                self.release(entry)
        self.evict(victims, evicted_for=group)
        if not are_enough or not self._arena.claim(group.spec.slot_bytes, count, group.tenant):
            return None
        offsets = self._arena.allocate(group.spec.slot_bytes, count, group.tenant)
        assert offsets is not None, "the victims left too few free slots"
        return offsets

    def _insert(
        self, group: Group, block_hash: bytes, parent: Entry | None, parent_hash: bytes, offset: int, stamp: int
    ) -> Entry:
        if (left := group.leaving.get(block_hash)) is not None:
            self.drop(left)  # Observers learn that a block has gone before they learn that it has come again.
        depth, sums = 0 if parent is None else parent.depth + 1, array("Q", bytes(8 * group.spec.num_shards))
        entry = Entry(group, block_hash, parent, offset, stamp, parent_hash, sums, depth)
        group.index.add(block_hash, entry)
        group.num_slots += 1
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
    if ticket.deadline < math.inf:  # The writer may be late; the server, which has no deadline, never is.
        entry.pending_until = max(entry.pending_until, ticket.deadline)
    entry.present &= ~mask
    ticket.entries.append(entry)
    return PutStatus.GRANTED
