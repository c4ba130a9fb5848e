"""The pool's record of a block, the index of the block's group, and the observer of its changes.

States of an entry, by its bitmaps over shards (bit s: shard s):
    reserved    pending != 0           a shard is being written under a live ticket
    incomplete  present != full mask   a shard is missing; the entry is not readable
    complete    present == full mask   readable
A dropped entry (`live` False) is no longer in its group's index; its slot may still be in quarantine.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from kvpool.protocol.namespace import GroupSpec, NamespaceSpec
from kvpool.protocol.types import BlockRun, RunHits

Value = TypeVar("Value")

SPLIT_AT = 16_384
"""Entries of an index's dict that is split, which takes about 2 ms."""
MAX_DEPTH = 16


class _Shard(dict[bytes, Value]):
    """The values whose keys' hash values have the same lowest `depth` bits."""

    __slots__ = ("depth", "position")

    def __init__(self, depth: int, position: int):
        super().__init__()
        self.depth = depth
        self.position = position


class BlockIndex(Generic[Value]):
    """A mapping from block hashes to entries. Up to `SPLIT_AT` of them it keeps the order of insertion.

    Python copies a dict when it grows, and also when many keys have replaced others: 0.2 s for three million keys,
    which would hold the event loop. So the entries are in many small dicts, and an index that grows splits one of them
    at a time, by one more bit of the keys' hash values (extendible hashing).

    Source: R. Fagin, J. Nievergelt, N. Pippenger, R. Strong, Extendible Hashing, 1979.
    """

    __slots__ = ("_directory", "_length", "_mask", "_shards")

    def __init__(self, expected: int = 0) -> None:
        """`expected`: about how many values come at once. Their index is not split for each part of them."""
        depth = min(MAX_DEPTH, (expected // SPLIT_AT).bit_length())
        self._shards: list[_Shard[Value]] = [_Shard(depth, position) for position in range(1 << depth)]
        self._directory = self._shards[:]
        self._mask = len(self._shards) - 1
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._directory[hash(block_hash) & self._mask]

    def get(self, block_hash: bytes) -> Value | None:
        return self._directory[hash(block_hash) & self._mask].get(block_hash)

    def get_all(self, block_hashes: Iterable[bytes]) -> Iterator[Value | None]:
        """The value of each block, found when it is asked for."""
        if not self._mask:
            return map(self._directory[0].get, block_hashes)
        directory, mask = self._directory, self._mask
        return (directory[hash(block_hash) & mask].get(block_hash) for block_hash in block_hashes)

    def add(self, block_hash: bytes, value: Value) -> bool:
        """Adds the value of a block; False, and nothing has changed, if it has one."""
        shard = self._directory[hash(block_hash) & self._mask]
        if shard.setdefault(block_hash, value) is not value:
            return False
        self._length += 1
        if len(shard) > SPLIT_AT and shard.depth < MAX_DEPTH:
            self._split(shard)
        return True

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

    def remove(self, block_hash: bytes) -> None:
        """Removes the value of a block that has one."""
        shard = self._directory[hash(block_hash) & self._mask]
        del shard[block_hash]
        self._length -= 1
        if not shard:
            shard.clear()  # A dict never frees its table by itself.

    def parts(self) -> Iterator[list[Value]]:
        """All values in lists, each made when it is asked for: the index may change meanwhile."""
        for position in range(len(self._shards)):
            yield list(self._shards[position].values())

    def values(self) -> Iterator[Value]:
        """All values. Valid until the index changes."""
        for shard in self._shards:
            yield from shard.values()


_NO_NAMESPACE = NamespaceSpec("", ())


@dataclass(eq=False, slots=True)
class Group:
    """One KV-cache group of an open namespace: its index of entries by block hash.

    Args:
        idx: `group_idx` in its namespace.
        namespace: its namespace's name in KV events.
        tenant: whose extents its slots are in; "" where the arena has one tenant.
        declared_tenant: the tenant in its namespace's specification, which selects its stream of KV events.
        is_measurement: its blocks are no engine's, and are kept out of tiers.

    Attributes:
        leaving: live entries that have left the index, and that are being dropped some at a time.
        needs_prefix: a hit needs all blocks from its start, not only the last ones.
        slot_class: tenant and slot size, which tell its extents from others'.
        num_slots: slots of its entries, with those of dropped entries that are not free yet.
    """

    spec: GroupSpec
    idx: int = 0
    namespace: str = ""
    fingerprint: bytes = b""
    tenant: str = ""
    declared_tenant: str = ""
    is_measurement: bool = False
    namespace_spec: NamespaceSpec = _NO_NAMESPACE
    block_tokens: int = field(init=False)
    full_mask: int = field(init=False)
    needs_prefix: bool = field(init=False)
    index: BlockIndex[Entry] = field(default_factory=BlockIndex, init=False)
    leaving: BlockIndex[Entry] = field(default_factory=BlockIndex, init=False)
    num_complete: int = field(default=0, init=False)
    num_slots: int = field(default=0, init=False)
    slot_class: tuple[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.block_tokens = self.spec.block_tokens
        self.full_mask = (1 << self.spec.num_shards) - 1
        self.needs_prefix = self.spec.needs_prefix
        self.slot_class = (self.tenant, self.spec.slot_bytes)

    @property
    def num_live(self) -> int:
        return len(self.index) + len(self.leaving)

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.spec.slot_bytes

    def hits(self, run: BlockRun, prefix_only: bool, found: list[Entry]) -> RunHits:
        """The hits of one run; appends the complete entries to `found`."""
        full_mask, before = self.full_mask, len(found)
        entries = self.index.get_all(run.block_hashes)
        for entry in entries:
            if entry is None or entry.present != full_mask:
                break
            found.append(entry)
        leading = len(found) - before
        if prefix_only:
            return RunHits(leading)
        flags = ["1"] * leading + ["0"] * (leading < len(run))
        for entry in entries:
            if entry is None or entry.present != full_mask:
                flags.append("0")
            else:
                flags.append("1")
                found.append(entry)
        return RunHits(leading, int("".join(reversed(flags)), 2))

    def find(self, runs: Sequence[BlockRun]) -> tuple[list[Entry], int]:
        """The entries of these blocks, each once, and how many of the blocks have no entry."""
        hashes = dict.fromkeys(block_hash for run in runs for block_hash in run.block_hashes)
        named = list(self.index.get_all(hashes))
        return [entry for entry in named if entry is not None], named.count(None)

    def start_leaving(self) -> int:
        """Empties the index at once, whatever its size; returns how many entries are to be dropped."""
        assert not self.leaving, "the entries of the last time are still to be dropped"
        self.leaving, self.index = self.index, BlockIndex()
        return len(self.leaving)

    def forget(self, entry: Entry) -> None:
        index = self.index if self.index.get(entry.block_hash) is entry else self.leaving
        index.remove(entry.block_hash)


class Entry(msgspec.Struct, eq=False):
    """One block. A structure, because it is made in C: an adoption makes a million.

    Attributes:
        offset: of its slot in the arena, bytes.
        parent: the entry of the preceding block, if that block had one when this entry was made.
        parent_hash: of the preceding block, with or without an entry; empty at the start of a prefix.
        children: live entries whose parent this is; only entries without children are evicted.
        present, pending: bitmaps over shards.
        pending_until: the latest deadline of all tickets that ever covered it.
        checksums: xxh3-64 of each present shard.
        leases: how many live leases cover it.
        used: the stamp of its last use: the number of the pool's call and, below `TICK`, the policy's kind of use;
            `EXPIRED` if a client has said since that it is not needed any more.
        pinned_until: until when it is evicted after others, in seconds of the pool's clock; 0: it was never pinned.
        depth: how many ancestors it had when it was made.
        queued: the evictor that holds it as a candidate; None: no evictor does.
    """

    group: Group
    block_hash: bytes
    parent: Entry | None
    offset: int
    used: int
    parent_hash: bytes = b""
    checksums: array[int] = msgspec.field(default_factory=lambda: array("Q"))
    depth: int = 0
    present: int = 0
    children: int = 0
    pending: int = 0
    pending_until: float = 0.0
    pinned_until: int = 0
    leases: int = 0
    queued: Any = None  # An `Evictor`, which is a module above this one.
    live: bool = True

    @property
    def complete(self) -> bool:
        return self.present == self.group.full_mask

    @property
    def is_leaving(self) -> bool:
        """True if it is live, and has left its group's index."""
        leaving = self.group.leaving
        return len(leaving) > 0 and leaving.get(self.block_hash) is self

    @property
    def movable(self) -> bool:
        """True if no lease and no ticket covers it."""
        return self.leases == 0 and self.pending == 0


class Record(NamedTuple):
    """A complete entry as a journal stores it, where its bytes outlive the process.

    Args:
        tag: authenticates the bytes; empty where servers share no key.
    """

    block_hash: bytes
    parent_hash: bytes
    offset: int
    checksums: Sequence[int]
    tag: bytes = b""


class Observer:
    """Called inside the pool's call that makes the change: must return quickly and must not call the pool.

    An entry is readable between `stored` and `removed`, and at no other time.
    """

    def stored(self, entries: Sequence[Entry]) -> None:
        """Entries of one group have become complete."""

    def removed(self, entry: Entry) -> None:
        """A complete entry has left the index."""

    def evicted(self, entry: Entry) -> None:
        """A complete entry is about to be removed to free its slot for a put. `removed` follows."""
