"""Leases and tickets that have ended, and whose entries are let go some at a time: a million may end at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvpool_server.cache.entry import Entry
from kvpool_server.cache.entry_table import EntryTable
from kvpool_server.cache.leases import Hold, Ticket

EndOfEntry = Callable[[Entry, Ticket], None]
"""What becomes of an entry whose ticket has ended: `EntryTable.revoke` or `EntryTable.expire`."""


class EndedHolds:
    """See the module. No client can use them any more, but their entries still count as held."""

    def __init__(self, entry_table: EntryTable):
        self._entry_table = entry_table
        self._leases: deque[Hold] = deque()
        self._tickets: deque[tuple[Ticket, EndOfEntry]] = deque()

    def add_lease(self, lease: Hold) -> None:
        """A lease, or the pins of a ticket under which a transfer was under way."""
        self._leases.append(lease)

    def add_ticket(self, ticket: Ticket, end: EndOfEntry) -> None:
        self._tickets.append((ticket, end))

    def settle(self, count: int) -> int:
        """Lets up to `count` entries go; returns how many."""
        room = count
        while self._leases and room:
            entries = self._leases[0].entries
            part = entries[-room:]
            del entries[-room:]
            for entry in part:
                entry.leases -= 1
                if not entry.leases and entry.queued is not None:
                    entry.queued.released(entry)
                if not entry.live:
                    self._entry_table.free_if_unheld(entry)
            room -= len(part)
            if not entries:
                self._leases.popleft()
        while self._tickets and room:
            ticket, end = self._tickets[0]
            while ticket.entries and room:
                end(ticket.entries.pop(), ticket)
                room -= 1
            if not ticket.entries:
                self._tickets.popleft()
        return count - room
