"""Blocks that this server has lately written to the cluster, or found or read there: no question to the master."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from kvpool_server.tiers.tier import BlockKey

FRESH_S = 10.0
"""How long a block is believed to be there: the cluster evicts, and other servers remove, without notice."""
MAX_BLOCKS = 1 << 17


class PresenceCache:
    """The latest MAX_BLOCKS blocks. Belongs to the event loop.

    Attributes:
        num_own: blocks by namespace that this server has written, and has not found gone since.
        own_bytes: bytes of their slots, by namespace.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._blocks: OrderedDict[BlockKey, tuple[float, int]] = OrderedDict()
        """Until when each block is believed to be there, and its own bytes."""
        self.num_own: Counter[bytes] = Counter()
        self.own_bytes: Counter[bytes] = Counter()

    def has(self, key: BlockKey) -> bool:
        """Whether the block was there within the last FRESH_S. False means unknown."""
        fresh_until, _ = self._blocks.get(key, (0.0, 0))
        return self._clock() < fresh_until

    def add(self, key: BlockKey, own_bytes: int = 0) -> None:
        """Notes that a block is there; `own_bytes` are those of its slot if this server has just written it, else 0."""
        _, known_bytes = self._blocks.get(key, (0.0, 0))
        if own_bytes and not known_bytes:
            self.num_own[key[0]] += 1
            self.own_bytes[key[0]] += own_bytes
        self._blocks[key] = self._clock() + FRESH_S, known_bytes or own_bytes
        self._blocks.move_to_end(key)
        while len(self._blocks) > MAX_BLOCKS:
            self.discard([next(iter(self._blocks))])

    def discard(self, keys: Iterable[BlockKey]) -> None:
        """Notes that blocks are gone, or about to be removed."""
        for key in keys:
            _, own_bytes = self._blocks.pop(key, (0.0, 0))
            if own_bytes:
                self.num_own[key[0]] -= 1
                self.own_bytes[key[0]] -= own_bytes

    def clear(self, fingerprint: bytes = b"") -> None:
        """Notes that all blocks of a namespace, or of all namespaces, are gone."""
        self.discard([key for key in self._blocks if not fingerprint or key[0] == fingerprint])
