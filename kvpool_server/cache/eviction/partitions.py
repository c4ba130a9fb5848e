"""Partitions of the entries: one for each tenant, slot size and set of quotas, each with a policy of its own.

The groups of one slot size that no quota covers share a partition, and their policy learns from all of them. A subject
with a quota has its own partition, so its victims are found without visiting the entries of others. So does a tenant of
an arena that has tenants.

A partition is made when one of its groups is first used, and stays while it has entries. Of the empty ones a few are
kept, for their policies have learned. So beside these few there is at most one partition per slot size in the arena and
set of quotas, however many slot sizes clients declare.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.eviction.evictor import VICTIM, Chosen, Evictor
from kvpool_server.cache.eviction.policy import TICK, Policy

ROUNDS = 8
"""If a put needs victims of several partitions, each choice takes 1/8 of them from the partition whose next victim is
worth least: comparing partitions for every single victim would cost more than it improves."""
MAX_EMPTY = 16
"""Partitions without entries that are kept, the latest; a policy takes up to 0.4 MiB."""


@dataclass(eq=False, slots=True)
class Account:
    """A subject with a quota: a tenant's extents count or, where `tenant` is None, the slots of the groups' entries."""

    subject: str
    limit_bytes: int
    tenant: str | None = None
    groups: set[Group] = field(default_factory=set)

    @property
    def slots_bytes(self) -> int:
        return sum(group.nbytes for group in self.groups)


class Victims:
    """The entries to evict for one put, each once. A context that undoes the choice if it ends with an exception.

    Attributes:
        entries: in the order in which they are to be dropped: children before their parents.
        chosen: the same entries and their parents, as evictors count them.
    """

    def __init__(self, evictor_of: Callable[[Group], Evictor]) -> None:
        self._evictor_of = evictor_of
        self.entries: list[Entry] = []
        self.chosen = Chosen()
        self._by_evictor: list[tuple[Evictor, list[Entry]]] = []
        self._added: list[Entry] = []

    def __enter__(self) -> Victims:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            return
        for evictor, victims in self._by_evictor:
            evictor.restore(victims)
        for entry in self._added:
            # An evictor that popped this entry since has removed it from its queue.
            if not entry.children and not entry.pending:
                self._evictor_of(entry.group).add(entry)

    def choose(self, partitions: Sequence[Partition], count: int, stamp: int) -> int:
        """Adds up to `count` victims of partitions of one slot size, those worth least first; returns how many.

        Pinned ones come last.
        """
        num_chosen = self.choose_unpinned(partitions, count, stamp)
        return num_chosen + self.choose_pinned(partitions, count - num_chosen) if num_chosen < count else num_chosen

    def choose_unpinned(self, partitions: Sequence[Partition], count: int, stamp: int) -> int:
        """As `choose`, without pinned ones."""
        if len(partitions) == 1:
            return self._choose_from(partitions[0].evictor, count)
        ranked: list[tuple[float, int]] = []
        for nth, partition in enumerate(partitions):
            # On average one partition a call computes its worth anew, however many partitions there are.
            if (worth := partition.recent_worth(len(partitions), self.chosen, stamp)) is not None:
                ranked.append((worth, nth))
        heapq.heapify(ranked)
        num_chosen, at_once = 0, -(-count // ROUNDS)
        while ranked and num_chosen < count:
            recent, nth = heapq.heappop(ranked)
            worth = partitions[nth].worth(self.chosen, stamp)  # A use since may have raised it.
            if worth is not None and worth <= max(recent, ranked[0][0] if ranked else worth):
                num_chosen += self._choose_from(partitions[nth].evictor, min(at_once, count - num_chosen))
                worth = partitions[nth].worth(self.chosen, stamp) if num_chosen < count else None
            if worth is not None:
                heapq.heappush(ranked, (worth, nth))
        return num_chosen

    def choose_pinned(self, partitions: Sequence[Partition], count: int) -> int:
        """As `choose`, where no unpinned victims are left: those first whose pin ends first."""
        num_chosen = 0
        for partition in sorted(partitions, key=lambda each: each.evictor.first_pin_end):
            if num_chosen < count:
                num_chosen += self._choose_from(partition.evictor, count - num_chosen, pinned=True)
        return num_chosen

    def _choose_from(self, evictor: Evictor, count: int, pinned: bool = False) -> int:
        victims = evictor.choose(count, self.chosen, pinned)
        self._by_evictor.append((evictor, victims))
        self.entries += victims
        return len(victims)

    def add(self, entries: Iterable[Entry]) -> None:
        """Adds entries that no evictor has chosen; those that are victims already keep their position."""
        for entry in entries:
            if self.chosen.get(entry) == VICTIM:
                continue
            self.chosen[entry] = VICTIM
            self.entries.append(entry)
            self._added.append(entry)
            parent = entry.parent
            if parent is not None and parent.live and (before := self.chosen.get(parent, 0)) != VICTIM:
                self.chosen[parent] = before + 1


class Partition:
    """Entries of one slot size and tenant under the same quotas.

    Attributes:
        groups: those that have been used.
        last_used: the stamp of the last use of any entry.
    """

    def __init__(self, slot_class: tuple[str, int], accounts: tuple[Account, ...], evictor: Evictor):
        self.slot_bytes = slot_class[1]
        self.accounts = accounts
        self.evictor = evictor
        self.groups: set[Group] = set()
        self.last_used = 0
        self._worth: float | None = None
        self._worth_at = 0

    def worth(self, chosen: Chosen, stamp: int) -> float | None:
        """What its next victim is worth now; None if there is none."""
        self._worth, self._worth_at = self.evictor.least_worth(chosen, stamp), stamp
        return self._worth

    def recent_worth(self, max_calls: int, chosen: Chosen, stamp: int) -> float | None:
        """The last result of `worth` if fewer than `max_calls` calls old, else a new one."""
        if self._worth is None or stamp - self._worth_at >= max_calls * TICK:
            return self.worth(chosen, stamp)
        return self._worth

    def forget_worth(self) -> None:
        """Has `recent_worth` look again: a hint has changed which victim is next."""
        self._worth = None


class Partitions:
    """The partitions of the groups of open namespaces. `clock` is that of pins, in seconds."""

    def __init__(self, policy: Callable[[], Policy], clock: Callable[[], float]):
        self._policy = policy
        self._clock = clock
        self._accounts: dict[Group, tuple[Account, ...]] = {}
        self._by_key: dict[tuple[tuple[str, int], tuple[Account, ...]], Partition] = {}
        self._by_group: dict[Group, Partition] = {}  # Of groups that have been used.

    def accounts(self, group: Group) -> tuple[Account, ...]:
        """The quotas that cover a group."""
        return self._accounts[group]

    def of(self, group: Group) -> Partition:
        """The partition of a group, which is used."""
        if (partition := self._by_group.get(group)) is not None:
            return partition
        key = group.slot_class, self._accounts[group]
        if (partition := self._by_key.get(key)) is None:
            empty = [each for each, partition in self._by_key.items() if not partition.evictor.num_entries]
            for each in empty[: -MAX_EMPTY + 1]:
                for member in self._by_key.pop(each).groups:
                    del self._by_group[member]
            partition = self._by_key[key] = Partition(*key, Evictor(self._policy(), self._clock))
        partition.groups.add(group)
        self._by_group[group] = partition
        return partition

    def of_class(self, slot_class: tuple[str, int]) -> list[Partition]:
        """Those with entries of a slot size."""
        return [each for (of, _), each in self._by_key.items() if of == slot_class and each.evictor.num_entries]

    def of_account(self, account: Account) -> list[Partition]:
        return [partition for partition in self._by_key.values() if account in partition.accounts]

    def last_used(self, tenant: str, slot_bytes: int | None = None) -> int:
        """The stamp of the last use of a tenant's slots, of a size or of all; 0 if it has none."""
        stamps = (
            partition.last_used
            for ((owner, size), _), partition in self._by_key.items()
            if owner == tenant and slot_bytes in (None, size)
        )
        return max(stamps, default=0)

    def place(self, placed: Iterable[tuple[Sequence[Group], tuple[Account, ...]]], stamp: int) -> set[Group]:
        """Says which quotas cover the groups of namespaces. Returns the groups whose entries have another evictor now.

        Until `Evictor.requeue` has got these entries, it may not choose them.
        """
        moved = set()
        for groups, accounts in placed:
            if (before := self._accounts.get(groups[0])) == accounts:
                continue
            for account in before or ():
                account.groups.difference_update(groups)
            for account in accounts:
                account.groups.update(groups)
            self._accounts.update(dict.fromkeys(groups, accounts))
            for group in groups:
                if (left := self._leave(group)) is not None and group.num_live:
                    partition = self.of(group)
                    partition.last_used = max(partition.last_used, left.last_used)
                    partition.evictor.move_from(left.evictor, group.num_live, stamp)
                    moved.add(group)
        return moved

    def remove(self, groups: Sequence[Group]) -> None:
        """Forgets the groups of a namespace, which have no entries."""
        for group in groups:
            for account in self._accounts.pop(group):
                account.groups.remove(group)
            self._leave(group)

    def _leave(self, group: Group) -> Partition | None:
        """Takes a group from its partition; None if it has not been used. Without quotas, the partition stays."""
        if (partition := self._by_group.pop(group, None)) is not None:
            partition.groups.remove(group)
            if partition.accounts and not partition.groups:
                del self._by_key[group.slot_class, partition.accounts]
        return partition


def oldest_stamp(partitions: Sequence[Partition], victims: Victims) -> int | None:
    """A stamp before which no candidate of these partitions was used; None if there is no candidate."""
    stamps = (partition.evictor.oldest_stamp(victims.chosen) for partition in partitions)
    return min((stamp for stamp in stamps if stamp is not None), default=None)
