"""What keeps slots from being evicted, in words and numbers: for the message of a put that finds no room.

Each slot counts once: for a reader's lease before a move to or from a tier, for that before a put, for that before
quarantine. Bounded, for puts may be refused at a high rate: at most `MAX_COUNTED` entries are counted, and the message
says "at least" where there are more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvpool.quotas import size_text
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.leases import Holding, Lease, Ticket
from kvpool_server.cache.quotas import Account

MAX_COUNTED = 1 << 14


class Holders(NamedTuple):
    """Whoever may hold entries.

    Args:
        leases, tickets: live; those of moves to and from tiers have no deadline.
        quarantined: dropped entries whose slots are not free.
    """

    leases: Sequence[Lease]
    tickets: Sequence[Ticket]
    quarantined: Iterable[Entry]

    def describe(self, now: float, account: Account | None = None) -> str:
        """What is held, and by whom; empty if nothing is.

        Args:
            account: counts only what counts for its quota.
        """
        counted: set[int] = set()
        parts: list[str] = []
        chain: list[Entry] = []
        for what, holdings in self._kinds(now):
            blocks = nbytes = 0
            for entry in holdings:
                if len(counted) >= MAX_COUNTED:
                    break
                counts = account is None or (entry.live and entry.group in account.groups)
                if counts and id(entry) not in counted:
                    counted.add(id(entry))
                    chain.append(entry)
                    blocks += 1
                    nbytes += entry.group.spec.slot_bytes
            if blocks:
                parts.append(f"{blocks} blocks ({size_text(nbytes)}) {what}")
        if before := _num_before(chain, counted):
            parts.append(f"{before} blocks before those in their prefixes, which go only after them")
        least = "at least " if len(counted) >= MAX_COUNTED else ""
        return least + "; ".join(parts) if parts else ""

    def _kinds(self, now: float) -> Iterator[tuple[str, Iterator[Entry]]]:
        """Each kind of holder, in words, and what it holds."""
        readers = [lease for lease in self.leases if lease.deadline < math.inf]
        puts = [ticket for ticket in self.tickets if ticket.deadline < math.inf]
        yield f"are leased by {len(readers)} lookups{_until(readers, now)}", _entries(readers)
        yield "are being written to a tier", _entries(lease for lease in self.leases if lease.deadline == math.inf)
        yield "are being read from a tier", _entries(ticket for ticket in self.tickets if ticket.deadline == math.inf)
        yield f"are being written by {len(puts)} puts{_until(puts, now)}", _entries(puts)
        yield "are in quarantine until late writers and readers of removed blocks have ended", iter(self.quarantined)


def _until(holdings: Sequence[Holding], now: float) -> str:
    return f", for {max(each.deadline for each in holdings) - now:.1f} s at most" if holdings else ""


def _entries(holdings: Iterable[Holding]) -> Iterator[Entry]:
    return (entry for each in holdings for entry in each.entries)


def _num_before(chain: Sequence[Entry], counted: set[int]) -> int:
    """How many entries stay because what comes after them in their prefix is held."""
    before = 0
    for entry in chain:
        parent = entry.parent
        while parent is not None and id(parent) not in counted and len(counted) < MAX_COUNTED:
            counted.add(id(parent))
            before += 1
            parent = parent.parent
    return before
