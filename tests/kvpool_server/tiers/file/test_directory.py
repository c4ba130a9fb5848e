"""Who owns a directory, also while it is renamed, deleted and made again; and descriptors."""

from __future__ import annotations

import fcntl
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvpool_server.tiers.calls import DaemonThreadPool
from kvpool_server.tiers.file.directory import DirectoryLock, OpenFile, OwnDirectory, raise_descriptor_limit
from tests.contracts.tier_contract import awaited
from tests.support.tier_directories import acquire, open_directory


@awaited
async def _own(path: Path) -> OwnDirectory:
    """The directory, acquired as a server does."""
    own, threads = OwnDirectory("file:", path.parent, path.name, False, 0.0, None), DaemonThreadPool(1, "test")
    await own.acquire(threads)
    threads.close(1.0)
    return own


def test_a_directory_that_is_deleted_while_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "one"
    acquire(directory).close()
    really = fcntl.flock

    def renamed_meanwhile(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", really)
        directory.rename(tmp_path / ".removed-one-1")
        really(fd, operation)

    monkeypatch.setattr(fcntl, "flock", renamed_meanwhile)
    own = _own(directory)
    own.send_heartbeat()
    assert not own.is_gone, "the lock is not that of the directory at the path"
    with pytest.raises(BlockingIOError):
        DirectoryLock(open_directory(directory))
    own.release()


def test_a_directory_that_is_deleted_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.mkdir

    def gone_meanwhile(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(os, "mkdir", really)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(os, "mkdir", gone_meanwhile)
    _own(tmp_path / "one").release()
    assert (tmp_path / "one" / "lock").exists()


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
