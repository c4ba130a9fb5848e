"""What the server itself does with whole blocks of a pool: write them, read them, and adopt those of its predecessor.

The server's own tickets and leases have no deadline: whoever makes one ends it, in this process. The file stands in the
order of its paths: reserve, commit; pin, pin_next_victims, unpin_victims; and the adoption of blocks whose bytes have
outlived the process of a pool, in their slots.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvpool.protocol.namespace import GroupSpec
from kvpool.protocol.types import BlockRun, MissCause, PutGrant, ShardRange
from kvpool_server.cache.arena import Extent
from kvpool_server.cache.entry import BlockIndex, Entry, Group, Record
from kvpool_server.cache.eviction import Evictor
from kvpool_server.cache.leases import Lease
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.steps import Steps


class PinnedVictims(NamedTuple):
    """Entries that are to be evicted next, pinned until they are written to a tier: children before their parents.

    `lease_id` is of the pin; `evictors` are those that chose each entry.
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

    `checksums` has those of the chunks of each granted block; None for a block that was not written.
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


_UNKNOWN_DEPTH = -(1 << 40)
"""Of a block without its parent; those that follow it are below 0, too."""


class Columns(NamedTuple):
    """Complete blocks of one group and one extent: `uses` are stamps, `pins` ends on the pool's clock."""

    offsets: Sequence[int]
    block_hashes: Sequence[bytes]
    parent_hashes: Sequence[bytes]
    checksums: Sequence[array[int]]
    uses: Sequence[int]
    pins: Sequence[int]


class Adoption:
    """Makes the blocks of a pool's predecessor readable in the pool, which is empty: `add` all, then `finish`.

    No observer is told.
    """

    def __init__(self, pool: Pool):
        self._pool = pool
        self.entries: list[Entry] = []
        self._members: dict[Group, list[Entry]] = {}
        self._orphans: list[Entry] = []
        self._pinned: list[tuple[Entry, int]] = []

    def add(self, group: Group, columns: Columns) -> list[Entry]:
        """Inserts the blocks whose names are new, in extents that are no other class's; returns their entries."""
        arena = self._pool.arena
        if not group.index:
            most = arena.num_extents * arena.slots_per_extent(group.spec.slot_bytes)
            group.index = BlockIndex(min(len(columns.offsets) * arena.num_extents, most))
        members, index, full = self._members.setdefault(group, []), group.index, group.full_mask
        in_extents: dict[int, list[Entry] | None] = {}  # None: the extent is another class's.
        extent_bytes, extent_end, here = arena.extent_bytes, 0, None
        slots_bytes = arena.slots_per_extent(group.spec.slot_bytes) * group.spec.slot_bytes
        added: list[Entry] = []
        now, last = self._pool.clock(), None
        for offset, name, parent_hash, sums, used, pin in zip(*columns, strict=True):
            if not extent_end - extent_bytes <= offset < extent_end:
                idx = offset // extent_bytes
                extent_end = (idx + 1) * extent_bytes
                if idx not in in_extents:
                    extent = arena.reopen(idx, group.slot_class)
                    in_extents[idx] = [] if extent is not None and extent.slot_class == group.slot_class else None
                here = in_extents[idx]
            if here is None or offset - extent_end + extent_bytes >= slots_bytes:
                continue  # The extents of the release before had more slots of a few bytes.
            # A put gives the blocks of a prefix slots side by side.
            is_next = last is not None and last.block_hash == parent_hash
            parent = last if is_next else index.get(parent_hash) if parent_hash else None
            depth = parent.depth + 1 if parent is not None else _UNKNOWN_DEPTH if parent_hash else 0
            entry = Entry(group, name, parent, offset, used, parent_hash, sums, depth, full)
            if not index.add(name, entry):
                continue
            here.append(entry)
            added.append(entry)
            last = entry
            if parent is not None:
                parent.children += 1
            elif parent_hash:
                self._orphans.append(entry)
            if pin > now:
                self._pinned.append((entry, pin))
        for idx, entries in in_extents.items():
            arena.occupy(idx, entries or ())
        members += added
        self.entries += added
        group.num_slots += len(added)
        group.num_complete += len(added)
        return added

    def finish(self, late_until: Mapping[int, float], learned: Mapping[tuple[str, int], bytes] = {}) -> None:
        """Queues the blocks for eviction, in the order of their last uses.

        Args:
            late_until: of extents that the predecessor used: until when somebody may still write to their free slots.
            learned: what the predecessor's policies have learned, by slot class.
        """
        pool = self._pool
        self._link_orphans()
        table = pool.entry_table
        table.num_live += len(self.entries)
        table.num_complete += len(self.entries)
        for group, members in self._members.items():
            if members:
                pool.placement.adopt(group, members, learned.get(group.slot_class, b""))
        for entry, until in sorted(self._pinned, key=lambda each: each[0].depth):  # A pin needs its parent's.
            pool.pins.pin(entry, until, pool.clock())
        for idx, end in late_until.items():
            if end > pool.clock() and (extent := pool.arena.reopen(idx, ("", pool.arena.extent_bytes))) is not None:
                self._quarantine(extent, end)
        pool.arena.distrust_unused()

    def parents_first(self) -> Iterator[Entry]:
        """All entries, each behind its parent."""
        told: set[Entry] = set()
        for entry in self.entries:
            path: list[Entry] = []
            above: Entry | None = entry
            while above is not None and above not in told:
                told.add(above)
                path.append(above)
                above = above.parent
            yield from reversed(path)

    def _link_orphans(self) -> None:
        """Gives blocks that were added before their parents these, and all that follow them their depths."""
        for entry in self._orphans:
            if (parent := entry.group.index.get(entry.parent_hash)) is not None:
                entry.parent = parent
                parent.children += 1
        for entry in [each for each in self.entries if each.depth < 0]:
            path: dict[Entry, None] = {}
            above: Entry | None = entry
            while above is not None and above.depth < 0:
                if above in path:  # A client that makes up hashes can have two blocks follow each other.
                    last = next(reversed(path))
                    last.parent = None
                    above.children -= 1
                    break
                path[above] = None
                above = above.parent
            first = 0 if above is None or above.depth < 0 else above.depth + 1
            for depth, each in enumerate(reversed(path), first):
                each.depth = depth

    def _quarantine(self, extent: Extent, until: float) -> None:
        """Keeps the free slots of an extent from being used, at nobody's charge. An unused extent is one slot."""
        slot_bytes = extent.slot_bytes
        nobodys = Group(GroupSpec("", 0, 0, 0, 0, 1, slot_bytes))
        entries = [Entry(nobodys, b"", None, extent.start + slot * slot_bytes, 0) for slot in extent.free]
        for entry in entries:
            entry.live = False
            self._pool.entry_table.quarantine.add(entry, until)
        nobodys.num_slots = len(entries)
        self._pool.arena.occupy(extent.start // self._pool.arena.extent_bytes, entries)


def restore(pool: Pool, found: Mapping[Group, Sequence[Record]]) -> None:
    """Makes the blocks of a journal readable in a pool that is empty, where their offsets are slots of their size.

    Args:
        found: the blocks of each group, parents before their children; no two have one offset.
    """
    adoption, arena = Adoption(pool), pool.arena
    for group, records in found.items():
        fitting = [
            record
            for record in records
            if record.offset < arena.arena_bytes and record.offset % arena.extent_bytes % group.spec.slot_bytes == 0
        ]
        stamp, count = pool.placement.next_stamp([group]), len(fitting)
        names, parents, offsets, sums, _ = zip(*fitting, strict=True) if fitting else [()] * len(Record._fields)
        added = adoption.add(group, Columns(offsets, names, parents, sums, [stamp] * count, [0] * count))
        policy = pool.placement.evictor(group).policy
        # Entries that each follow the one before were stored together.
        starts = [nth for nth, entry in enumerate(added) if not nth or entry.parent is not added[nth - 1]]
        for start, stop in itertools.pairwise([*starts, len(added)]):
            policy.stored(added[start:stop], stamp)
    adoption.finish({})
