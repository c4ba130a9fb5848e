"""Descriptors: bounded over all directories of a server, and never closed under a user."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvpool_server.tiers.open_files import DirectoryFiles, OpenFile, OpenFiles, raise_descriptor_limit


class Directory:
    """A directory of empty files, and the descriptors that were closed."""

    def __init__(self, path: Path, files: OpenFiles):
        path.mkdir(exist_ok=True)
        self.closed: list[int] = []
        self.opened: list[int] = []
        self.files = DirectoryFiles(files, self._open, self._close)
        self.while_opening = lambda: None
        self._path = path

    def _open(self, idx: int, direct: bool) -> int:
        self.opened.append(os.open(self._path / str(idx), os.O_RDWR | os.O_CREAT))
        self.while_opening()
        return self.opened[-1]

    def _close(self, fd: int) -> None:
        self.closed.append(fd)
        os.close(fd)

    def use(self, idx: int) -> None:
        with self.files.use((idx, False)):
            pass


def test_a_closed_directory_opens_nothing_and_leaves_files_in_use_to_their_users(tmp_path: Path) -> None:
    files = OpenFiles()
    directory = Directory(tmp_path, files)
    with directory.files.use((0, False)) as fd:
        directory.files.close()
        os.fstat(fd)
        assert not directory.closed, "closed under a user"
    assert directory.closed == [fd] and not len(files)
    with pytest.raises(FileNotFoundError, match="closed"):
        directory.use(0)


def test_a_file_that_is_being_opened_when_its_directory_is_closed_does_not_stay_open(tmp_path: Path) -> None:
    files = OpenFiles()
    directory = Directory(tmp_path, files)
    directory.while_opening = directory.files.close
    with pytest.raises(FileNotFoundError):
        directory.use(0)
    assert directory.closed == directory.opened and len(directory.opened) == 1 and not len(files)


def test_all_directories_share_one_number_of_descriptors(tmp_path: Path) -> None:
    files = OpenFiles(3)
    directories = [Directory(tmp_path / str(nth), files) for nth in range(4)]
    for directory in directories:
        for idx in range(2):
            directory.use(idx)
            assert len(files) <= 3
    assert sum(len(directory.closed) for directory in directories) == 5
    for directory in directories:
        directory.files.close()
    assert sum(len(directory.closed) for directory in directories) == 8


def test_the_least_recently_used_file_is_closed_first(tmp_path: Path) -> None:
    directory = Directory(tmp_path, OpenFiles(2))
    for idx in (0, 1, 0, 2):
        directory.use(idx)
    assert directory.closed == [directory.opened[1]]
    directory.files.close()


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
