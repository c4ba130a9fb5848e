"""Extents of a file tier: bad spots, room that is given back, and files that are never closed under a user."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvpool_server.tiers.file.directory import Directory
from kvpool_server.tiers.file.extents import Disk, Extents
from kvpool_server.tiers.tier import OpenFiles, TierError
from tests.contracts.tier_contract import SLOT, TierContract, awaited, blocks_of, namespace_of, opened, read_back
from tests.support.file_tier import SIZE, BadDisk, file_tier
from tests.support.integrity import check_integrity
from tests.support.tier_directories import open_directory
from tests.support.values import block_hash

NAMESPACE = namespace_of(TierContract.spec)
EXTENT_BYTES = 4_096


@awaited
async def test_a_bad_spot_costs_its_block_alone(tmp_path: Path) -> None:
    disk = BadDisk()
    async with opened(file_tier(tmp_path, disk=disk)) as tier:
        await tier.write(NAMESPACE.groups[0], blocks_of(*"abcdef"))
        disk.bad_slots = {2}
        assert await read_back(tier, NAMESPACE, "abcdef") == [*"ab", None, *"def"]
        assert tier.known(NAMESPACE.groups[0], [block_hash(name) for name in "bcd"]) == [True, False, True]
        disk.bad_slots = {0}
        assert await read_back(tier, NAMESPACE, "a") == [None], "one alone says nothing about the disk"
        check_integrity(tier.pool)


@awaited
async def test_a_disk_that_reads_nothing_is_a_failure_and_a_bad_spot_with_a_whole_batch_only_once(
    tmp_path: Path,
) -> None:
    disk = BadDisk()
    async with opened(file_tier(tmp_path, disk=disk)) as tier:
        await tier.write(NAMESPACE.groups[0], blocks_of(*"abcdef"))
        disk.bad_slots = {0, 1}
        with pytest.raises(TierError, match="Input/output error"):
            await read_back(tier, NAMESPACE, "ab")
        assert tier.known(NAMESPACE.groups[0], [block_hash(name) for name in "abc"]) == [False, False, True]
        assert await read_back(tier, NAMESPACE, "abcd") == [None, None, *"cd"]
        disk.bad_slots, disk.errno = {2}, 116
        with pytest.raises(TierError, match="Stale file handle"):
            await read_back(tier, NAMESPACE, "cdef")
        disk.bad_slots = set()
        assert await read_back(tier, NAMESPACE, "cdef") == list("cdef"), "forgotten, where the file system was away"
        check_integrity(tier.pool)


@awaited
async def test_a_smaller_tier_gives_back_what_it_may_not_take(tmp_path: Path) -> None:
    async with opened(file_tier(tmp_path)) as tier:
        await tier.write(NAMESPACE.groups[0], blocks_of(*(f"s{nth}" for nth in range(SIZE // SLOT))))
    one = tmp_path / "one"
    with (one / "extent-00000").open("r+b") as file:  # Of a time when extents were longer.
        file.truncate(SIZE)
    (one / "extent-of-mine").touch()
    async with opened(file_tier(tmp_path, size=SIZE // 2)) as tier:
        assert sum(path.stat().st_size for path in one.glob("extent-*")) <= SIZE // 2
        assert sorted(path.name for path in one.glob("extent-*")) == ["extent-00000", "extent-00001", "extent-of-mine"]
        assert tier.stats().num_entries == SIZE // 2 // SLOT
    (one / "journal").unlink()  # Nothing lies anywhere any more.
    async with opened(file_tier(tmp_path, size=SIZE // 2)) as tier:
        assert sum(path.stat().st_size for path in one.glob("extent-*")) == 0


def test_a_file_that_is_being_opened_when_its_directory_is_closed_does_not_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, files, opened_fds = Disk(), OpenFiles(), list[int]()
    extents = Extents(open_directory(tmp_path), EXTENT_BYTES, True, disk, files, direct=False)
    really_open = disk.open

    def closed_meanwhile(directory: Directory, name: str, flags: int) -> int:
        opened_fds.append(really_open(directory, name, flags))
        extents.close()
        return opened_fds[-1]

    monkeypatch.setattr(disk, "open", closed_meanwhile)
    with pytest.raises(FileNotFoundError):
        extents.write(0, [memoryview(b"bytes")])
    (fd,) = opened_fds
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert not files.files


class NotedDisk(Disk):
    """Remembers which descriptors were opened and closed."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.closed: list[int] = []
        self.while_opening: Callable[[], None] = lambda: None
        self.while_writing: Callable[[], None] = lambda: None

    def open(self, directory: Directory, name: str, flags: int) -> int:
        self.opened.append(super().open(directory, name, flags))
        self.while_opening()
        return self.opened[-1]

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        self.while_writing()
        super().write(fd, views, offset)

    def close(self, fd: int) -> None:
        self.closed.append(fd)
        super().close(fd)


def _extents(path: Path, disk: Disk, files: OpenFiles) -> Extents:
    path.mkdir(exist_ok=True)
    return Extents(open_directory(path), EXTENT_BYTES, True, disk, files, direct=False)


def _use(extents: Extents, idx: int) -> None:
    extents.write(idx * EXTENT_BYTES, [memoryview(b"bytes")])


def test_a_closed_directory_opens_nothing_and_leaves_files_in_use_to_their_users(tmp_path: Path) -> None:
    disk, files = NotedDisk(), OpenFiles()
    extents = _extents(tmp_path, disk, files)
    disk.while_writing = extents.close
    _use(extents, 0)
    assert (tmp_path / "extent-00000").read_bytes() == b"bytes", "closed under a user"
    assert disk.closed == disk.opened and not files.files
    with pytest.raises(FileNotFoundError, match="closed"):
        _use(extents, 0)
