"""When blocks that were evicted had last been used, the latest of them, in many small dicts.

Python copies a dict when it grows, and again and again while keys come and go: in one dict, the ghosts of ten million
entries would hold the event loop for tens of milliseconds. So blocks are kept by their place, one of `NUM_PLACES`,
and the oldest of each place are forgotten in turn.

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

    __slots__ = ("_length", "_stamps")

    def __init__(self) -> None:
        self._stamps: OrderedDict[int, OrderedDict[Hashable, int]] = OrderedDict()  # By place: none is empty.
        self._length = 0

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
        if stamps is None or (stamp := stamps.pop(block, None)) is None:
            return None
        self._length -= 1
        if not stamps:
            del self._stamps[place]
        return stamp

    def forget_one(self) -> None:
        """Forgets one of the oldest, of each place in turn. There must be one."""
        place, stamps = next(iter(self._stamps.items()))
        stamps.popitem(last=False)
        self._length -= 1
        if stamps:
            self._stamps.move_to_end(place)
        else:
            del self._stamps[place]
