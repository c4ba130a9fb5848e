"""Extents of a file tier: bad spots, and room that is given back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.tiers.file.disk import Disk
from kvpool_server.tiers.file.tier import FileTier
from kvpool_server.tiers.tier import TierError
from tests.contracts.tier_contract import SLOT, Memory, TierContract, awaited, blocks_of, namespace_of, opened
from tests.support.file_tier import SIZE, file_tier
from tests.support.integrity import check_integrity
from tests.support.values import block_hash


class BadDisk(Disk):
    """Cannot read some slots of any extent, or fails at all reads."""

    def __init__(self) -> None:
        self.bad_slots: set[int] = set()
        self.errno = 5
        self.truncated: list[str] = []

    def read(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        nbytes = sum(view.nbytes for view in views)
        if any(offset <= slot * SLOT < offset + nbytes for slot in self.bad_slots):
            raise OSError(self.errno, os.strerror(self.errno))
        return super().read(fd, views, offset)

    def truncate(self, fd: int, nbytes: int) -> None:
        self.truncated.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        super().truncate(fd, nbytes)


def _tier(root: Path, disk: Disk | None = None, size: int = SIZE) -> FileTier:
    return file_tier(root, size=size, disk=disk)


@pytest.fixture
def namespace() -> PoolNamespace:
    return namespace_of(TierContract.spec)


async def _read(tier: FileTier, namespace: PoolNamespace, names: str) -> str:
    """The names of the blocks that came."""
    memory = Memory(len(names))
    came = await tier.read(namespace, 0, [block_hash(name) for name in names], memory.views)
    return "".join(name for name, sums in zip(names, came, strict=True) if sums is not None)


@awaited
async def test_a_bad_spot_costs_its_block_alone(tmp_path: Path, namespace: PoolNamespace) -> None:
    disk = BadDisk()
    async with opened(_tier(tmp_path, disk)) as tier:
        await tier.write(namespace, 0, blocks_of(*"abcdef"))
        disk.bad_slots = {2}
        assert await _read(tier, namespace, "abcdef") == "abdef"
        assert tier.known(namespace, 0, [block_hash(name) for name in "bcd"]) == [True, False, True]
        disk.bad_slots = {0}
        assert await _read(tier, namespace, "a") == "", "one alone says nothing about the disk"
        check_integrity(tier.pool)


@awaited
async def test_a_disk_that_reads_nothing_is_a_failure_and_a_bad_spot_with_a_whole_batch_only_once(
    tmp_path: Path, namespace: PoolNamespace
) -> None:
    disk = BadDisk()
    async with opened(_tier(tmp_path, disk)) as tier:
        await tier.write(namespace, 0, blocks_of(*"abcdef"))
        disk.bad_slots = {0, 1}
        with pytest.raises(TierError, match="Input/output error"):
            await _read(tier, namespace, "ab")
        assert tier.known(namespace, 0, [block_hash(name) for name in "abc"]) == [False, False, True]
        assert await _read(tier, namespace, "abcd") == "cd"
        disk.bad_slots, disk.errno = {2}, 116
        with pytest.raises(TierError, match="Stale file handle"):
            await _read(tier, namespace, "cdef")
        disk.bad_slots = set()
        assert await _read(tier, namespace, "cdef") == "cdef", "forgotten, where the file system was away"
        check_integrity(tier.pool)


@awaited
async def test_a_smaller_tier_gives_back_what_it_may_not_take(tmp_path: Path, namespace: PoolNamespace) -> None:
    async with opened(_tier(tmp_path)) as tier:
        for start in range(0, SIZE // SLOT, 128):
            await tier.write(namespace, 0, blocks_of(*(f"s{nth}" for nth in range(start, start + 128))))
    one = tmp_path / "one"
    with (one / "extent-00000").open("r+b") as file:  # Of a time when extents were longer.
        file.truncate(SIZE)
    (one / "extent-of-mine").touch()
    async with opened(_tier(tmp_path, size=SIZE // 2)) as tier:
        assert sum(path.stat().st_size for path in one.glob("extent-*")) <= SIZE // 2
        assert sorted(path.name for path in one.glob("extent-*")) == ["extent-00000", "extent-00001", "extent-of-mine"]
        assert tier.stats().num_entries == SIZE // 2 // SLOT
    (one / "journal").unlink()  # Nothing lies anywhere any more.
    async with opened(_tier(tmp_path, size=SIZE // 2)) as tier:
        assert sum(path.stat().st_size for path in one.glob("extent-*")) == 0


@awaited
async def test_an_extent_is_emptied_once(tmp_path: Path, namespace: PoolNamespace) -> None:
    disk = BadDisk()
    async with opened(_tier(tmp_path, disk)) as tier:
        for _ in range(2):
            await tier.write(namespace, 0, blocks_of("a"))
            (extent,) = (path for path in tmp_path.rglob("extent-*") if path.stat().st_size)
            disk.truncated.clear()
            for _ in range(3):
                await tier.remove(namespace, 0, [block_hash("a")])
            assert disk.truncated == [extent.name]
        await tier.write(namespace, 0, blocks_of("a"))
    async with opened(_tier(tmp_path, disk)) as tier:
        disk.truncated.clear()
        for _ in range(3):
            await tier.clear()
        assert len(disk.truncated) == 1, "what was there at the start is known, too"
