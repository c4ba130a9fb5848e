"""What this server knows of the cluster without asking: what it has lately written, found or read there."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

GOOD_S = 10.0
"""How long it is believed that a block is there: the cluster evicts, and others remove, without a word."""
MAX_BLOCKS = 1 << 17

BlockKey = tuple[bytes, int, bytes]
"""(fingerprint, group_idx, block_hash)"""


@dataclass(slots=True)
class _Note:
    good_until: float
    own_bytes: int


class Memo:
    """The latest MAX_BLOCKS blocks. Belongs to the event loop.

    Attributes:
        num_own: blocks by namespace that this server has put there, and has not found gone since.
        own_bytes: of their slots.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._notes: OrderedDict[BlockKey, _Note] = OrderedDict()
        self.num_own: Counter[bytes] = Counter()
        self.own_bytes: Counter[bytes] = Counter()

    def has(self, key: BlockKey) -> bool:
        """Whether the block was there a moment ago. False says nothing."""
        note = self._notes.get(key)
        return note is not None and self._clock() < note.good_until

    def saw(self, key: BlockKey, own_bytes: int = 0) -> None:
        """The block is there.

        Args:
            own_bytes: of its slot, if it was put there by this server just now.
        """
        if (note := self._notes.get(key)) is None:
            note = self._notes[key] = _Note(0.0, 0)
        note.good_until = self._clock() + GOOD_S
        if own_bytes and not note.own_bytes:
            note.own_bytes = own_bytes
            self.num_own[key[0]] += 1
            self.own_bytes[key[0]] += own_bytes
        self._notes.move_to_end(key)
        while len(self._notes) > MAX_BLOCKS:
            self.forget(next(iter(self._notes)))

    def forget(self, key: BlockKey) -> None:
        """The block is gone, or is to be."""
        note = self._notes.pop(key, None)
        if note is not None and note.own_bytes:
            self.num_own[key[0]] -= 1
            self.own_bytes[key[0]] -= note.own_bytes

    def forget_all(self, fingerprint: bytes = b"") -> None:
        """All blocks of a namespace, or of all, are gone."""
        self.forget_each([key for key in self._notes if not fingerprint or key[0] == fingerprint])

    def forget_each(self, keys: Iterable[BlockKey]) -> None:
        """These are gone."""
        for key in keys:
            self.forget(key)
