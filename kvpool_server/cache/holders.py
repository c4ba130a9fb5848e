"""Describes what keeps slots from eviction, for the error of a put that finds no room.

Each slot counts once: under a client's lease first, then under a transfer to or from a tier, under a put, under a
transfer that outlived its lease or ticket, and under quarantine. At most `MAX_COUNTED` entries are counted, because
puts may be refused at a high rate; the text says "at least" where there are more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvpool.report.quotas import size_text
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.leases import Hold, Lease, Ticket

MAX_COUNTED = 1 << 14


def describe_holders(
    leases: Sequence[Lease],
    tickets: Sequence[Ticket],
    unfinished: Iterable[Hold],
    quarantined: Iterable[Entry],
    now: float,
    counts: Callable[[Group], bool],
) -> str:
    """How many blocks are held, and by what; empty if none is.

    Args:
        leases, tickets: the live ones; those of transfers to and from tiers have no deadline.
        unfinished: ended ones under which data workers move bytes.
        quarantined: dropped entries whose slots are not free.
        counts: whether the entries of a group count.
    """
    counted: set[int] = set()
    parts: list[str] = []
    held: list[Entry] = []
    lookups = [lease for lease in leases if lease.deadline < math.inf]
    puts = [ticket for ticket in tickets if ticket.deadline < math.inf]
    by_reason = [
        (f"are leased by {len(lookups)} lookups{_at_most(lookups, now)}", _entries(lookups)),
        ("are being written to a tier", _entries(lease for lease in leases if lease.deadline == math.inf)),
        ("are being read from a tier", _entries(ticket for ticket in tickets if ticket.deadline == math.inf)),
        (f"are being written by {len(puts)} puts{_at_most(puts, now)}", _entries(puts)),
        ("are being moved by data workers for clients that have given them up", _entries(unfinished)),
        ("are in quarantine until late writers and readers of removed blocks have ended", quarantined),
    ]
    for reason, entries in by_reason:
        blocks = nbytes = 0
        for entry in entries:
            if len(counted) >= MAX_COUNTED:
                break
            if counts(entry.group) and id(entry) not in counted:
                counted.add(id(entry))
                held.append(entry)
                blocks += 1
                nbytes += entry.group.spec.slot_bytes
        if blocks:
            parts.append(f"{blocks} blocks ({size_text(nbytes)}) {reason}")
    if num_ancestors := _count_ancestors(held, counted):
        parts.append(f"{num_ancestors} blocks precede those in their prefixes, and are evicted only after them")
    least = "at least " if len(counted) >= MAX_COUNTED else ""
    return least + "; ".join(parts) if parts else ""


def _at_most(holds: Sequence[Hold], now: float) -> str:
    return f", for {max(hold.deadline for hold in holds) - now:.1f} s at most" if holds else ""


def _entries(holds: Iterable[Hold]) -> Iterator[Entry]:
    return (entry for hold in holds for entry in hold.entries)


def _count_ancestors(held: Sequence[Entry], counted: set[int]) -> int:
    """How many entries stay because a later entry of their prefix is held."""
    num_ancestors = 0
    for entry in held:
        parent = entry.parent
        while parent is not None and id(parent) not in counted and len(counted) < MAX_COUNTED:
            counted.add(id(parent))
            num_ancestors += 1
            parent = parent.parent
    return num_ancestors
