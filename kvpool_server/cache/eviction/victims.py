"""Who is to go to make room, until it is certain that there will be room."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.eviction import CHOSEN, Policy


class Victims:
    """Entries to be dropped, in this order. Nobody is in it twice, whoever chose it.

    Attributes:
        entries: in order.
        gone: how many of an entry's children are among them; `CHOSEN` for those that are among them themselves.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.gone: dict[Entry, int] = {}
        self._from_policies: list[tuple[Policy, list[Entry]]] = []
        self._from_elsewhere: list[Entry] = []

    def take(self, policy: Policy, count: int) -> int:
        """Adds up to `count` that a policy chooses; how many there were."""
        chosen = policy.choose(count, self.gone)
        self._from_policies.append((policy, chosen))
        self.entries += chosen
        return len(chosen)

    def add(self, entries: Iterable[Entry]) -> None:
        """Adds entries that no policy was asked for. Those that are among them already stay where they are."""
        for entry in entries:
            if self.gone.get(entry) == CHOSEN:
                continue
            self.gone[entry] = CHOSEN
            self.entries.append(entry)
            self._from_elsewhere.append(entry)
            parent = entry.parent
            if parent is not None and parent.live and (before := self.gone.get(parent, 0)) != CHOSEN:
                self.gone[parent] = before + 1

    def nbytes(self, counts: Callable[[Group], bool]) -> int:
        """Bytes of the slots of those whose group counts."""
        return sum(entry.group.spec.slot_bytes for entry in self.entries if counts(entry.group))

    def undo(self, policy_of: Callable[[Group], Policy]) -> None:
        """Nobody goes: every policy is told, and nothing has changed."""
        for policy, chosen in self._from_policies:
            policy.restore(chosen)
        for entry in self._from_elsewhere:
            # A policy that came across it meanwhile has let go of it.
            if not entry.children and not entry.pending:
                policy_of(entry.group).add(entry)
