"""Listeners for the blocks of a pool that become readable, or stop being readable."""

from __future__ import annotations

from kvpool_server.cache.entry import Entry


class Observer:
    """Called inside the pool's call that makes the change: must return quickly and must not call the pool.

    An entry is readable between `stored` and `removed`, and at no other time. The methods of this class do nothing.
    """

    def stored(self, entry: Entry) -> None:
        """An entry has become complete."""

    def removed(self, entry: Entry) -> None:
        """A complete entry has left the index."""

    def evicted(self, entry: Entry) -> None:
        """A complete entry is about to be removed to free its slot for a put. `removed` follows."""
