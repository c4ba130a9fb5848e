"""Blocks whose bytes have outlived the process of a pool, in their slots: a new pool gets them back."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvpool_server.cache.entry import BlockIndex, Entry, Group, Record
from kvpool_server.cache.pool import Pool


def restore(pool: Pool, group: Group, records: Sequence[Record]) -> int:
    """Inserts complete blocks whose bytes outlived the last process; returns how many: those whose slot is free.

    Give parents before their children, the most recently used last, and before the pool has an observer: none is told.
    """
    entry_table, arena = pool.entry_table, pool.arena
    placed = arena.restore(group.spec.slot_bytes, [record.offset for record in records])
    evictor = pool.placement.evictor(group)
    stamp = pool.placement.next_stamp([group])
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
        entry_table.make_candidate(entry)
    return restored


_UNKNOWN_DEPTH = -(1 << 40)
"""Of a block without its parent; those that follow it are below 0, too."""


class Columns(NamedTuple):
    """Complete blocks of one group and one extent.

    Args:
        uses: stamps of their last uses.
        pins: the ends of their pins, on the pool's clock.
    """

    offsets: Sequence[int]
    block_hashes: Sequence[bytes]
    parent_hashes: Sequence[bytes]
    checksums: Sequence[array[int]]
    uses: Sequence[int]
    pins: Sequence[int]


class Adoption:
    """Makes the blocks of a pool's predecessor readable in the pool, which is empty: `add` all, then `finish`.

    No observer is told.

    Attributes:
        entries: so far.
    """

    def __init__(self, pool: Pool):
        self._pool = pool
        self.entries: list[Entry] = []
        self._members: dict[Group, list[Entry]] = {}
        self._orphans: list[Entry] = []
        self._pinned: list[tuple[Entry, int]] = []

    def add(self, group: Group, columns: Columns) -> list[int]:
        """Inserts the blocks whose names are new, if their extent is not another class's; returns their offsets."""
        arena = self._pool.arena
        if (extent := arena.reopen(columns.offsets[0] // arena.extent_bytes, group.slot_class)) is None:
            return []
        if not group.index:
            group.index = BlockIndex(len(columns.offsets) * arena.num_extents)
        members, index, full = self._members.setdefault(group, []), group.index, group.full_mask
        added: list[Entry] = []
        now, last = self._pool.clock(), None
        for offset, name, parent_hash, sums, used, pin in zip(*columns, strict=True):
            # A put gives the blocks of a prefix slots side by side.
            is_next = last is not None and last.block_hash == parent_hash
            parent = last if is_next else index.get(parent_hash) if parent_hash else None
            entry = Entry(group, name, parent, offset, used, parent_hash, sums)
            if not index.add(name, entry):
                continue
            entry.present = full
            added.append(entry)
            last = entry
            if parent is not None:
                parent.children += 1
            elif parent_hash:
                self._orphans.append(entry)
                entry.depth = _UNKNOWN_DEPTH
            if pin > now:
                self._pinned.append((entry, pin))
        arena.occupy(extent, added)
        members += added
        self.entries += added
        group.num_slots += len(added)
        group.num_complete += len(added)
        return [entry.offset for entry in added]

    def finish(self, extents: Sequence[int], quarantine_until: float) -> None:
        """Queues the blocks for eviction, in the order of their last uses.

        Args:
            extents: that the predecessor used.
            quarantine_until: until when somebody may still write to the slots there that are free.
        """
        pool = self._pool
        self._link_orphans()
        table = pool.entry_table
        table.num_live += len(self.entries)
        table.num_complete += len(self.entries)
        for group, members in self._members.items():
            if members:
                pool.placement.adopt(group, members)
        for entry, until in sorted(self._pinned, key=lambda each: each[0].depth):  # A pin needs its parent's.
            pool.pins.pin(entry, until, pool.clock())
        if quarantine_until > pool.clock():
            for group in {group.slot_class: group for group in self._members}.values():
                self._quarantine(group, quarantine_until)
            for idx in extents:
                pool.arena.rest(idx)
            pool.entry_table.rests_until = quarantine_until
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

    def _quarantine(self, group: Group, until: float) -> None:
        """Keeps the free slots of a class from being used, at nobody's charge."""
        pool, (tenant, slot_bytes) = self._pool, group.slot_class
        nobodys = Group(group.spec, tenant=tenant)
        for offset in pool.arena.allocate(slot_bytes, pool.arena.num_free(slot_bytes, tenant), tenant) or []:
            entry = Entry(nobodys, b"", None, offset, 0)
            entry.live = False
            pool.arena.assign(offset, entry)
            nobodys.num_slots += 1
            pool.entry_table.quarantine.add(entry, until)
