"""Entries by block hash, in many small dicts: a dict of millions would hold the event loop whenever it is resized.

Python copies a dict when it grows, and also when many keys have replaced others: 0.2 s for three million keys. So an
index that grows splits one of its dicts at a time, by one more bit of the keys' hash values (extendible hashing).

Source: R. Fagin, J. Nievergelt, N. Pippenger, R. Strong, Extendible Hashing, 1979.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value")

SPLIT_AT = 16_384
"""Entries of a dict that is split, which takes about 2 ms."""
MAX_DEPTH = 16


class _Shard(dict[bytes, Value]):
    """The values whose keys' hash values have the same lowest `depth` bits."""

    __slots__ = ("depth", "position")

    def __init__(self, depth: int, position: int):
        super().__init__()
        self.depth = depth
        self.position = position


class BlockIndex(Generic[Value]):
    """A mapping from block hashes to entries. Up to `SPLIT_AT` of them it keeps the order of insertion."""

    __slots__ = ("_directory", "_length", "_mask", "_shards")

    def __init__(self) -> None:
        self._shards: list[_Shard[Value]] = [_Shard(0, 0)]
        self._directory = self._shards[:]
        self._mask = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._directory[hash(block_hash) & self._mask]

    def __getitem__(self, block_hash: bytes) -> Value:
        return self._directory[hash(block_hash) & self._mask][block_hash]

    def get(self, block_hash: bytes) -> Value | None:
        return self._directory[hash(block_hash) & self._mask].get(block_hash)

    def get_all(self, block_hashes: Iterable[bytes]) -> Iterator[Value | None]:
        """The value of each block, found when it is asked for."""
        if not self._mask:
            return map(self._directory[0].get, block_hashes)
        directory, mask = self._directory, self._mask
        return (directory[hash(block_hash) & mask].get(block_hash) for block_hash in block_hashes)

    def add(self, block_hash: bytes, value: Value) -> None:
        """Adds the value of a block that has none."""
        shard = self._directory[hash(block_hash) & self._mask]
        shard[block_hash] = value
        self._length += 1
        if len(shard) > SPLIT_AT and shard.depth < MAX_DEPTH:
            self._split(shard)

    def _split(self, shard: _Shard[Value]) -> None:
        if 1 << shard.depth > self._mask:
            self._directory += self._directory
            self._mask = len(self._directory) - 1
        bit = 1 << shard.depth
        halves: tuple[_Shard[Value], _Shard[Value]] = (
            _Shard(shard.depth + 1, shard.position),
            _Shard(shard.depth + 1, len(self._shards)),
        )
        for block_hash, value in shard.items():
            halves[hash(block_hash) & bit > 0][block_hash] = value
        self._shards[shard.position] = halves[0]
        self._shards.append(halves[1])
        for nth in range(hash(next(iter(shard))) & bit - 1, len(self._directory), bit):
            self._directory[nth] = halves[nth & bit > 0]

    def remove(self, block_hash: bytes) -> Value | None:
        """Removes and returns the value of a block, if it has one."""
        shard = self._directory[hash(block_hash) & self._mask]
        value = shard.pop(block_hash, None)
        if value is not None:
            self._length -= 1
            if not shard:
                shard.clear()  # A dict never frees its table by itself.
        return value

    def parts(self) -> Iterator[list[Value]]:
        """All values in lists, each made when it is asked for: the index may change meanwhile."""
        for position in range(len(self._shards)):
            yield list(self._shards[position].values())

    def values(self) -> Iterator[Value]:
        """All values. Valid until the index changes."""
        for shard in self._shards:
            yield from shard.values()
