"""A server's start with the memory of the one before: whether it may have it, and what of it becomes readable again.

Nothing in the arena is read. A block is readable again if its record is whole and its namespace is open; whoever loads
it compares checksums. What clients of the last server may still write lies in slots without a record, which stay in
quarantine for as long as their tickets may last. From then on `TableFollower` keeps the table for the next server.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from kvpool.protocol.errors import KVPoolError
from kvpool.transport.segment import Segment, is_abandoned, why_other
from kvpool_server.cache.arena import EXTENTS_PER_ARENA, MIN_EXTENTS, Arena
from kvpool_server.cache.entry import Entry, Group, Observer
from kvpool_server.cache.eviction import Policy
from kvpool_server.cache.leases import Ticket
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.server_access import Adoption, Columns
from kvpool_server.cache.steps import Run, Steps, finish
from kvpool_server.keeping import store
from kvpool_server.keeping.table import (
    NAMESPACES,
    POLICIES,
    TABLE,
    Geometry,
    Kind,
    SlotTable,
    file_bytes,
    geometry_of,
    num_begun,
)
from kvpool_server.process.runtime import no_collections

log = structlog.get_logger()

ARENA = "kvpool-arena"
ABANDONED_S = 5.0
UNMAPPED_BYTES_PER_S = 8 << 30
"""How long a start waits for the end of processes that may still write to the memory: the kernel takes a part of a
second to unmap each of their gibibytes."""
LOOK_EVERY_S = 0.02
MAX_EXTENTS = 8 * EXTENTS_PER_ARENA
"""Of memory that has grown: its extents keep their size."""
MAX_BEGUN = 2
"""Adoptions that may begin and not end: what lies in the memory may be why."""
MARK_EVERY_S = 30.0
"""How often last uses and pins are written: a later server has those of so long ago at most."""
MARKED_SLOTS = 2_048
"""Of one step, within half a millisecond."""


class KeptMemory:
    """What the manager has kept of the server before, for an arena of `nbytes`; given up unless settings want it kept.

    Attributes:
        extent_bytes: of an extent there; None if there is nothing, or nothing that can be adopted.
    """

    def __init__(self, nbytes: int, *, has_tenants: bool, is_kept: bool):
        self._found, self._why = store.take(), "--keep no"
        self._geometry: Geometry | None = None
        if self._found and is_kept:
            try:
                self._geometry = _adoptable(self._found, nbytes, has_tenants)
            except (OSError, _RefusedError) as error:
                self._why = str(error)
        self.extent_bytes = None if self._geometry is None else self._geometry.extent_bytes

    async def take(self) -> tuple[Segment, SlotTable] | None:
        """The memory, of whatever size, and its table, which this process owns from now on.

        None if there is none, or it cannot be adopted: the log says why, and the manager has forgotten it.
        """
        if not self._found:
            return None
        if self._geometry is not None:
            try:
                return await _adopted(self._found, self._geometry)
            except (OSError, _RefusedError) as error:
                self._why = str(error)
        log.warning("the memory of the server before is given up, and the pool begins empty", reason=self._why)
        for name, fds in self._found.items():
            for fd in fds:
                with contextlib.suppress(OSError):  # What maps the file may have closed it.
                    os.close(fd)
            with contextlib.suppress(OSError):
                store.remove(name)
        return None


class _RefusedError(Exception):
    """Why memory cannot be adopted."""


def _adoptable(found: Mapping[str, Sequence[int]], nbytes: int, has_tenants: bool) -> Geometry:
    """The geometry of the memory of these descriptors. Raises _RefusedError and OSError."""
    if {name: len(each) for name, each in found.items()} != {ARENA: 1, TABLE: 1}:
        raise _RefusedError("it is not one arena and one table")
    (segment_fd,), (table_fd,) = found[ARENA], found[TABLE]
    if (before := geometry_of(table_fd)) is None:
        raise _RefusedError("its table is of another release")
    if before.has_tenants != has_tenants:
        raise _RefusedError(f"TLS was {'on' if before.has_tenants else 'off'}")
    if not MIN_EXTENTS <= nbytes // before.extent_bytes <= MAX_EXTENTS:
        raise _RefusedError(f"--memory is not {MIN_EXTENTS} to {MAX_EXTENTS} times {before.extent_bytes} bytes")
    if why := why_other(segment_fd, before.arena_bytes, before.nonce):
        raise _RefusedError(why)
    if os.fstat(table_fd).st_size != file_bytes(before.num_extents):
        raise _RefusedError("its table has another size")
    if num_begun(table_fd) >= MAX_BEGUN:
        raise _RefusedError(f"{MAX_BEGUN} servers have not got over its adoption")
    return before


async def _adopted(found: Mapping[str, Sequence[int]], before: Geometry) -> tuple[Segment, SlotTable]:
    """The memory of these descriptors. Raises _RefusedError and OSError."""
    (segment_fd,), (table_fd,) = found[ARENA], found[TABLE]
    patience_s = ABANDONED_S + before.arena_bytes / UNMAPPED_BYTES_PER_S
    ends_at = time.monotonic() + patience_s
    while not is_abandoned(segment_fd):
        if time.monotonic() > ends_at:
            raise _RefusedError(f"a process of that server still runs after {patience_s:.0f} s")
        await asyncio.sleep(LOOK_EVERY_S)
    table = SlotTable.reopen(table_fd)
    try:
        segment = Segment.adopt(segment_fd, before.arena_bytes, before.token)
    except OSError:
        table.close()
        raise
    return segment, table


def make_table(arena: Arena, segment: Segment, secret: int = 0) -> SlotTable | None:
    """The table of new memory, both of which the manager keeps from now on; None, and a warning, if it cannot."""
    geometry = Geometry(arena.arena_bytes, arena.extent_bytes, arena.has_tenants, segment.nonce, segment.token, secret)
    table = None
    try:
        table = SlotTable.create(geometry)
        for name, fd in ((ARENA, segment.fd), (TABLE, table.fd)):
            store.give(name, fd)
    except OSError as error:
        log.warning("nobody keeps the memory: it ends with this process", reason=str(error))
        if table is not None:
            table.close()
        with contextlib.suppress(OSError):
            store.remove(ARENA)
        return None
    return table


@no_collections()
def restore(pool: Pool, table: SlotTable, named_quotas: Container[str] = ()) -> tuple[Adoption, TableFollower]:
    """Makes the table's blocks readable in a pool that is empty, and has the table follow the pool from now on.

    Args:
        named_quotas: subjects whose quotas the settings give; those of others come from the table.
    """
    table.begin()
    adoption, places, groups = Adoption(pool), dict[bytes, int](), dict[Kind, Group]()
    for quota in [each for each in table.quotas() if each.subject not in named_quotas]:
        try:
            finish(pool.set_quotas_in_steps([quota]))
        except KVPoolError as error:  # The arena may have become too small for it.
            log.warning("a quota of the server before is given up", reason=str(error))
    for place, spec in table.namespaces():
        try:
            namespace, _ = pool.open_namespace(spec)
        except KVPoolError as error:
            log.warning("blocks of the server before are given up", model=spec.model, reason=str(error))
            table.clear_namespace(place)
        else:
            places[namespace.fingerprint] = place
            specs = ((group, group.spec) for group in namespace.groups)
            groups |= {Kind(place, group.idx, spec.slot_bytes, spec.num_shards): group for group, spec in specs}

    def keep(kind: Kind, columns: Columns) -> list[int]:
        group = groups.get(kind)
        return [] if group is None else [entry.offset for entry in adoption.add(group, columns)]

    for idx in range(pool.arena.num_extents):
        table.sift(idx, keep)
    latest = pool.clock() + (pool.limits.max_ttl_ms + pool.limits.grace_ms) / 1000
    late_until = {idx: min(until, latest) for idx, until in enumerate(table.late_until) if table.slot_bytes(idx)}
    stamp, learned = table.learned()
    pool.placement.stamp = max(pool.placement.stamp, stamp)  # What was learned is of no later time.
    # Where callers are authenticated, no client maps the arena.
    adoption.finish({} if pool.arena.has_tenants else late_until, learned)
    pool.counters["adopted_blocks"] = len(adoption.entries)
    return adoption, TableFollower(pool, table, places, named_quotas)


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
