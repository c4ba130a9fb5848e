"""Leases and tickets: references that end at a deadline, whatever becomes of their holder."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from kvpool.types import ShardRange
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.namespaces import Namespace

SWEEP_AT_LEAST = 1_000


class Holding:
    """Entries held until a deadline."""

    __slots__ = ("_members", "deadline", "entries", "id")

    def __init__(self, id: int, deadline: float, entries: list[Entry]):
        self.id = id
        self.deadline = deadline
        self.entries = entries
        self._members: set[int] | None = None

    @property
    def members(self) -> set[int]:
        """The ids of the (now final) entries, as Python gives them."""
        if self._members is None:
            self._members = set(map(id, self.entries))
        return self._members

    def covers(self, entry: Entry) -> bool:
        """Whether the entries contain this one."""
        return id(entry) in self.members


class Seen(NamedTuple):
    """What a lookup came to.

    Args:
        num_asked, num_found: blocks.
        parts: of the entries that were found, those of each group: [start, stop).
    """

    namespace: Namespace
    num_asked: int
    num_found: int
    parts: Sequence[tuple[Group, int, int]]


class Lease(Holding):
    """Keeps entries from eviction between lookup and load.

    Attributes:
        seen: what the lookup came to, while it is open whether it was the last of its request; else None.
    """

    __slots__ = ("seen",)

    def __init__(self, id: int, deadline: float, entries: list[Entry]):
        super().__init__(id, deadline, entries)
        self.seen: Seen | None = None


class Ticket(Holding):
    """The right to write `shards` of `entries` until the deadline."""

    __slots__ = ("shards",)

    def __init__(self, id: int, deadline: float, entries: list[Entry], shards: ShardRange):
        super().__init__(id, deadline, entries)
        self.shards = shards


Held = TypeVar("Held", Lease, Ticket)


class Register(Generic[Held]):
    """Live leases or tickets, by id and by deadline."""

    def __init__(self) -> None:
        self._live: dict[int, Held] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._live)

    def values(self) -> list[Held]:
        return list(self._live.values())

    def add(self, held: Held) -> None:
        self._live[held.id] = held
        heapq.heappush(self._deadlines, (held.deadline, held.id))
        if len(self._deadlines) > 2 * len(self._live) + SWEEP_AT_LEAST:
            self._deadlines = [(held.deadline, held.id) for held in self._live.values()]
            heapq.heapify(self._deadlines)

    def get(self, id: int) -> Held | None:
        return self._live.get(id)

    def pop(self, id: int) -> Held | None:
        return self._live.pop(id, None)

    def pop_expired(self, now: float) -> Iterator[Held]:
        """Removes and yields what has reached its deadline."""
        while self._deadlines and self._deadlines[0][0] <= now:
            held = self._live.pop(heapq.heappop(self._deadlines)[1], None)
            if held is not None:
                yield held
