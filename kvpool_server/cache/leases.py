"""Leases and tickets: holds on entries that end at a deadline, whether or not their client is still alive."""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from kvpool.protocol.errors import InvalidRequestError, LeaseExpiredError
from kvpool.protocol.types import RunHits, ShardRange
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.cache.steps import STEP_BLOCKS, Steps
from kvpool_server.sharing import Shares

SWEEP_AT_LEAST = 1_000


class Owner(NamedTuple):
    """The owner of a lease or ticket.

    All callers of a tenant may use and end each other's: one engine's scheduler takes the leases under which its
    workers load, and engines that share a tenant can read and write the same blocks anyway.

    Args:
        name: leases and tickets of one name count together: an identity's, or where callers are not authenticated, a
            connection's. Empty for the server itself, whose are not counted.
        tenant: of the caller; empty where callers are not authenticated, and for the server itself.
    """

    name: str = ""
    tenant: str = ""


NOBODY = Owner()
"""The server itself, and the callers of a pool without a server."""


@dataclass(eq=False, slots=True)
class Hold:
    """Entries held until a deadline."""

    id: int
    deadline: float
    entries: list[Entry]
    owner: Owner = field(default=NOBODY, kw_only=True)
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
        hits: one per run.
        num_blocks: blocks that were asked for.
        entries: the complete ones.
        spans: [start, stop) of each group's entries in `entries`.
        lookup_tokens, hit_tokens: asked for, and found; each token counts once, in however many groups it has blocks.
        lease_id: 0: no lease.
    """

    namespace: PoolNamespace
    hits: tuple[RunHits, ...]
    num_blocks: int
    entries: Sequence[Entry]
    spans: Sequence[tuple[Group, int, int]]
    lookup_tokens: int
    hit_tokens: int
    lease_id: int = 0
    lease_ttl_ms: int = 0


@dataclass(eq=False, slots=True)
class Lease(Hold):
    """Keeps entries from eviction between lookup and load."""

    unrecorded: Found | None = field(default=None, init=False)
    """The lookup that made the lease, if the first get under the lease is to record it as a use."""

    def check_range(self, entry: Entry | None, offset: int, nbytes: int) -> None:
        """Raises InvalidRequestError unless the entry that lies at `offset` is leased and has `nbytes` from there."""
        if entry is None or not self.covers(entry) or offset + nbytes > entry.offset + entry.group.spec.slot_bytes:
            raise InvalidRequestError(f"[{offset}, {offset + nbytes}) is in no block of lease {self.id:#x}")


@dataclass(eq=False, slots=True)
class Ticket(Hold):
    """The right to write `shards` of `entries` until the deadline."""

    shards: ShardRange
    stamp: int = 0
    """Of the put, whose steps are one use of the blocks; 0: none yet."""

    def check_range(self, entry: Entry | None, offset: int, nbytes: int) -> None:
        """Raises InvalidRequestError unless [offset, offset + nbytes) is within the shards of a live entry."""
        if entry is not None and entry.live and self.covers(entry):
            chunk_bytes = entry.group.spec.chunk_bytes
            start = entry.offset + self.shards.start * chunk_bytes
            if start <= offset and offset + nbytes <= start + self.shards.count * chunk_bytes:
                return
        raise InvalidRequestError(f"[{offset}, {offset + nbytes}) is in no region of ticket {self.id:#x}")

    def restart(self, deadline: float) -> None:
        """Gives a ticket that is not live yet all of its time, although the put has waited for room."""
        self.deadline = deadline
        if deadline < math.inf:
            for entry in self.entries:
                entry.pending_until = max(entry.pending_until, deadline)


Held = TypeVar("Held", Lease, Ticket)


class HoldTable(Generic[Held]):
    """Live leases or live tickets, by id and by deadline. `kind` and `fix` are named in errors."""

    def __init__(self, kind: str, fix: str) -> None:
        self._kind, self._fix = kind, fix
        self._live: dict[int, Held] = {}
        self._deadlines: list[tuple[float, int]] = []
        self.holds, self.blocks = Shares(), Shares()  # Of each owner with a name.
        self.num_expiring = 0  # Holds with a deadline; those of the server itself have none.

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, hold_id: int) -> bool:
        return hold_id in self._live

    def values(self) -> list[Held]:
        return list(self._live.values())

    def add(self, hold: Held) -> None:
        self._live[hold.id] = hold
        self.num_expiring += hold.deadline < math.inf
        self._count(hold, 1, len(hold.entries))
        heapq.heappush(self._deadlines, (hold.deadline, hold.id))
        if len(self._deadlines) > 2 * len(self._live) + SWEEP_AT_LEAST:
            self._deadlines = [(hold.deadline, hold.id) for hold in self._live.values()]
            heapq.heapify(self._deadlines)

    def get(self, id: int) -> Held | None:
        return self._live.get(id)

    def find(self, id: int, owner: Owner) -> Held | None:
        """A hold that this owner may use; None for another tenant's, as for an id that is not live."""
        hold = self._live.get(id)
        return hold if hold is not None and hold.owner.tenant == owner.tenant else None

    def live(self, id: int, owner: Owner = NOBODY, now: float = -math.inf) -> Held:
        """As `find`; raises LeaseExpiredError if there is none, or if its deadline has come."""
        hold = self.find(id, owner)
        if hold is None or hold.deadline <= now:
            raise LeaseExpiredError(
                f"{self._kind} {id:#x} is not live: it expired, was ended, or is of another boot; {self._fix}"
            )
        return hold

    def pop(self, id: int) -> Held | None:
        """Removes and returns a hold, even if its deadline has come and `pop_expired` has not returned it yet."""
        hold = self._live.pop(id, None)
        if hold is None:
            return None
        self.num_expiring -= hold.deadline < math.inf
        self._count(hold, -1, -len(hold.entries))
        return hold

    def _count(self, hold: Held, num_holds: int, num_blocks: int) -> None:
        if name := hold.owner.name:
            self.holds.add(name, num_holds)
            self.blocks.add(name, num_blocks)

    def expire_owned(self, owners: Container[str], now: float) -> Steps[None]:
        """Brings the deadlines of some owners' holds forward to now."""
        for nth, hold in enumerate(self.values(), 1):
            if hold.owner.name in owners and hold.deadline > now:
                hold.deadline = now
                heapq.heappush(self._deadlines, (now, hold.id))
            if not nth % STEP_BLOCKS:
                yield

    def pop_expired(self, now: float) -> Held | None:
        """Removes and returns a hold that has reached its deadline; None if there is none."""
        while self._deadlines and self._deadlines[0][0] <= now:
            if (hold := self.pop(heapq.heappop(self._deadlines)[1])) is not None:
                return hold
        return None
