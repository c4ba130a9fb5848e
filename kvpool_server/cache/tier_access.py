"""What the server itself does with whole blocks of a pool: write them, and read them.

The server's own tickets and leases have no deadline: whoever makes one ends it, in this process. The file stands in the
order of its paths: reserve, commit; pin, pin_next_victims, unpin_victims.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvpool.protocol.types import BlockRun, MissCause, PutGrant, ShardRange
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.eviction import Evictor
from kvpool_server.cache.leases import Lease
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.steps import Steps


class PinnedVictims(NamedTuple):
    """Entries that are to be evicted next, pinned until they are written to a tier.

    Args:
        lease_id: of the pin.
        entries: children before their parents.
        evictors: which chose each of them.
    """

    lease_id: int
    entries: list[Entry]
    evictors: list[Evictor]


def reserve(pool: Pool, group: Group, runs: Sequence[BlockRun]) -> Steps[PutGrant]:
    """As `Pool.put_start_in_steps`, of whole blocks, under a ticket that does not expire: end it with `commit`.

    Raises OutOfSpaceError, or UnknownNamespaceError if the namespace is closed.
    """
    shards = ShardRange(0, group.spec.num_shards)
    ticket, statuses = yield from pool.reserve_in_steps(group.fingerprint, runs, shards, math.inf)
    offsets = tuple(entry.offset for entry in ticket.entries)
    return PutGrant(ticket.id if offsets else 0, 0, tuple(statuses), offsets)


def commit(pool: Pool, ticket_id: int, checksums: Sequence[Sequence[int] | None]) -> int:
    """Ends a ticket of `reserve`; returns how many of its blocks are readable now.

    Args:
        checksums: the chunks' checksums of each granted block; None for a block that was not written.
    """
    ticket = pool.tickets.pop(ticket_id)
    assert ticket is not None, "a ticket without a deadline was lost"
    written: list[Entry] = []
    for entry, sums in zip(ticket.entries, checksums, strict=True):
        if sums is None:
            pool.entry_table.revoke(entry, ticket)
        else:
            written.append(entry)
    committed, _ = pool.entry_table.commit(written, ticket, [value for sums in checksums for value in sums or ()])
    return committed


def pin(pool: Pool, entries: Sequence[Entry]) -> int:
    """Leases live entries without a deadline; end the lease with `Pool.release`. The policies see no use of them."""
    lease = Lease(pool.new_id(), math.inf, list(entries))
    assert all(entry.live for entry in lease.entries), "a dropped entry cannot be pinned"
    for entry in lease.entries:
        entry.leases += 1
    pool.leases.add(lease)
    return lease.id


def pin_next_victims(pool: Pool, reserve: float, needs: Mapping[tuple[str, int], int], max_bytes: int) -> PinnedVictims:
    """Pins the entries that are to be evicted next; end that with `unpin_victims`.

    The arguments are those of `Placement.next_victims`. Raises SearchCutError: call again; no entry is pinned then.
    """
    pool.expire()
    entries = pool.placement.next_victims(reserve, needs, max_bytes)
    return PinnedVictims(pin(pool, entries), entries, [pool.placement.evictor(entry.group) for entry in entries])


def unpin_victims(pool: Pool, victims: PinnedVictims, *, drop: bool) -> int:
    """Unpins victims; with `drop`, drops those that are still unused leaves. Returns how many were dropped."""
    pool.leases.pop(victims.lease_id)  # A lease that is released lets many entries go over several calls.
    left: list[Entry] = []
    for entry in victims.entries:
        pool.entry_table.release(entry)
    for entry, evictor in zip(victims.entries, victims.evictors, strict=True):
        if entry.live and drop and entry.movable and not entry.children:
            left.append(entry)
            pool.entry_table.drop(entry)
        elif entry.live:
            pool.placement.keep(entry, evictor)
    pool.entry_table.departures.left(left, MissCause.EVICTED)
    pool.counters["evicted_blocks"] += len(left)
    return len(left)
