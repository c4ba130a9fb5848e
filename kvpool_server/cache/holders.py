"""Describes what keeps slots from eviction, for the error of a put that finds no room.

Each slot counts once: under a lease first, then under a ticket, under a transfer that outlived its lease or ticket, and
under quarantine. At most `MAX_EXAMINED` holds and entries are looked at, because puts may be refused at a high rate;
the text says "at least" where there are more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvpool.report.quotas import size_text
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.leases import Hold, Lease, Ticket

MAX_EXAMINED = 2_048
"""Within about half a millisecond."""

_LEASED = "are leased by {holds} lookups, for {longest_s:.1f} s at most"
_TO_TIER = "are being written to a tier"
_FROM_TIER = "are being read from a tier"
_WRITTEN = "are being written by {holds} puts, for {longest_s:.1f} s at most"
_MOVED = "are being moved by data workers for clients that have given them up"
_QUARANTINED = "are in quarantine until late writers and readers of removed blocks have ended"


@dataclass(slots=True)
class _Held:
    """What is held for one reason."""

    holds: int = 0
    longest_s: float = 0.0
    blocks: int = 0
    nbytes: int = 0


def describe_holders(
    leases: Iterable[Lease],
    tickets: Iterable[Ticket],
    unfinished: Iterable[Hold],
    quarantined: Iterable[Entry],
    now: float,
    counts: Callable[[Group], bool],
    *,
    is_cut: bool = False,
) -> str:
    """How many blocks are held, and by what; empty if none is.

    Args:
        leases, tickets: the live ones; those of transfers to and from tiers have no deadline.
        unfinished: ended ones under which data workers move bytes.
        quarantined: dropped entries whose slots are not free.
        counts: whether the entries of a group count.
        is_cut: there are more leases or tickets.
    """
    found = {reason: _Held() for reason in (_LEASED, _TO_TIER, _FROM_TIER, _WRITTEN, _MOVED, _QUARANTINED)}
    counted: set[int] = set()
    held: list[Entry] = []
    left = MAX_EXAMINED
    for reason, deadline, entries in _by_reason(leases, tickets, unfinished, quarantined):
        each, is_counted = found[reason], False
        for entry in itertools.islice(entries, left):
            left -= 1
            if not counts(entry.group):
                continue
            is_counted = True
            if id(entry) not in counted:
                counted.add(id(entry))
                held.append(entry)
                each.blocks += 1
                each.nbytes += entry.group.spec.slot_bytes
        if is_counted:
            each.holds += 1
            each.longest_s = max(each.longest_s, deadline - now)
        left -= 1
        if left <= 0:
            break
    parts = [
        f"{each.blocks} blocks ({size_text(each.nbytes)}) " + reason.format(holds=each.holds, longest_s=each.longest_s)
        for reason, each in found.items()
        if each.blocks
    ]
    if num_ancestors := _count_ancestors(held, counted):
        parts.append(f"{num_ancestors} blocks precede those in their prefixes, and are evicted only after them")
    least = "at least " if is_cut or left <= 0 or len(counted) >= MAX_EXAMINED else ""
    return least + "; ".join(parts) if parts else ""


def _by_reason(
    leases: Iterable[Lease], tickets: Iterable[Ticket], unfinished: Iterable[Hold], quarantined: Iterable[Entry]
) -> Iterator[tuple[str, float, Iterable[Entry]]]:
    """Why entries are held, until when at most, and which."""
    for lease in leases:
        yield _LEASED if lease.deadline < math.inf else _TO_TIER, lease.deadline, lease.entries
    for ticket in tickets:
        yield _WRITTEN if ticket.deadline < math.inf else _FROM_TIER, ticket.deadline, ticket.entries
    for hold in unfinished:
        yield _MOVED, hold.deadline, hold.entries
    yield _QUARANTINED, 0.0, quarantined


def _count_ancestors(held: Sequence[Entry], counted: set[int]) -> int:
    """How many entries stay because a later entry of their prefix is held."""
    num_ancestors = 0
    for entry in held:
        parent = entry.parent
        while parent is not None and id(parent) not in counted and len(counted) < MAX_EXAMINED:
            counted.add(id(parent))
            num_ancestors += 1
            parent = parent.parent
    return num_ancestors
