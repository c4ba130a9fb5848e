"""Ownership of a directory: a lock that ends with its process, and a heartbeat for hosts that the lock does not reach.

The lock file lies in the directory, which may be renamed or deleted: after locking a file, its owner checks that the
path still leads to that file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

FILE_NAME = "lock"
TRIES = 4
WAIT_S = 0.05


class DirectoryGoneError(FileNotFoundError):
    """The directory of a held lock was deleted, renamed or replaced."""


class DirectoryLock:
    """Held until closed, or until the process ends.

    Args:
        is_owner: creates the file if necessary, and sends a heartbeat at once; a process that only inspects or deletes
            a directory does neither.

    Raises:
        BlockingIOError: another process holds the lock.
        DirectoryGoneError: the directory was deleted meanwhile.
        OSError: the directory does not exist, or is not writable.
    """

    def __init__(self, directory: Path, *, is_owner: bool = True):
        self._path = directory / FILE_NAME
        self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if is_owner else 0), 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_owner:
                self.send_heartbeat()
            else:
                self._check_path()
        except OSError:
            os.close(self._fd)
            raise

    def send_heartbeat(self) -> None:
        """Touches the file: on a file system whose locks end at the host, other hosts see the time stamp only.

        Raises:
            DirectoryGoneError: the path does not lead to this directory any more.
            OSError: the file system fails.
        """
        try:
            os.utime(self._fd)
        except OSError as error:
            raise self._gone() if error.errno == errno.ESTALE else error from None
        self._check_path()

    def close(self) -> None:
        os.close(self._fd)

    def _check_path(self) -> None:
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(self._fd)):
                return
        except FileNotFoundError:
            pass
        raise self._gone()

    def _gone(self) -> DirectoryGoneError:
        return DirectoryGoneError(errno.ENOENT, "the directory was removed or replaced", str(self._path.parent))


def acquire(directory: Path) -> DirectoryLock:
    """Locks a directory, and creates it if necessary, but none above it. Raises as `DirectoryLock`.

    Retries for a moment: a process that inspects the directory holds the lock shortly, and one that deletes the
    directory leaves none.
    """
    for _ in range(TRIES - 1):
        try:
            return _create_and_lock(directory)
        except (BlockingIOError, FileNotFoundError, FileExistsError):
            time.sleep(WAIT_S)
    return _create_and_lock(directory)


def heartbeat_age_s(directory: Path) -> float:
    """Seconds since the owner's last heartbeat. Raises OSError, FileNotFoundError if the directory has no lock."""
    return time.time() - (directory / FILE_NAME).stat().st_mtime


def _create_and_lock(directory: Path) -> DirectoryLock:
    directory.mkdir(exist_ok=True)  # FileExistsError, also if the directory is deleted at this moment.
    return DirectoryLock(directory)
