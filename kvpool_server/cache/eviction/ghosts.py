"""When blocks that were evicted had last been used, the latest of them, in many small dicts.

Python copies a dict when it grows, and again and again while keys come and go: in one dict, the ghosts of ten million
entries would hold the event loop for tens of milliseconds. So blocks are kept by their place, one of `NUM_PLACES`,
and the oldest of each place are forgotten in turn.

Whatever empties the pool makes ghosts by the hundred thousand, and Python's garbage collector examines new objects:
0.15 s for the ghosts of five million entries, were they tuples in an `OrderedDict`. So blocks and stamps are ints, in
plain dicts, which the collector does not look into.

Not thread-safe.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict

NUM_PLACES = 256
MAX_OF_PLACE = 32_768
"""A client may choose names that all have one place: its ghosts forget each other."""
MIN_ORDER = 128


class Ghosts:
    """See the module. A block is a number of 64 bits with sign."""

    __slots__ = ("_length", "_places")

    def __init__(self) -> None:
        self._places: OrderedDict[int, _Place] = OrderedDict()  # None is empty.
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, place: int, block: int, stamp: int) -> None:
        """Remembers the stamp of a block's last use."""
        ghosts = self._places.get(place)
        if ghosts is None:
            ghosts = self._places[place] = _Place()
        self._length -= len(ghosts)
        ghosts.add(block, stamp)
        if len(ghosts) > MAX_OF_PLACE:
            ghosts.forget_one()
        self._length += len(ghosts)

    def pop(self, place: int, block: int) -> int | None:
        """The stamp of a block's last use, which is forgotten; None if it is not known."""
        ghosts = self._places.get(place)
        if ghosts is None or (stamp := ghosts.pop(block)) is None:
            return None
        self._length -= 1
        if not len(ghosts):
            del self._places[place]
        return stamp

    def forget_one(self) -> None:
        """Forgets one of the oldest, of each place in turn. There must be one."""
        place, ghosts = next(iter(self._places.items()))
        ghosts.forget_one()
        self._length -= 1
        if len(ghosts):
            self._places.move_to_end(place)
        else:
            del self._places[place]


class _Place:
    """The ghosts of one place.

    To find a dict's first key takes long once many before it have gone. So the order in which they came is kept beside
    them, with their stamps: what has been popped, or has come again with another stamp, is passed over.
    """

    __slots__ = ("_next", "_order", "_stamps")

    def __init__(self) -> None:
        self._stamps: dict[int, int] = {}
        self._order = array("q")  # Block, stamp, block, stamp, ...; what lies before `_next` is over.
        self._next = 0

    def __len__(self) -> int:
        return len(self._stamps)

    def add(self, block: int, stamp: int) -> None:
        self._stamps.pop(block, None)
        self._stamps[block] = stamp
        self._order.append(block)
        self._order.append(stamp)
        if len(self._order) - self._next > 4 * len(self._stamps) + MIN_ORDER:  # Most of them have been popped.
            self._order, self._next = array("q", itertools.chain.from_iterable(self._stamps.items())), 0

    def pop(self, block: int) -> int | None:
        return self._stamps.pop(block, None)

    def forget_one(self) -> None:
        while True:
            block, stamp = self._order[self._next : self._next + 2]
            self._next += 2
            if 2 * self._next >= len(self._order):
                del self._order[: self._next]
                self._next = 0
            if self._stamps.get(block) == stamp:
                del self._stamps[block]
                return
