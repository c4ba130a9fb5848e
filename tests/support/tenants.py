"""A pool whose namespaces, sizes and tenants share an arena of extents of `EXTENT` bytes; entries without bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress

from kvpool.protocol.errors import OutOfSpaceError
from kvpool.protocol.types import Quota, ShardRange
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.eviction import Policy
from kvpool_server.cache.eviction.policy import PrefixLRU
from kvpool_server.sharing import Limits
from testbed.pool_at_once import PoolAtOnce
from tests.support.clock import FakeClock
from tests.support.integrity import check_integrity
from tests.support.values import group_spec, namespace_spec, run_of

EXTENT = 1_000
WHOLE = ShardRange(0, 1)


class Owner:
    """One namespace of one group, and what it stored."""

    def __init__(self, house: House, size: int, tenant: str, salt: str):
        self.house = house
        self.pool = house.pool
        self.size = size
        spec = namespace_spec(group_spec(chunk_bytes=size), tenant=tenant, salt=salt)
        self.spec = spec
        self.fingerprint = self.pool.open_namespace(spec)[0].fingerprint

    def open(self) -> None:
        self.pool.open_namespace(self.spec)

    def put(self, *names: object, parent: object = None) -> None:
        """Stores the blocks of one prefix."""
        grant = self.pool.put_start(self.fingerprint, [run_of(*names, parent=parent)], WHOLE)
        if grant.ticket_id:
            self.pool.put_end(grant.ticket_id, [0] * len(grant.offsets))
        check_integrity(self.pool)

    def store(self, count: int = 1) -> list[int]:
        """Stores `count` unrelated blocks; returns their names."""
        names = [next(self.house.names) for _ in range(count)]
        for name in names:
            self.put(name)
        return names

    def fill_extents(self, count: int) -> list[int]:
        return self.store(count * (EXTENT // self.size))

    def present(self, *names: object) -> list[object]:
        """The names whose blocks are complete; the check does not count as a use."""
        hits = self.pool.lookup(self.fingerprint, [run_of(*names)], prefix_only=False).hits[0]
        return [name for idx, name in enumerate(names) if hits.complete >> idx & 1]

    def lease(self, *names: object) -> int:
        return self.pool.lookup(self.fingerprint, [run_of(*names)], prefix_only=False, lease_ttl_ms=60_000).lease_id

    def evictions(self, *names: object) -> list[int]:
        """Stores the blocks of one prefix; returns how many entries each step evicted. A put may be refused."""
        evicted, counters = [], self.pool.counters
        before = counters["evicted_blocks"]
        steps = self.pool.put_start_in_steps(self.fingerprint, [run_of(*names)], WHOLE)
        with suppress(OutOfSpaceError):
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    self.pool.put_end(end.value.ticket_id, [0] * len(end.value.offsets))
                    break
                finally:
                    evicted.append(counters["evicted_blocks"] - before)
                    before = counters["evicted_blocks"]
                    check_integrity(self.pool)
        return evicted

    def use(self, *names: object) -> None:
        self.pool.release([self.lease(*names)])

    @property
    def nbytes(self) -> int:
        namespace = self.pool.namespace(self.fingerprint)
        return namespace.complete_bytes if namespace is not None else 0


class House:
    """The pool.

    Args:
        num_extents: of `EXTENT` bytes each.
        has_tenants: whether extents belong to tenants.
    """

    def __init__(
        self,
        num_extents: int,
        policy: Callable[[], Policy] = PrefixLRU,
        limits: Limits | None = None,
        *,
        has_tenants: bool = False,
    ):
        ids = itertools.count(1)
        self.clock = FakeClock()
        self.num_zeroed = 0
        arena = Arena(num_extents * EXTENT, EXTENT, zero=self._zero if has_tenants else None)
        self.pool = PoolAtOnce(arena, self.clock, lambda: next(ids), limits, policy=policy)
        self.names = itertools.count()
        self._salts = itertools.count()

    def owner(self, size: int = 100, *, tenant: str = "") -> Owner:
        """An owner with a namespace of its own."""
        return Owner(self, size, tenant, f"house {next(self._salts)}")

    def _zero(self, _: int, nbytes: int) -> None:
        self.num_zeroed += nbytes

    def quota(self, subject: str, nbytes: int) -> None:
        self.pool.set_quotas([Quota(subject, nbytes)])
        check_integrity(self.pool)

    def used(self, subject: str) -> int:
        return next(quota.used_bytes for quota in self.pool.quotas() if quota.subject == subject)
