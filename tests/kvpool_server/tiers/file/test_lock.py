"""Who owns a directory, also while it is renamed, deleted and made again."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest

from kvpool_server.tiers.file.own_directory import DirectoryGoneError, DirectoryLock, OwnDirectory, heartbeat_age_s
from kvpool_server.tiers.thread_pool import DaemonThreadPool
from tests.contracts.tier_contract import awaited
from tests.support.tier_directories import acquire, inspect, open_directory

LONG_S = 4_000.0


def _age(directory: Path) -> None:
    then = time.time() - LONG_S
    os.utime(directory / "lock", (then, then))


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


def test_an_owner_sends_a_heartbeat_at_once_and_an_inspection_sends_none(tmp_path: Path) -> None:
    acquire(tmp_path / "one").close()
    _age(tmp_path / "one")
    inspect(tmp_path / "one").close()
    assert heartbeat_age_s(open_directory(tmp_path / "one")) > LONG_S - 1
    DirectoryLock(open_directory(tmp_path / "one")).close()
    assert heartbeat_age_s(open_directory(tmp_path / "one")) < LONG_S / 2


def test_an_inspection_makes_no_lock_file(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError):
        inspect(tmp_path / "empty")
    assert not list((tmp_path / "empty").iterdir())


def test_the_lock_of_a_directory_that_has_gone_says_so(tmp_path: Path) -> None:
    lock = acquire(tmp_path / "one")
    lock.send_heartbeat()
    (tmp_path / "one").rename(tmp_path / "two")
    with pytest.raises(DirectoryGoneError):
        lock.send_heartbeat()
    acquire(tmp_path / "one").close()
    with pytest.raises(DirectoryGoneError):
        lock.send_heartbeat()
    lock.close()
