"""Who hears of a pool's readable blocks."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool_server.cache.entry import Entry


class Observer:
    """Told of every change, inside the call that makes it: be quick, and call nothing of the pool. This one ignores it.

    Between the two calls for an entry it is readable, and at no other time.
    """

    def stored(self, entry: Entry) -> None:
        """An entry has become complete."""

    def removed(self, entry: Entry) -> None:
        """A complete entry has left the index."""

    def evicted(self, entry: Entry) -> None:
        """A complete entry is about to be removed, to make room, and nobody has asked for its bytes first."""


class Observers(Observer):
    """Tells several."""

    def __init__(self, observers: Sequence[Observer]):
        self._observers = observers

    def stored(self, entry: Entry) -> None:
        for observer in self._observers:
            observer.stored(entry)

    def removed(self, entry: Entry) -> None:
        for observer in self._observers:
            observer.removed(entry)

    def evicted(self, entry: Entry) -> None:
        for observer in self._observers:
            observer.evicted(entry)
