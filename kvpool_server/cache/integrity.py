"""Recomputes a pool's invariants from scratch; for tests, and for debugging a running server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvpool_server.cache.allocator.arena import Arena
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.leases import Hold, Ticket


def check_slots(arena: Arena, entries: Sequence[Entry], quarantined: Mapping[int, Entry]) -> None:
    """free + reserved + resident + quarantined = capacity, and the index and the arena agree on each slot's owner."""
    by_offset = {entry.offset: entry for entry in entries}
    assert len(by_offset) == len(entries), "two entries share a slot"
    assert not by_offset.keys() & quarantined.keys(), "a quarantined slot is in use"
    capacity = used = 0
    for tenant, size in arena.classes():
        for extent in arena.extents(size, tenant):
            capacity += len(extent.owners)
            used += extent.num_used
            free_slots = set(extent.free)
            for slot, owner in enumerate(extent.owners):
                offset = extent.start + slot * size
                expected = by_offset.get(offset) or quarantined.get(offset)
                assert owner is expected, f"slot {offset} is owned by another entry than the index has there"
                assert owner is None or owner.group.tenant == tenant, f"slot {offset} is another tenant's"
                assert (owner is None) == (slot in free_slots), f"slot {offset} is both free and owned"
    reserved = sum(1 for entry in entries if entry.pending)
    resident = len(entries) - reserved
    free = capacity - used
    assert free + reserved + resident + len(quarantined) == capacity, "slots are lost"
    slots = Counter(entry.group for entry in (*entries, *quarantined.values()))
    assert all(group.num_slots == count for group, count in slots.items()), "a count of slots is off"
    held = Counter(tenant for tenant, size in arena.classes() for _ in arena.extents(size, tenant))
    assert all(arena.num_held(tenant) >= count for tenant, count in held.items()), "a count of extents is off"
    assert sum(arena.tenants().values()) + len(arena.unused_extents()) == arena.num_backed, "extents are lost"


def check_holds(
    entries: Sequence[Entry], quarantined: Sequence[Entry], leases: Sequence[Hold], tickets: Sequence[Ticket]
) -> None:
    """Leases and tickets agree with the counts and bitmaps of entries."""
    leased = Counter(id(entry) for lease in leases for entry in lease.entries)
    pending: Counter[int] = Counter()
    for ticket in tickets:
        for entry in ticket.entries:
            assert not pending[id(entry)] & ticket.shards.mask, "two tickets cover one shard"
            pending[id(entry)] |= ticket.shards.mask
    for entry in (*entries, *quarantined):
        assert entry.leases == leased[id(entry)], "a lease count is off"
        assert entry.pending == pending[id(entry)], "pending shards without a ticket"
        assert not entry.present & entry.pending, "a shard is both present and being written"


def check_prefixes(entries: Sequence[Entry]) -> None:
    """Children are counted right, and every idle leaf is a candidate of its policy."""
    children = Counter(id(entry.parent) for entry in entries if entry.parent is not None and entry.parent.live)
    for entry in entries:
        assert entry.live and entry.children == children[id(entry)], "a child count is off"
        assert entry.present or entry.pending, "an entry has no shard and no writer"
        is_candidate = entry.queued is not None or entry.is_leaving
        assert is_candidate or entry.children or entry.pending, "an idle leaf can never be evicted"
