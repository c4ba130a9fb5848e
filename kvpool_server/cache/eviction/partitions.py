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


class Partition:
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


class Partitions:
    """The partition of every group of an open namespace.

    Args:
        policy: makes one.
    """

    def __init__(self, policy: Callable[[], Policy]):
        self._policy = policy
        self._by_key: dict[tuple[int, tuple[Account, ...]], Partition] = {}
        self._of: dict[Group, Partition] = {}

    def of(self, group: Group) -> Partition:
        return self._of[group]

    def policy(self, group: Group) -> Policy:
        return self._of[group].policy

    def of_size(self, slot_bytes: int) -> list[Partition]:
        return [partition for partition in self._by_key.values() if partition.slot_bytes == slot_bytes]

    def of_account(self, account: Account) -> list[Partition]:
        return [partition for partition in self._by_key.values() if account in partition.accounts]

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
        partition = self._by_key.get(key)
        if partition is None:
            partition = self._by_key[key] = Partition(*key, self._policy())
        partition.groups.add(group)
        for account in accounts:
            account.groups.add(group)
        self._of[group] = partition
        if group.index:
            partition.policy.join(group, stamp)

    def remove(self, group: Group) -> None:
        """A group is no more on any partition. What is shared by those without quotas stays: it has learned."""
        partition = self._of.pop(group)
        partition.groups.remove(group)
        for account in partition.accounts:
            account.groups.remove(group)
        if partition.accounts and not partition.groups:
            del self._by_key[partition.slot_bytes, partition.accounts]


def oldest_stamp(partitions: Sequence[Partition], victims: Victims) -> int | None:
    """No candidate on them was used before this; None if there is none."""
    stamps = [stamp for partition in partitions if (stamp := partition.policy.oldest_stamp(victims.gone)) is not None]
    return min(stamps, default=None)


def take(partitions: Sequence[Partition], count: int, victims: Victims, stamp: int) -> int:
    """Adds up to `count` victims of these partitions, those of least worth first; how many there were."""
    if len(partitions) == 1:
        return victims.take(partitions[0].policy, count)
    ranked: list[tuple[float, int]] = []
    for nth, partition in enumerate(partitions):
        # One is looked at a call, on average, however many there are.
        if (worth := partition.worth(len(partitions), victims.gone, stamp)) is not None:
            ranked.append((worth, nth))
    heapq.heapify(ranked)
    taken, at_once = 0, -(-count // TURNS)
    while ranked and taken < count:
        believed, nth = heapq.heappop(ranked)  # It may be worth more by now, for it was used.
        worth = partitions[nth].look(victims.gone, stamp)
        if worth is not None and worth <= max(believed, ranked[0][0] if ranked else worth):
            taken += victims.take(partitions[nth].policy, min(at_once, count - taken))
            worth = partitions[nth].look(victims.gone, stamp) if taken < count else None
        if worth is not None:
            heapq.heappush(ranked, (worth, nth))
    return taken
