"""Which eviction policy an entry is under: one for each slot size and each set of quotas.

Namespaces without a quota share a policy, which learns from all of them. A subject with a quota has its own, so that it
can be asked for victims without looking at anybody else's entries.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.eviction import TICK, Policy
from kvpool_server.cache.eviction.victims import Victims
from kvpool_server.cache.quotas import Account

TURNS = 8
"""Where several policies compete, a put's victims are chosen in about so many turns, not one by one."""


class Shelf:
    """Entries of one slot size under the same quotas."""

    __slots__ = ("_looked_at", "_worth", "accounts", "groups", "policy", "slot_bytes")

    def __init__(self, slot_bytes: int, accounts: tuple[Account, ...], policy: Policy):
        self.slot_bytes = slot_bytes
        self.accounts = accounts
        self.policy = policy
        self.groups: set[Group] = set()
        self._worth: float | None = None
        self._looked_at = 0

    def look(self, gone: dict[Entry, int], stamp: int) -> float | None:
        """What its next victim is worth now; None if there is none."""
        self._worth, self._looked_at = self.policy.least_worth(gone, stamp), stamp
        return self._worth

    def worth(self, max_calls: int, gone: dict[Entry, int], stamp: int) -> float | None:
        """The same, as it was found at most so many calls ago, or now."""
        if self._worth is None or stamp - self._looked_at >= max_calls * TICK:
            return self.look(gone, stamp)
        return self._worth


class Shelves:
    """The shelf of every group of an open namespace.

    Args:
        policy: makes one.
    """

    def __init__(self, policy: Callable[[], Policy]):
        self._policy = policy
        self._by_key: dict[tuple[int, tuple[Account, ...]], Shelf] = {}
        self._of: dict[Group, Shelf] = {}

    def of(self, group: Group) -> Shelf:
        return self._of[group]

    def policy(self, group: Group) -> Policy:
        return self._of[group].policy

    def of_size(self, slot_bytes: int) -> list[Shelf]:
        return [shelf for shelf in self._by_key.values() if shelf.slot_bytes == slot_bytes]

    def of_account(self, account: Account) -> list[Shelf]:
        return [shelf for shelf in self._by_key.values() if account in shelf.accounts]

    def place(self, placed: Iterable[tuple[Group, tuple[Account, ...]]], stamp: int) -> None:
        """Says under which quotas groups are from now on; the entries of those that change are queued anew."""
        changed = [
            (group, accounts)
            for group, accounts in placed
            if (before := self._of.get(group)) is None or before.accounts != accounts
        ]
        leaving: dict[Policy, set[Group]] = {}
        for group, _ in changed:
            if group.index and group in self._of:
                leaving.setdefault(self.policy(group), set()).add(group)
        for policy, groups in leaving.items():  # Once a policy: it looks at all that it has.
            policy.leave(groups)
        for group, accounts in changed:
            if group in self._of:
                self.remove(group)
            self._add(group, accounts, stamp)

    def _add(self, group: Group, accounts: tuple[Account, ...], stamp: int) -> None:
        key = (group.spec.slot_bytes, accounts)
        shelf = self._by_key.get(key)
        if shelf is None:
            shelf = self._by_key[key] = Shelf(*key, self._policy())
        shelf.groups.add(group)
        for account in accounts:
            account.groups.add(group)
        self._of[group] = shelf
        if group.index:
            shelf.policy.join(group, stamp)

    def remove(self, group: Group) -> None:
        """A group is no more on any shelf. What is shared by those without quotas stays: it has learned."""
        shelf = self._of.pop(group)
        shelf.groups.remove(group)
        for account in shelf.accounts:
            account.groups.remove(group)
        if shelf.accounts and not shelf.groups:
            del self._by_key[shelf.slot_bytes, shelf.accounts]


def oldest_stamp(shelves: Sequence[Shelf], victims: Victims) -> int | None:
    """No candidate on them was used before this; None if there is none."""
    stamps = [stamp for shelf in shelves if (stamp := shelf.policy.oldest_stamp(victims.gone)) is not None]
    return min(stamps, default=None)


def take(shelves: Sequence[Shelf], count: int, victims: Victims, stamp: int) -> int:
    """Adds up to `count` victims of these shelves, those of least worth first; how many there were."""
    if len(shelves) == 1:
        return victims.take(shelves[0].policy, count)
    ranked: list[tuple[float, int]] = []
    for nth, shelf in enumerate(shelves):
        # One is looked at a call, on average, however many there are.
        if (worth := shelf.worth(len(shelves), victims.gone, stamp)) is not None:
            ranked.append((worth, nth))
    heapq.heapify(ranked)
    taken, at_once = 0, -(-count // TURNS)
    while ranked and taken < count:
        believed, nth = heapq.heappop(ranked)  # It may be worth more by now, for it was used.
        worth = shelves[nth].look(victims.gone, stamp)
        if worth is not None and worth <= max(believed, ranked[0][0] if ranked else worth):
            taken += victims.take(shelves[nth].policy, min(at_once, count - taken))
            worth = shelves[nth].look(victims.gone, stamp) if taken < count else None
        if worth is not None:
            heapq.heappush(ranked, (worth, nth))
    return taken
