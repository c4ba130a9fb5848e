"""Recomputes a pool's invariants from scratch. It looks at parts of a pool that nobody else needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvpool_server.cache.arena import Arena
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.hints import Pins
from kvpool_server.cache.leases import Hold, Lease, Ticket
from kvpool_server.cache.pool import Pool


def check_integrity(pool: Pool) -> None:
    """Raises AssertionError if an invariant does not hold. Visits every slot."""
    namespaces = (*pool.namespaces.values(), *pool.namespaces.closing.values())
    entries = [entry for namespace in namespaces for entry in namespace.entries()]
    quarantined, holds = {entry.offset: entry for entry in pool.entry_table.quarantine}, pool._holds
    _check_slots(pool.arena, entries, quarantined)
    pinning = [Lease(0, 0.0, pinned) for pinned in holds.pinning]
    leases = [*holds.leases.values(), *holds._unfinished.values(), *holds._ended_leases, *pinning]
    tickets = [*holds.tickets.values(), *holds.writing, *(ticket for ticket, _ in holds._ended_tickets)]
    _check_holds(entries, list(quarantined.values()), leases, tickets)
    _check_prefixes(entries)
    now = pool.clock()
    pool.pins.expire(now)
    _check_pins(pool.pins, entries, now)
    assert len(entries) == pool.entry_table.num_live, "the count of entries is off"
    assert sum(entry.complete for entry in entries) == pool.entry_table.num_complete, "the count is off"


def _check_slots(arena: Arena, entries: Sequence[Entry], quarantined: Mapping[int, Entry]) -> None:
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
    num_idle = len(arena.unused_extents())
    assert sum(arena.tenants().values()) + num_idle == arena.num_backed, "extents are lost"


def _check_holds(
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


def _check_prefixes(entries: Sequence[Entry]) -> None:
    """Children are counted right, and every idle leaf is a candidate of its policy."""
    children = Counter(id(entry.parent) for entry in entries if entry.parent is not None and entry.parent.live)
    for entry in entries:
        assert entry.live and entry.children == children[id(entry)], "a child count is off"
        assert entry.present or entry.pending, "an entry has no shard and no writer"
        is_candidate = entry.queued is not None or entry.is_leaving
        assert is_candidate or entry.children or not entry.movable, "an idle leaf can never be evicted"


def _check_pins(pins: Pins, entries: Iterable[Entry], now: float) -> None:
    """Pins end with those before them, their bytes are counted right, and budgets hold."""
    pinned = [entry for entry in entries if entry.pinned_until > now]
    nbytes: Counter[bytes] = Counter()
    for entry in pinned:
        nbytes[entry.group.fingerprint] += entry.group.spec.slot_bytes
        parent = entry.parent
        is_kept = parent is None or not parent.live or parent.pinned_until >= entry.pinned_until
        assert is_kept, "a pin outlives that of a block before it"
    counted = {fingerprint: total for fingerprint in pins._by_namespace if (total := pins.pinned_bytes(fingerprint))}
    assert counted == dict(nbytes), "the bytes of pins are off"
    assert pins.pinned_bytes() == sum(counted.values()), "the bytes of tenants are off"
    for budget in pins.budgets():
        assert budget.used_bytes <= budget.limit_bytes, "a tenant has pinned more than its budget"
