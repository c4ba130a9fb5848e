"""Moves of whole blocks between a pool and what lies under it.

Up, the server itself is the writer; down, the reader. It ends what it begins, so its tickets and leases have no
deadline. The file stands in the order of its paths: raise_start, raise_end, restore; hold, hold_next_victims, let_go.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvpool.types import BlockRun, PutGrant, ShardRange
from kvpool_server.cache.entry import Entry, Group, Record
from kvpool_server.cache.eviction import Evictor
from kvpool_server.cache.leases import Lease
from kvpool_server.cache.pool import Pool


class Ahead(NamedTuple):
    """Entries that are to go, held until their bytes lie elsewhere.

    Args:
        lease_id: of the hold.
        entries: children before their parents.
        evictors: by which each was chosen.
    """

    lease_id: int
    entries: list[Entry]
    evictors: list[Evictor]


class Moves:
    """Of one pool. It has no state: whoever moves blocks may have one of its own."""

    def __init__(self, pool: Pool):
        self._pool = pool

    # Up: the server is the writer

    def raise_start(self, group: Group, runs: Sequence[BlockRun]) -> PutGrant:
        """As `Pool.put_start`, of whole blocks of a group, with a ticket that does not expire."""
        return self._pool.put_start(group.fingerprint, runs, ShardRange(0, group.spec.num_shards), expires=False)

    def raise_end(self, ticket_id: int, checksums: Sequence[Sequence[int] | None]) -> int:
        """Commits those of a ticket's blocks that came; returns how many are readable now.

        Args:
            checksums: of each granted block those of its chunks; None: it did not come.
        """
        ticket = self._pool.tickets.pop(ticket_id)
        assert ticket is not None, "a ticket that does not expire was lost"
        entry_table, raised = self._pool.entry_table, 0
        for entry, sums in zip(ticket.entries, checksums, strict=True):
            if sums is None:
                entry_table.take_back(entry, ticket)
            else:
                raised += entry_table.commit(entry, ticket, sums)
        return raised

    def restore(self, group: Group, records: Sequence[Record]) -> int:
        """Takes complete blocks back in where they lie; returns how many: those whose place is free.

        For a pool whose bytes outlive it, before it has an observer. Parents come before their children, and what was
        used last comes last.
        """
        entry_table, arena = self._pool.entry_table, self._pool.arena
        placed = arena.restore(group.spec.slot_bytes, [record.offset for record in records])
        evictor = entry_table.placement.evictor(group)
        stamp = entry_table.next_stamp([group])
        restored = 0
        chain: list[Entry] = []
        for record, is_placed in zip(records, placed, strict=True):
            if is_placed and record.block_hash in group.index:
                arena.free(record.offset)
            elif is_placed:
                parent = group.index.get(record.parent_hash)
                if chain and parent is not chain[-1]:
                    evictor.stored(chain, stamp)
                    chain = []
                chain.append(entry_table.restore(group, record, parent, stamp))
                restored += 1
        if chain:
            evictor.stored(chain, stamp)
        for entry in group.index.values():
            entry_table.offer(entry)
        return restored

    # Down: the server is the reader

    def hold(self, entries: Sequence[Entry]) -> int:
        """A lease on entries that are there, which ends when it is released; no use of them, for the policy."""
        lease = Lease(self._pool.new_id(), math.inf, list(entries))
        for entry in lease.entries:
            assert entry.live, "a dropped entry cannot be held"
            entry.leases += 1
        self._pool.leases.add(lease)
        return lease.id

    def hold_next_victims(self, reserve: float, needs: Mapping[int, int], max_bytes: int) -> Ahead:
        """Holds entries that should go soon; see `Placement.next_victims` and `let_go`. Superseded ones go at once."""
        self._pool.expire()
        entry_table = self._pool.entry_table
        entry_table.evict(entry_table.placement.superseded_ahead(reserve, needs))
        entries = entry_table.placement.next_victims(reserve, needs, max_bytes).entries
        return Ahead(self.hold(entries), entries, [entry_table.placement.evictor(entry.group) for entry in entries])

    def let_go(self, ahead: Ahead, *, drop: bool) -> int:
        """Ends that hold, and drops those that nobody has come to need meanwhile, if they may go; returns how many."""
        self._pool.release([ahead.lease_id])
        entry_table, dropped = self._pool.entry_table, 0
        for entry, evictor in zip(ahead.entries, ahead.evictors, strict=True):
            if not entry.live:
                continue
            if drop and entry.movable and not entry.children:
                entry_table.drop(entry)
                dropped += 1
            else:
                entry_table.placement.spare(entry, evictor)
        self._pool.counters["evicted_blocks"] += dropped
        return dropped
