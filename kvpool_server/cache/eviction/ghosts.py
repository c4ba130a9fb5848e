"""When blocks that were evicted had last been used, the latest of them, in many small dicts.

Python copies a dict when it grows, and again and again while keys come and go: in one dict, the ghosts of ten million
entries would hold the event loop for tens of milliseconds. So blocks are kept by their place in [0, NUM_PLACES), and
the oldest of each place are forgotten in turn.

Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

NUM_PLACES = 256
MAX_OF_PLACE = 32_768
"""A client may choose names that all have one place: its ghosts forget each other."""


class Ghosts:
    """See the module."""

    __slots__ = ("_length", "_next", "_stamps")

    def __init__(self) -> None:
        self._stamps: dict[int, OrderedDict[Hashable, int]] = {}  # By place, oldest first.
        self._length = 0
        self._next = 0

    def __len__(self) -> int:
        return self._length

    def add(self, place: int, block: Hashable, stamp: int) -> None:
        """Remembers the stamp of a block's last use."""
        stamps = self._stamps.get(place)
        if stamps is None:
            stamps = self._stamps[place] = OrderedDict()
        self._length -= len(stamps)
        stamps[block] = stamp
        if len(stamps) > MAX_OF_PLACE:
            stamps.popitem(last=False)
        self._length += len(stamps)

    def pop(self, place: int, block: Hashable) -> int | None:
        """The stamp of a block's last use, which is forgotten; None if it is not known."""
        stamps = self._stamps.get(place)
        stamp = None if stamps is None else stamps.pop(block, None)
        self._length -= stamp is not None
        return stamp

    def forget_one(self) -> None:
        """Forgets one of the oldest. There must be one."""
        while not (stamps := self._stamps.get(self._next)):
            self._next = (self._next + 1) % NUM_PLACES
        stamps.popitem(last=False)
        self._length -= 1
        self._next = (self._next + 1) % NUM_PLACES
