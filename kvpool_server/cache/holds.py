"""The leases and tickets of a pool: which may be granted, and how each ends.

A lease or ticket ends when its client ends it, or at its deadline. Where many end at once, their entries are let go
some at a time (`EndedHolds`). While a transfer under an ended one is under way, its entries stay pinned
(`UnfinishedHolds`).
Not thread-safe: the pool's event loop owns it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Sequence

from kvpool.protocol.errors import OutOfSpaceError
from kvpool_server.cache.ended_holds import EndedHolds, EndOfEntry
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.entry_table import EntryTable
from kvpool_server.cache.holders import describe_holders
from kvpool_server.cache.leases import Hold, HoldTable, Lease, Owner, Ticket
from kvpool_server.cache.limits import IdentityLimits, Limits
from kvpool_server.cache.quarantine import Quarantine
from kvpool_server.cache.quotas import Account
from kvpool_server.cache.steps import SETTLED_PER_CALL, Steps
from kvpool_server.cache.transfers import Transfers, UnfinishedHolds

_NO_LIMITS = IdentityLimits(1 << 62, 1 << 62)


class Holds:
    """See the module.

    Args:
        limits_of: of an identity.
        new_id: as of `Pool`.

    Attributes:
        leases, tickets: the live ones.
        pinning: for each lookup whose steps are under way, the entries that it has pinned.
        writing: the tickets of puts whose steps are under way.
    """

    def __init__(
        self,
        entry_table: EntryTable,
        transfers: Transfers,
        limits: Limits,
        limits_of: Callable[[str], IdentityLimits],
        new_id: Callable[[], int],
        counters: dict[str, int],
    ):
        self.leases: HoldTable[Lease] = HoldTable("lease", "look up again")
        self.tickets: HoldTable[Ticket] = HoldTable("ticket", "put_start again")
        self.pinning: list[list[Entry]] = []
        self.writing: list[Ticket] = []
        self._entry_table = entry_table
        self._limits = limits
        self._limits_of = limits_of
        self._new_id = new_id
        self._counters = counters
        self._unfinished = UnfinishedHolds(transfers)
        self._ended = EndedHolds(entry_table)

    def lease(self, entries: list[Entry], num_pinned: int, ttl_ms: int, now: float, owner: Owner) -> tuple[int, int]:
        """Makes a lease on entries, of which the first are pinned; returns its id and TTL, both 0 if there is no room.

        The lease keeps the pins of its entries.
        """
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

        Args:
            pinned: the same list for each step of a lookup.
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
            self._ended.add_lease(Lease(0, 0.0, pinned))

    def release(self, lease_ids: Sequence[int], owner: Owner, now: float) -> int:
        """Ends leases that the owner may end; returns how many were live."""
        released = 0
        for lease_id in lease_ids:
            if (lease := self.leases.find(lease_id, owner)) is not None:
                self.leases.pop(lease_id)
                self._end_lease(lease)
                released += lease.deadline > now
        self._ended.settle(SETTLED_PER_CALL)
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
        self._ended.add_ticket(ticket, self._entry_table.revoke)
        self._ended.settle(SETTLED_PER_CALL)

    def finish_writing(self, ticket: Ticket) -> bool:
        """Ends a ticket to commit its entries; False, and drops them, if bytes are still being written under it."""
        self.tickets.pop(ticket.id)
        if self._unfinished.end(ticket):
            return True
        self._ended.add_ticket(self._pinned(ticket), self._abandon)
        self._ended.settle(SETTLED_PER_CALL)
        return False

    def revoke(self, ticket_id: int, owner: Owner, now: float) -> bool:
        """Ends a ticket whose writer has stopped writing; False if it was not live, or the owner may not end it."""
        ticket = self.tickets.find(ticket_id, owner)
        if ticket is None:
            return False
        self.tickets.pop(ticket_id)
        if ticket.deadline <= now:
            self._counters["expired_tickets"] += 1
            self._end_ticket(ticket, self._entry_table.expire)
            return False
        self._counters["revoked_tickets"] += 1
        self._end_ticket(ticket, self._entry_table.revoke, self._abandon)
        return True

    def expire_owned(self, owners: Container[str], now: float) -> Steps[None]:
        """Brings the deadlines of some owners' leases and tickets forward to now."""
        yield from self.leases.expire_owned(owners, now)
        yield from self.tickets.expire_owned(owners, now)

    def settle(self, now: float, count: int) -> int:
        """Ends up to `count` of the leases and tickets whose deadline has come, and lets as many entries go.

        Returns how many leases, tickets and entries were ended or let go. Cheap when there is none.
        """
        ended = 0
        while ended < count and (lease := self.leases.pop_expired(now)) is not None:
            self._counters["expired_leases"] += 1
            self._end_lease(lease)
            ended += 1
        for hold in self._unfinished.pop_finished():
            self._ended.add_lease(hold)
        while ended < count and (ticket := self.tickets.pop_expired(now)) is not None:
            self._counters["expired_tickets"] += 1
            self._queue_end(ticket, self._entry_table.expire)
            ended += 1
        return ended + self._ended.settle(count)

    def describe(self, tenant: str, quarantine: Quarantine, now: float, account: Account | None) -> str:
        """What holds a tenant's slots, or those that count towards a quota of it; other tenants' are not told of."""
        leases = [lease for lease in self.leases.values() if _tenant(lease) == tenant]
        tickets = [ticket for ticket in self.tickets.values() if _tenant(ticket) == tenant]
        counts = account.groups.__contains__ if account is not None else lambda group: group.tenant == tenant
        return describe_holders(leases, tickets, self._unfinished, quarantine, now, counts)

    def _end_lease(self, lease: Lease) -> None:
        if self._unfinished.end(lease):
            self._ended.add_lease(lease)

    def _end_ticket(self, ticket: Ticket, end: EndOfEntry, end_unfinished: EndOfEntry | None = None) -> None:
        """Ends a ticket, and lets some entries of ended holds go."""
        self._queue_end(ticket, end, end_unfinished)
        self._ended.settle(SETTLED_PER_CALL)

    def _queue_end(self, ticket: Ticket, end: EndOfEntry, end_unfinished: EndOfEntry | None = None) -> None:
        """Ends a ticket, whose entries `settle` lets go.

        Args:
            end: what becomes of its entries.
            end_unfinished: instead, if bytes are being written under one of its permits. The entries also stay pinned
                until that has ended.
        """
        if not self._unfinished.end(ticket):
            ticket, end = self._pinned(ticket), end_unfinished or end
        self._ended.add_ticket(ticket, end)

    def _pinned(self, ticket: Ticket) -> Ticket:
        """Pins the entries of an unfinished ticket; returns a ticket on them that can be ended."""
        for entry in ticket.entries:
            entry.leases += 1
        return dataclasses.replace(ticket, entries=list(ticket.entries))

    def _abandon(self, entry: Entry, ticket: Ticket) -> None:
        """Drops an entry of an unfinished ticket: else another writer could get its shards while bytes arrive."""
        self._entry_table.abandon(entry, ticket, 0.0)


def _tenant(hold: Hold) -> str | None:
    return hold.entries[0].group.tenant if hold.entries else None
