"""Descriptors: bounded over all directories of a server, and never closed under a user."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvpool_server.tiers.file.directory import Directory
from kvpool_server.tiers.file.disk import Disk
from kvpool_server.tiers.file.extents import Extents
from kvpool_server.tiers.open_files import OpenFile, OpenFiles, raise_descriptor_limit
from tests.support.tier_directories import open_directory

EXTENT_BYTES = 4096


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


def test_a_file_that_is_being_opened_when_its_directory_is_closed_does_not_stay_open(tmp_path: Path) -> None:
    disk, files = NotedDisk(), OpenFiles()
    extents = _extents(tmp_path, disk, files)
    disk.while_opening = extents.close
    with pytest.raises(FileNotFoundError):
        _use(extents, 0)
    assert disk.closed == disk.opened and len(disk.opened) == 1 and not files.files


def test_all_directories_share_one_number_of_descriptors(tmp_path: Path) -> None:
    disk, files = NotedDisk(), OpenFiles(3)
    directories = [_extents(tmp_path / str(nth), disk, files) for nth in range(4)]
    for extents in directories:
        for idx in range(2):
            _use(extents, idx)
            assert len(files.files) <= 3
    assert len(disk.closed) == 5
    for extents in directories:
        extents.close()
    assert len(disk.closed) == 8


def test_the_least_recently_used_file_is_closed_first(tmp_path: Path) -> None:
    disk = NotedDisk()
    extents = _extents(tmp_path, disk, OpenFiles(2))
    for idx in (0, 1, 0, 2):
        _use(extents, idx)
    assert disk.closed == [disk.opened[1]]
    extents.close()


def test_the_limit_of_descriptors_is_raised_as_far_as_the_host_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    for soft, hard in [(1024, 4096), (1024, 1 << 20), (1024, resource.RLIM_INFINITY), (1 << 17, 1 << 20), (64, 64)]:
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=(soft, hard): limits)
        raise_descriptor_limit()
    assert asked == [(4096, 4096), (65_536, 1 << 20), (65_536, resource.RLIM_INFINITY)]


def test_a_file_that_cannot_be_closed_is_logged() -> None:
    def fails(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with capture_logs() as logs:
        OpenFile(-1, fails)
    (line,) = logs
    assert line["log_level"] == "warning" and "Input/output error" in line["error"]
