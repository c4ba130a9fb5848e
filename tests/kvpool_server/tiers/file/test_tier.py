"""The file tier: the contract, and what is its own."""

from __future__ import annotations

import asyncio
import os
import threading
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvpool.protocol.errors import ConfigError
from kvpool_server.cache.entry import Record
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.rpc.turns import Turns
from kvpool_server.sharing import Limits
from kvpool_server.tiers.file import journal
from kvpool_server.tiers.file.directory import OwnDirectory
from kvpool_server.tiers.file.extents import Disk
from kvpool_server.tiers.file.tier import FileTier
from kvpool_server.tiers.tier import Block, OpenFiles, Tier, TierError
from tests.contracts.tier_contract import (
    SHARDS,
    SLOT,
    Memory,
    PersistentTierContract,
    TierContract,
    awaited,
    blocks_of,
    namespace_of,
    opened,
    read_back,
    there,
)
from tests.support.file_tier import SIZE, BadDisk, file_tier
from tests.support.integrity import check_integrity
from tests.support.values import block_hash, group_spec, namespace_spec

GROUP = TierContract.spec.groups[0]


def _tier(root: Path, owner: str = "one", size: int = SIZE, io: str = "direct", disk: Disk | None = None) -> FileTier:
    return file_tier(root, owner, size, io=io, create=True, disk=disk)


class TestFileTier(PersistentTierContract):
    @pytest.fixture(params=["direct", "buffered"])
    def make_tier(self, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[], Tier]:
        return lambda: _tier(tmp_path / "tier", io=request.param)

    @awaited
    async def test_it_keeps_within_its_size_and_forgets_the_ends_of_old_prefixes(
        self, tmp_path: Path, namespace: PoolNamespace
    ) -> None:
        async with opened(_tier(tmp_path)) as tier:
            most = SIZE // SLOT
            names = [f"p{prefix}-{nth}" for prefix in range(3) for nth in range(most // 2)]
            for start in range(0, len(names), most // 2):
                await tier.write(namespace.groups[0], blocks_of(*names[start : start + most // 2]))
            found = await there(tier, namespace, names)
            assert sum(found) == most
            first = found[: most // 2]
            assert first == sorted(first, reverse=True), "a hole in a prefix"
            assert all(found[most // 2 :])
            kept = [name for name, is_there in zip(names, found, strict=True) if is_there]
            for start in range(0, len(kept), 64):
                assert await read_back(tier, namespace, kept[start : start + 64]) == kept[start : start + 64]
            check_integrity(tier.pool)
        assert sum(file.stat().st_blocks for file in tmp_path.rglob("extent-*")) * 512 <= SIZE
        async with opened(_tier(tmp_path)) as tier:
            assert await there(tier, namespace, names) == found, "evicted blocks do not stay gone after a restart"
            check_integrity(tier.pool)

    @awaited
    async def test_a_file_that_is_cut_or_lost_is_a_miss(self, tmp_path: Path, namespace: PoolNamespace) -> None:
        for harm in (lambda path: os.truncate(path, SLOT + 10), Path.unlink):
            async with opened(_tier(tmp_path)) as tier:
                await tier.clear()
                await tier.write(namespace.groups[0], blocks_of("a", "b", "c"))
            (extent,) = tmp_path.rglob("extent-*")
            harm(extent)
            async with opened(_tier(tmp_path)) as tier:
                got = await read_back(tier, namespace, ["a", "b", "c"])
                assert got[1:] == [None, None]
                assert await tier.write(namespace.groups[0], blocks_of("b", "c")) == 2
                assert await read_back(tier, namespace, ["b", "c"]) == ["b", "c"]

    @awaited
    async def test_few_files_are_open_however_many_extents_there_are(
        self, tmp_path: Path, namespace: PoolNamespace
    ) -> None:
        async with opened(file_tier(tmp_path, size=2 * SIZE, open_files=OpenFiles(2))) as tier:
            names = [f"x{nth}" for nth in range(2 * SIZE // SLOT)]
            await tier.write(namespace.groups[0], blocks_of(*names))
            assert len(list(tmp_path.rglob("extent-*"))) == 4
            for start in range(0, len(names), 97):
                some = names[start::97]
                assert await read_back(tier, namespace, some) == some
            links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
            assert sum("extent-" in link for link in links) <= 2 + 2, "two, and those in use by two threads"
        links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        assert not any(str(tmp_path) in link for link in links), "a file stays open"

    def test_a_file_system_that_does_not_answer_is_an_error_in_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvpool_server.tiers.file.directory.ANSWER_S", 0.1)
        monkeypatch.setattr("kvpool_server.tiers.file.tier.CLOSE_S", 0.1)
        mounted = threading.Event()
        monkeypatch.setattr(OwnDirectory, "_acquire", lambda own: mounted.wait(10))
        with pytest.raises(ConfigError, match="the file system does not answer"):
            asyncio.run(_tier(tmp_path).open())
        mounted.set()

    @awaited
    async def test_two_servers_with_one_name_is_an_error(self, tmp_path: Path) -> None:
        async with opened(_tier(tmp_path)):
            with pytest.raises(ConfigError, match=r"belongs to another running server.*name="):
                await _tier(tmp_path).open()

    @awaited
    async def test_servers_on_one_path_see_each_others_blocks(self, tmp_path: Path, namespace: PoolNamespace) -> None:
        async with opened(_tier(tmp_path, "one")) as one, opened(_tier(tmp_path, "two")) as two:
            await one.write(namespace.groups[0], blocks_of("a", "b"))
            await two.refresh()
            assert await there(two, namespace, ["a", "b", "c"]) == [True, True, False]
            assert await read_back(two, namespace, ["a", "c", "b"]) == ["a", None, "b"]
            assert await two.write(namespace.groups[0], blocks_of("a", "b", "c")) == 3
            assert two.holdings(namespace.fingerprint).num_entries == 1, "it has stored what another has"
            await one.remove(namespace.groups[0], [block_hash("a")])
            await two.refresh()
            assert await there(two, namespace, ["a", "b"]) == [False, True]
            await one.close()
            assert await read_back(two, namespace, ["b"]) == ["b"], "its owner has gone, and it could be read"

    @awaited
    async def test_what_a_neighbour_overwrites_is_a_miss(self, tmp_path: Path, namespace: PoolNamespace) -> None:
        async with opened(_tier(tmp_path, "one")) as one, opened(_tier(tmp_path, "two")) as two:
            names = [f"o{nth}" for nth in range(SIZE // SLOT)]
            await one.write(namespace.groups[0], blocks_of(*names))
            await two.refresh()  # And not once all slots have other blocks:
            await one.write(namespace.groups[0], blocks_of(*(f"new {name}" for name in names)))
            got = await read_back(two, namespace, names[:200])
            assert got == [None] * 200

    @awaited
    async def test_a_full_disk_is_a_failure_of_the_tier_alone(self, tmp_path: Path, namespace: PoolNamespace) -> None:
        disk = BadDisk()
        async with opened(_tier(tmp_path, disk=disk)) as tier:
            await tier.write(namespace.groups[0], blocks_of("a"))
            disk.is_full = True
            with pytest.raises(TierError, match="No space left"):
                await tier.write(namespace.groups[0], blocks_of("b"))
            disk.is_full = False
            assert await there(tier, namespace, ["a", "b"]) == [True, False]
            assert await tier.write(namespace.groups[0], blocks_of("b")) == 1
            assert await read_back(tier, namespace, ["a", "b"]) == ["a", "b"]
            check_integrity(tier.pool)
            disk.is_full = True
            with pytest.raises(TierError, match="No space left"):
                await tier.remove(namespace.groups[0], [block_hash("a")])
            disk.is_full = False
        async with opened(_tier(tmp_path, disk=disk)) as tier:
            assert await there(tier, namespace, ["a", "b"]) == [False, True], "the journal has lost a change"

    @awaited
    async def test_the_journal_is_compacted(
        self, tmp_path: Path, namespace: PoolNamespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvpool_server.tiers.file.own_blocks.COMPACT_AT_LEAST_BYTES", 4096)
        async with opened(_tier(tmp_path)) as tier:
            for nth in range(300):
                await tier.write(namespace.groups[0], blocks_of(f"j{nth}"))
                await tier.remove(namespace.groups[0], [block_hash(f"j{nth}")])
            await tier.write(namespace.groups[0], blocks_of("kept"))
        assert (tmp_path / "one" / "journal").stat().st_size < 20_000
        async with opened(_tier(tmp_path)) as tier:
            assert await read_back(tier, namespace, ["kept", "j7"]) == ["kept", None]
            assert tier.stats().num_entries == 1


def _journal_of(root: Path, num_namespaces: int, num_with_blocks: int) -> list[PoolNamespace]:
    """Writes a journal of namespaces whose specs exceed what a pool keeps open; the last ones have a block each."""
    (root / "one").mkdir(parents=True)
    made = [namespace_of(namespace_spec(GROUP, salt=f"{nth:060000}")) for nth in range(num_namespaces)]
    assert sum(each.spec.nbytes for each in made) > Limits().max_specs_bytes
    frames = [journal.encode_head(2 << 20), *(journal.encode_namespace(each.spec) for each in made)]
    for nth, each in enumerate(made[num_namespaces - num_with_blocks :]):
        record = Record(block_hash(nth), b"", nth * SLOT, array("Q", [0] * SHARDS), b"")
        frames.append(journal.encode_stored((each.fingerprint, 0), [record]))
    (root / "one" / journal.FILE_NAME).write_bytes(b"".join(frames))
    return made


@awaited
async def test_a_tier_with_more_namespaces_than_a_pool_keeps_open_starts_with_those_that_fit(tmp_path: Path) -> None:
    made = _journal_of(tmp_path, 300, num_with_blocks=300)
    async with opened(file_tier(tmp_path)) as tier:
        num_kept = tier.stats().num_entries
        assert 200 < num_kept < 300
        assert await there(tier, made[-1], [299]) == [False]
        new, names = made[0], list(range(1_000, 1_000 + SIZE // SLOT - num_kept))
        assert await tier.write(new.groups[0], blocks_of(*names)) == len(names)
        assert tier.stats().num_entries == SIZE // SLOT, "the slots of the other namespaces' blocks are not free"
        check_integrity(tier.pool)
    async with opened(file_tier(tmp_path)) as tier:
        assert tier.stats().num_entries == SIZE // SLOT
        assert await read_back(tier, new, names[:3]) == names[:3]


@awaited
async def test_other_tasks_run_while_many_blocks_are_dropped(tmp_path: Path) -> None:
    (root := tmp_path / "tier").mkdir()
    tiny = namespace_of(namespace_spec(group_spec(chunk_bytes=8)))
    num_passes = 0

    async def count() -> None:
        nonlocal num_passes
        while True:
            await asyncio.sleep(0)
            num_passes += tier.stats().num_entries > 0

    async with opened(file_tier(root, run=Turns().run)) as tier:
        for drop in (
            lambda: tier.clear(),
            lambda: tier.remove(tiny.groups[0], [block_hash(name) for name in range(2_000)]),
        ):
            await tier.write(tiny.groups[0], blocks_of(*range(2_000), nbytes=8, shards=1))
            counting = asyncio.create_task(count())
            await asyncio.sleep(0)
            num_passes = 0
            await drop()
            counting.cancel()
            assert tier.stats().num_entries == 0
            assert num_passes >= 3


class _SlowDisk(Disk):
    """Truncates no file before `may_truncate` is set."""

    def __init__(self) -> None:
        self.may_truncate = threading.Event()
        self.num_truncated = 0

    def truncate(self, fd: int, nbytes: int) -> None:
        assert self.may_truncate.wait(60)
        super().truncate(fd, nbytes)
        self.num_truncated += 1


@awaited
async def test_blocks_written_after_a_removal_that_was_cancelled_are_not_truncated(tmp_path: Path) -> None:
    namespace, disk = namespace_of(TierContract.spec), _SlowDisk()
    async with opened(file_tier(tmp_path, disk=disk)) as tier:
        await tier.write(namespace.groups[0], blocks_of("a"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tier.remove(namespace.groups[0], [block_hash("a")]), 0.2)
        writing = asyncio.create_task(tier.write(namespace.groups[0], blocks_of("b")))
        await asyncio.wait([writing], timeout=0.2)
        disk.may_truncate.set()
        await writing
        while not disk.num_truncated:
            await asyncio.sleep(0.01)
        assert await read_back(tier, namespace, ["b"]) == ["b"]


@awaited
async def test_bytes_bypass_the_page_cache_where_possible(tmp_path: Path) -> None:
    """Every file system of Linux accepts the attempt, or refuses it with EINVAL."""
    disk = BadDisk()
    async with opened(_tier(tmp_path, disk=disk)) as tier:
        memory = Memory(1)
        (block,) = blocks_of("a")
        memory.blocks[0] = np.frombuffer(block.payload, np.uint8)
        aligned = Block(block.block_hash, b"", block.checksums, memory.views[0])
        await tier.write(namespace_of(TierContract.spec).groups[0], [aligned])
    assert any(flags & os.O_DIRECT for flags in disk.opened_with)
