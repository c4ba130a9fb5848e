"""Leases and tickets: holds on entries that end at a deadline, whether or not their client is still alive."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from kvpool.errors import LeaseExpiredError
from kvpool.types import RunHits, ShardRange
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.namespaces import PoolNamespace

SWEEP_AT_LEAST = 1_000


@dataclass(eq=False, slots=True)
class Hold:
    """Entries held until a deadline."""

    id: int
    deadline: float
    entries: list[Entry]
    _entry_ids: set[int] | None = field(default=None, init=False)

    @property
    def entry_ids(self) -> set[int]:
        """Python's `id` of each entry. Read it only when `entries` has become final."""
        if self._entry_ids is None:
            self._entry_ids = set(map(id, self.entries))
        return self._entry_ids

    def covers(self, entry: Entry) -> bool:
        """Whether this very entry is held; a later entry of the same block is not."""
        return id(entry) in self.entry_ids


class Found(NamedTuple):
    """What a lookup found, and the lease on it.

    Args:
        hits: one a run.
        num_blocks: blocks that were asked for.
        entries: the complete ones.
        spans: [start, stop) of each group's entries in `entries`.
        lease_id: 0: no lease.
    """

    namespace: PoolNamespace
    hits: tuple[RunHits, ...]
    num_blocks: int
    entries: Sequence[Entry]
    spans: Sequence[tuple[Group, int, int]]
    lease_id: int = 0
    lease_ttl_ms: int = 0


@dataclass(eq=False, slots=True)
class Lease(Hold):
    """Keeps entries from eviction between lookup and load.

    `unrecorded` is the lookup that made the lease, if the first get under the lease is to record it as a use.
    """

    unrecorded: Found | None = field(default=None, init=False)


@dataclass(eq=False, slots=True)
class Ticket(Hold):
    """The right to write `shards` of `entries` until the deadline."""

    shards: ShardRange


Held = TypeVar("Held", Lease, Ticket)


class HoldTable(Generic[Held]):
    """Live leases or live tickets, by id and by deadline.

    Args:
        kind: "lease" or "ticket", for errors.
        fix: what a client does about one that is not live.
    """

    def __init__(self, kind: str, fix: str) -> None:
        self._kind, self._fix = kind, fix
        self._live: dict[int, Held] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._live)

    def values(self) -> list[Held]:
        return list(self._live.values())

    def add(self, hold: Held) -> None:
        self._live[hold.id] = hold
        heapq.heappush(self._deadlines, (hold.deadline, hold.id))
        if len(self._deadlines) > 2 * len(self._live) + SWEEP_AT_LEAST:
            self._deadlines = [(hold.deadline, hold.id) for hold in self._live.values()]
            heapq.heapify(self._deadlines)

    def get(self, id: int) -> Held | None:
        return self._live.get(id)

    def live(self, id: int) -> Held:
        """Raises LeaseExpiredError if there is none with this id."""
        hold = self._live.get(id)
        if hold is None:
            raise LeaseExpiredError(
                f"{self._kind} {id:#x} is not live: it expired, was ended, or is of another boot; {self._fix}"
            )
        return hold

    def pop(self, id: int) -> Held | None:
        return self._live.pop(id, None)

    def pop_expired(self, now: float) -> Held | None:
        """Removes and returns a hold that has reached its deadline; None if there is none."""
        while self._deadlines and self._deadlines[0][0] <= now:
            hold = self._live.pop(heapq.heappop(self._deadlines)[1], None)
            if hold is not None:
                return hold
        return None
