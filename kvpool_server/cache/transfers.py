"""Transfers that others carry out under the pool's tickets and leases: by the data port's workers.

A ticket or lease ends when its client says so, or at its deadline. A transfer under it may be under way at that moment;
then the entries stay pinned until the transfer has ended. `UnfinishedHolds` remembers them.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Protocol

from kvpool_server.cache.leases import Hold


class Transfers(Protocol):
    """Begins no transfer under a ticket or lease that `end` was called for."""

    def end(self, hold_id: int) -> bool:
        """Ends what a ticket or lease permits; False if a transfer under it is under way."""

    def active(self) -> Set[int]:
        """Ids of the tickets and leases under which a transfer is under way."""


class NoTransfers:
    """For a pool whose bytes are moved by its own process alone, or by clients that it cannot stop."""

    def end(self, hold_id: int) -> bool:
        return True

    def active(self) -> Set[int]:
        return frozenset()


class UnfinishedHolds:
    """Ended tickets and leases under which a transfer is under way."""

    def __init__(self, transfers: Transfers):
        self._transfers = transfers
        self._holds: dict[int, Hold] = {}

    def __iter__(self) -> Iterator[Hold]:
        return iter(self._holds.values())

    def end(self, hold: Hold) -> bool:
        """Ends what a hold permits; False if it is unfinished: keep its entries pinned until `pop_finished` has it."""
        if self._transfers.end(hold.id):
            return True
        self._holds[hold.id] = hold
        return False

    def pop_finished(self) -> list[Hold]:
        """Removes and returns the holds whose transfers have ended. Cheap when there is none."""
        if not self._holds:
            return []
        active = self._transfers.active()
        return [self._holds.pop(hold_id) for hold_id in self._holds.keys() - active]
