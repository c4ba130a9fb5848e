"""The permits that replies have for the data port: to write a ticket's regions, to read a lease's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvpool.data_port import Kind, pack_offsets
from kvpool.types import BlockRun, Lookup, Slots
from kvpool_server.cache.leases import Owner
from kvpool_server.cache.pool import Pool
from kvpool_server.data_plane.permits import NO_BOUND, Bound, PermitTable


class RegionPermits:
    """For the tickets and leases of one pool.

    Args:
        table: of the permits in force.
    """

    def __init__(self, pool: Pool, table: PermitTable):
        self._pool = pool
        self._table = table

    def of_slots(
        self, found: Lookup, fingerprint: bytes, runs: Sequence[BlockRun], deadline_ns: int, owner: Owner
    ) -> Lookup:
        """The same answer, with permits to read whole slots; without them if the lease has ended meanwhile."""
        if not self._is_live(Kind.READ, found.lease_id):
            return found
        slots, bound = [], self._bound(owner)
        for run, each in zip(runs, found.slots, strict=True):
            if each.offsets:
                region_bytes = self._pool.slot_bytes(fingerprint, run)
                offsets = np.frombuffer(each.offsets, "<u8")
                permit = self._table.permit(Kind.READ, found.lease_id, deadline_ns, region_bytes, offsets, bound)
                each = Slots(each.offsets, each.checksums, permit)
            slots.append(each)
        return dataclasses.replace(found, slots=tuple(slots))

    def of_regions(
        self, kind: Kind, hold_id: int, deadline_ns: int, region_bytes: int, offsets: Sequence[int], owner: Owner
    ) -> bytes:
        """The right to move regions until their ticket or lease ends; empty if it has ended meanwhile."""
        if not self._is_live(kind, hold_id):
            return b""
        packed = pack_offsets(offsets)
        return self._table.permit(kind, hold_id, deadline_ns, region_bytes, packed, self._bound(owner))

    def _is_live(self, kind: Kind, hold_id: int) -> bool:
        """Whether a ticket or lease has not ended since the call's last step. Nobody would end a later permit of it."""
        return hold_id in (self._pool.leases if kind is Kind.READ else self._pool.tickets)

    def _bound(self, owner: Owner) -> Bound:
        """Of the owner's connections to the data port."""
        return Bound.of(owner.name, self._pool.limits_of(owner.name).connections) if owner.tenant else NO_BOUND
