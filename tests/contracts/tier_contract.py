"""What every tier must do; each tier's own tests subclass `TierContract`, or `PersistentTierContract`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import pytest

from kvpool.protocol.hashing import checksum
from kvpool.protocol.namespace import NamespaceSpec
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.tiers.tier import Block, Tier
from tests.support.values import block_hash, group_spec, namespace_spec, payload

P = ParamSpec("P")
T = TypeVar("T")
AnyTier = TypeVar("AnyTier", bound=Tier)

CHUNK = 2048
SHARDS = 2
SLOT = SHARDS * CHUNK


def namespace_of(spec: NamespaceSpec) -> PoolNamespace:
    return PoolNamespace(spec, spec.fingerprint())


def blocks_of(*names: object, nbytes: int = SLOT, shards: int = SHARDS) -> list[Block]:
    """Blocks of one prefix."""
    made: list[Block] = []
    for name in names:
        data = payload(name, nbytes)
        sums = [checksum(part) for part in np.split(data, shards)]
        made.append(Block(block_hash(name), made[-1].block_hash if made else b"", sums, data.data))
    return made


class Memory:
    """Where blocks are read to: page-aligned, as the arena is, and full of other bytes before."""

    def __init__(self, count: int, nbytes: int = SLOT):
        aligned = np.full(count * nbytes + 4096, 0xA5, np.uint8)
        skip = -aligned.ctypes.data % 4096
        self.blocks = aligned[skip : skip + count * nbytes].reshape(count, nbytes)

    @property
    def views(self) -> list[memoryview]:
        return [block.data for block in self.blocks]


def awaited(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Runs a coroutine function, a test's or a helper's, on an event loop of its own, for 60 s at most."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        async def within() -> T:
            async with asyncio.timeout(60):
                return await function(*args, **kwargs)

        return asyncio.run(within())

    return run


@contextlib.asynccontextmanager
async def opened(tier: AnyTier) -> AsyncIterator[AnyTier]:
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()


async def there(tier: Tier, namespace: PoolNamespace, names: Sequence[object], group_idx: int = 0) -> list[bool]:
    hashes = [block_hash(name) for name in names]
    found = await tier.find(namespace.groups[group_idx], hashes)
    assert tier.known(namespace.groups[group_idx], hashes) in (None, found)
    return found


async def read_back(tier: Tier, namespace: PoolNamespace, names: Sequence[object]) -> list[object]:
    """Of each name: itself if its bytes came, None for a miss; anything else fails."""
    memory = Memory(len(names))
    sums = await tier.read(namespace.groups[0], [block_hash(name) for name in names], memory.views)
    got: list[object] = []
    for name, block, expected in zip(names, memory.blocks, sums, strict=True):
        if expected is not None:
            assert np.array_equal(block, payload(name, SLOT)), f"wrong bytes for {name}"
            assert list(expected) == [checksum(part) for part in np.split(block, SHARDS)]
        got.append(None if expected is None else name)
    return got


class TierContract:
    """Fixture `make_tier` is to be given: each call makes a tier that is not open yet, with room for 40 blocks."""

    spec = namespace_spec(group_spec(chunk_bytes=CHUNK, num_shards=SHARDS), group_spec(chunk_bytes=CHUNK))

    @pytest.fixture
    def namespace(self) -> PoolNamespace:
        return namespace_of(namespace_spec(*self.spec.groups))

    @awaited
    async def test_what_was_written_is_read(self, make_tier: Callable[[], Tier], namespace: PoolNamespace) -> None:
        async with opened(make_tier()) as tier:
            names = [f"w{nth}" for nth in range(40)]
            assert await there(tier, namespace, names) == [False] * 40
            assert await read_back(tier, namespace, names[:3]) == [None] * 3
            assert await tier.write(namespace.groups[0], blocks_of(*names)) == 40
            assert await there(tier, namespace, [*names, "other"]) == [True] * 40 + [False]
            assert await read_back(tier, namespace, ["other", *names]) == [None, *names]
            assert await read_back(tier, namespace, names[::-3]) == names[::-3]
            assert await tier.write(namespace.groups[0], blocks_of(*names[:2], "new")) == 3, (
                "to write again is no error"
            )
            assert await read_back(tier, namespace, [*names[:3], "new"]) == [*names[:3], "new"]

    @awaited
    async def test_namespaces_and_groups_share_nothing(
        self, make_tier: Callable[[], Tier], namespace: PoolNamespace
    ) -> None:
        other = namespace_of(namespace_spec(*self.spec.groups))
        async with opened(make_tier()) as tier:
            await tier.write(namespace.groups[0], blocks_of("a"))
            assert await there(tier, other, ["a"]) == [False]
            assert await there(tier, namespace, ["a"], group_idx=1) == [False]
            assert await read_back(tier, other, ["a"]) == [None]
            await tier.write(namespace.groups[1], blocks_of("a", nbytes=CHUNK, shards=1))
            assert await there(tier, namespace, ["a"], group_idx=1) == [True]
            assert await read_back(tier, namespace, ["a"]) == ["a"]

    @awaited
    async def test_what_is_removed_or_cleared_is_gone(
        self, make_tier: Callable[[], Tier], namespace: PoolNamespace
    ) -> None:
        other = namespace_of(namespace_spec(*self.spec.groups))
        async with opened(make_tier()) as tier:
            await tier.write(namespace.groups[0], blocks_of("a", "b", "c"))
            await tier.write(other.groups[0], blocks_of("a"))
            await tier.remove(namespace.groups[0], [block_hash("b"), block_hash("never there")])
            assert await there(tier, namespace, ["a", "b", "c"]) == [True, False, True]
            await tier.clear(namespace.fingerprint)
            assert await there(tier, namespace, ["a", "b", "c"]) == [False] * 3
            assert await read_back(tier, namespace, ["a", "b", "c"]) == [None] * 3
            assert await read_back(tier, other, ["a"]) == ["a"]
            await tier.clear()
            assert await there(tier, other, ["a"]) == [False]
            assert await tier.write(namespace.groups[0], blocks_of("a")) == 1
            assert await read_back(tier, namespace, ["a"]) == ["a"]

    @awaited
    async def test_it_says_what_it_holds(self, make_tier: Callable[[], Tier], namespace: PoolNamespace) -> None:
        async with opened(make_tier()) as tier:
            assert tier.holdings(namespace.fingerprint).num_entries == 0
            await tier.write(namespace.groups[0], blocks_of("a", "b"))
            held = tier.holdings(namespace.fingerprint)
            assert (held.tier, held.num_entries, held.nbytes) == (tier.name, 2, 2 * SLOT)
            stats = tier.stats()
            assert stats.name == tier.name and stats.num_entries >= 2 and stats.used_bytes >= 2 * SLOT
            assert stats.counters["written_bytes"] == 2 * SLOT
            await read_back(tier, namespace, ["a"])
            assert tier.stats().counters["read_bytes"] == SLOT

    @awaited
    async def test_close_is_idempotent_and_ends_all_threads(self, make_tier: Callable[[], Tier]) -> None:
        before = set(threading.enumerate())
        async with opened(make_tier()) as tier:
            await tier.close()
        assert not [each for each in set(threading.enumerate()) - before if each.name.startswith("kvpool-tier")]


class PersistentTierContract(TierContract):
    """As `TierContract`, for tiers whose blocks survive the server; each call of `make_tier` names the same place."""

    @awaited
    async def test_the_next_process_finds_it(self, make_tier: Callable[[], Tier], namespace: PoolNamespace) -> None:
        names = [f"n{nth}" for nth in range(10)]
        async with opened(make_tier()) as first:
            await first.write(namespace.groups[0], blocks_of(*names))
        async with opened(make_tier()) as second:
            assert await there(second, namespace, names) == [True] * 10
            assert await read_back(second, namespace, names) == names
