"""The leases and tickets of a pool: which may be granted, and how each ends: by its client, or at its deadline.

A million entries may be held by those that end at once: no client can use an ended one any more, but its entries count
as held until they are let go, some at a time, and stay pinned while a transfer under an ended one is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from kvpool.protocol.errors import OutOfSpaceError
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.entry_table import EntryTable
from kvpool_server.cache.leases import Hold, HoldTable, Lease, Owner, Ticket
from kvpool_server.cache.steps import SETTLED_PER_CALL
from kvpool_server.sharing import IdentityLimits, Limits

_NO_LIMITS = IdentityLimits(1 << 62, 1 << 62)

EndOfEntry = Callable[[Entry, Ticket], None]
"""What becomes of an entry whose ticket has ended: a method of `EntryTable`."""


class Transfers(Protocol):
    """What data workers do under leases and tickets: no transfer begins under one that `end` was called for."""

    def end(self, hold_id: int) -> bool:
        """Ends what a ticket or lease permits; False if a transfer under it is under way."""

    def active(self) -> Set[int]:
        """Ids of the tickets and leases under which a transfer is under way."""


@dataclass(eq=False)
class Holds:
    """Grants leases and tickets, and ends them.

    Args:
        transfers: None: bytes are moved by the pool's own process alone, or by clients that it cannot stop.

    Attributes:
        leases, tickets: the live ones.
        pinning: for each lookup whose steps are under way, the entries that it has pinned.
        writing: the tickets of puts whose steps are under way.
    """

    _entry_table: EntryTable
    _transfers: Transfers | None
    _limits: Limits
    _limits_of: Callable[[str], IdentityLimits]
    _new_id: Callable[[], int]
    _counters: dict[str, int]
    pinning: list[list[Entry]] = field(default_factory=list, init=False)
    writing: list[Ticket] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.leases: HoldTable[Lease] = HoldTable("lease", "look up again")
        self.tickets: HoldTable[Ticket] = HoldTable("ticket", "put_start again")
        self._unfinished: dict[int, Hold] = {}  # Pins of ended ones under which a transfer is under way, by id.
        self._ended_leases: deque[Hold] = deque()  # Also pins of `_unfinished` whose transfers have ended.
        self._ended_tickets: deque[tuple[Ticket, EndOfEntry]] = deque()

    def lease(self, entries: list[Entry], num_pinned: int, ttl_ms: int, now: float, owner: Owner) -> tuple[int, int]:
        """Makes a lease on entries, of which the first are pinned; returns id and TTL, both 0 if there is no room."""
        if not self._may_lease(owner, len(entries)):
            self._counters["refused_leases"] += 1
            return 0, 0
        ttl_ms = min(ttl_ms, self._limits.max_ttl_ms)
        lease = Lease(self._new_id(), now + ttl_ms / 1000, entries, owner=owner)
        self.leases.add(lease)
        for entry in entries[num_pinned:]:
            entry.leases += 1
        return lease.id, ttl_ms

    def _may_lease(self, owner: Owner, num_blocks: int) -> bool:
        leases, limits, name = self.leases, self._limits, owner.name
        own = self._limits_of(name) if owner.tenant else _NO_LIMITS
        is_within = leases.holds.has_room(name, 1, limits.max_leases, own.leases) and leases.blocks.has_room(
            name, num_blocks, limits.max_leased_blocks, own.leased_blocks
        )
        return len(leases) < limits.max_leases and (is_within or not name)

    def pin(self, pinned: list[Entry], entries: Sequence[Entry]) -> None:
        """Keeps the entries that a lookup has found from eviction until its next step: those beyond `pinned`.

        `pinned` is the same list for each step of a lookup.
        """
        if not any(each is pinned for each in self.pinning):
            self.pinning.append(pinned)
        for entry in entries[len(pinned) :]:
            entry.leases += 1
            pinned.append(entry)

    def unpin(self, pinned: list[Entry], *, is_leased: bool) -> None:
        """Ends the pins of a lookup whose last step has ended, unless a lease keeps them."""
        self.pinning = [each for each in self.pinning if each is not pinned]
        if not is_leased:
            self._ended_leases.append(Lease(0, 0.0, pinned))

    def release(self, lease_ids: Sequence[int], owner: Owner, now: float) -> int:
        """Ends leases that the owner may end; returns how many were live."""
        released = 0
        for lease_id in lease_ids:
            if (lease := self.leases.find(lease_id, owner)) is not None:
                self.leases.pop(lease_id)
                self._end_lease(lease)
                released += lease.deadline > now
        self._let_go(SETTLED_PER_CALL)
        return released

    def check_tickets(self, owner: Owner) -> None:
        """Raises OutOfSpaceError if the owner may not have another ticket."""
        name, most = owner.name, self._limits.max_tickets
        if owner.tenant:
            # Puts whose steps are under way are not in the table.
            under_way = sum(ticket.owner.name == name for ticket in self.writing)
            own = self._limits_of(name).tickets
            if self.tickets.holds.of(name) + under_way >= own:
                raise OutOfSpaceError(f"{own} puts of {name} are under way, its limit; try again later")
        if len(self.tickets) >= most or (name and not self.tickets.holds.has_room(name, 1, most)):
            raise OutOfSpaceError(
                f"{len(self.tickets)} puts are under way; the limit is {most}, and one client may have as many as are "
                "left; try again later"
            )

    def undo(self, ticket: Ticket) -> None:
        """Ends a ticket that was never granted: nobody has written under it."""
        self._ended_tickets.append((ticket, self._entry_table.revoke))
        self._let_go(SETTLED_PER_CALL)

    def finish_writing(self, ticket: Ticket) -> bool:
        """Ends a ticket to commit its entries; False, and drops them, if bytes are still being written under it."""
        self.tickets.pop(ticket.id)
        if self._end_transfers(ticket):
            return True
        self._ended_tickets.append((ticket, self._entry_table.abandon))
        self._let_go(SETTLED_PER_CALL)
        return False

    def revoke(self, ticket_id: int, owner: Owner, now: float) -> bool:
        """Ends a ticket whose writer has stopped writing; False if it was not live, or the owner may not end it."""
        ticket = self.tickets.find(ticket_id, owner)
        if ticket is None:
            return False
        self.tickets.pop(ticket_id)
        is_live = ticket.deadline > now
        if is_live:
            self._counters["revoked_tickets"] += 1
            self._end_ticket(ticket, self._entry_table.revoke, self._entry_table.abandon)
        else:
            self._expire_ticket(ticket)
        self._let_go(SETTLED_PER_CALL)
        return is_live

    def settle(self, now: float, count: int) -> int:
        """Ends up to `count` of the leases and tickets whose deadline has come, and lets as many entries go.

        Returns how many leases, tickets and entries were ended or let go.
        """
        ended = 0
        while ended < count and (lease := self.leases.pop_expired(now)) is not None:
            self._counters["expired_leases"] += 1
            self._end_lease(lease)
            ended += 1
        if self._transfers is not None and self._unfinished:
            finished = self._unfinished.keys() - self._transfers.active()
            self._ended_leases += [self._unfinished.pop(hold_id) for hold_id in finished]
        while ended < count and (ticket := self.tickets.pop_expired(now)) is not None:
            self._expire_ticket(ticket)
            ended += 1
        return ended + self._let_go(count)

    def _end_transfers(self, hold: Hold) -> bool:
        """Ends what a hold permits; False if a transfer is under way: its entries stay pinned until that ends."""
        if self._transfers is None or self._transfers.end(hold.id):
            return True
        if isinstance(hold, Ticket):
            for entry in hold.entries:
                entry.leases += 1
            hold = Lease(hold.id, hold.deadline, list(hold.entries))
        self._unfinished[hold.id] = hold
        return False

    def _end_lease(self, lease: Lease) -> None:
        if self._end_transfers(lease):
            self._ended_leases.append(lease)

    def _expire_ticket(self, ticket: Ticket) -> None:
        self._counters["expired_tickets"] += 1
        self._end_ticket(ticket, self._entry_table.expire, self._entry_table.expire)

    def _end_ticket(self, ticket: Ticket, end: EndOfEntry, end_unfinished: EndOfEntry) -> None:
        """Ends a ticket, and its entries with `end`, or with `end_unfinished` if bytes are being written under it."""
        self._ended_tickets.append((ticket, end if self._end_transfers(ticket) else end_unfinished))

    def _let_go(self, count: int) -> int:
        """Lets up to `count` entries of ended leases and tickets go; returns how many."""
        room = count
        while self._ended_leases and room:
            entries = self._ended_leases[0].entries
            part = entries[-room:]
            del entries[-room:]
            for entry in part:
                self._entry_table.release(entry)
            room -= len(part)
            if not entries:
                self._ended_leases.popleft()
        while self._ended_tickets and room:
            ticket, end = self._ended_tickets[0]
            while ticket.entries and room:
                end(ticket.entries.pop(), ticket)
                room -= 1
            if not ticket.entries:
                self._ended_tickets.popleft()
        return count - room
