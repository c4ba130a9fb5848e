"""Writes the table beside the arena: what becomes readable, and what stops being readable, inside the pool's calls."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from kvpool_server.cache.entry import Entry, Group, Observer
from kvpool_server.cache.eviction import Policy
from kvpool_server.cache.leases import Ticket
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.steps import Run, Steps
from kvpool_server.keeping.table import NAMESPACES, POLICIES, SlotTable

MARK_EVERY_S = 30.0
"""How often last uses and pins are written: a later server has those of so long ago at most."""
MARKED_SLOTS = 2_048
"""Of one step, within half a millisecond."""


@dataclass(eq=False)
class TableFollower(Observer):
    """Keeps a table equal to a pool. Make it when the pool has what the table has, and nothing else.

    Args:
        places: of the namespaces that the table has, by fingerprint.
        named_quotas: subjects whose quotas the settings give, and the table need not.
    """

    _pool: Pool
    _table: SlotTable
    _places: dict[bytes, int] = field(default_factory=dict)
    named_quotas: Container[str] = ()

    def __post_init__(self) -> None:
        pool = self._pool
        self._free = [place for place in range(NAMESPACES - 1, -1, -1) if place not in self._places.values()]
        self._keys: dict[Group, int | None] = {}  # Their namespace's place; None: they are not kept.
        pool.observe(self)
        pool.on_closed.append(self._closed)
        pool.on_quotas = self._put_quotas
        pool.arena.on_extent = self._table.put_extent
        pool.on_ticket = self._granted
        self._put_quotas()

    def stored(self, entries: Sequence[Entry]) -> None:
        group = entries[0].group
        if (place := self._keys.get(group, -1)) == -1:
            place = self._keys[group] = self._place(group)
        if place is not None:
            self._table.put(place, entries)

    def removed(self, entry: Entry) -> None:
        self._table.clear(entry)

    def _place(self, group: Group) -> int | None:
        """Where a group's namespace is in the table; None if it is closed or measured only, or has no room there."""
        namespace = None if group.is_measurement else self._pool.namespaces.find(group.fingerprint)
        if namespace is None:
            return None
        place = self._places.get(group.fingerprint)
        order = round(namespace.opened_at * 1e9)
        if place is None and self._free and self._table.put_namespace(self._free[-1], order, namespace.spec):
            place = self._places[group.fingerprint] = self._free.pop()
        return place

    def _closed(self, namespace: PoolNamespace) -> None:
        for group in namespace.groups:
            self._keys.pop(group, None)
        if (place := self._places.pop(namespace.fingerprint, None)) is not None:
            self._table.clear_namespace(place)
            self._free.append(place)

    def _granted(self, ticket: Ticket) -> None:
        if ticket.deadline < math.inf:  # Those without one are the server's own.
            extent_bytes = self._table.extent_bytes
            for idx in {entry.offset // extent_bytes for entry in ticket.entries}:
                self._table.put_late(idx, ticket.deadline + self._pool.limits.grace_ms / 1000)

    def _put_quotas(self) -> None:
        self._table.put_quotas([each for each in self._pool.quotas() if each.subject not in self.named_quotas])

    async def run(self, run: Run) -> None:
        """Writes last uses and pins now and then, until cancelled."""
        while True:
            await asyncio.sleep(MARK_EVERY_S)
            await run(self.mark())

    def mark(self) -> Steps[None]:
        """Writes the last uses of all entries, the ends of their pins, and what the policies have learned."""
        arena = self._pool.arena
        policies: dict[tuple[str, int], Policy] = {}
        for slot_class, policy in self._pool.placement.policies():
            policies.setdefault(slot_class, policy)
        chosen = list(policies.items())[:POLICIES]
        for place, (slot_class, policy) in enumerate(chosen):
            self._table.put_learned(place, self._pool.placement.stamp, slot_class, policy.learned())
            yield
        for place in range(len(chosen), POLICIES):
            self._table.put_learned(place, 0)
        for tenant, slot_bytes in arena.classes():
            for extent in arena.extents(slot_bytes, tenant):
                for start in range(0, len(extent.owners), MARKED_SLOTS):
                    if not extent.num_used:  # It may be another's by now.
                        break
                    of_groups: dict[Group, list[Entry]] = {}
                    for owner in extent.owners[start : start + MARKED_SLOTS]:
                        if owner is not None:
                            of_groups.setdefault(owner.group, []).append(owner)
                    for entries in of_groups.values():
                        self._table.mark(entries)
                    yield
