"""Whose a directory is: a lock that ends with its process, and a time stamp for those whom locks do not reach.

The lock lies in the directory, and directories are renamed and removed: who has locked a file looks whether it is still
the one that the path leads to.
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
    """The lock that is held is no longer that of the directory: somebody has removed or replaced it."""


class DirectoryLock:
    """Held until closed, or until the process ends.

    Args:
        is_owner: makes the file, and gives a sign of life at once; who wants to remove a directory does neither.

    Raises:
        BlockingIOError: another process holds it.
        DirectoryGoneError: the directory was removed meanwhile.
        OSError: there is no such directory, or it is not writable.
    """

    def __init__(self, directory: Path, *, is_owner: bool = True):
        self._path = directory / FILE_NAME
        self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if is_owner else 0), 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_owner:
                self.give_sign_of_life()
            else:
                self._look()
        except OSError:
            os.close(self._fd)
            raise

    def give_sign_of_life(self) -> None:
        """Touches the file: on a file system whose locks end at the host, this is how others know.

        Raises:
            DirectoryGoneError: the directory is not this one any more.
            OSError: the file system cannot do it.
        """
        try:
            os.utime(self._fd)
        except OSError as error:
            raise self._gone() if error.errno == errno.ESTALE else error from None
        self._look()

    def close(self) -> None:
        os.close(self._fd)

    def _look(self) -> None:
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(self._fd)):
                return
        except FileNotFoundError:
            pass
        raise self._gone()

    def _gone(self) -> DirectoryGoneError:
        return DirectoryGoneError(errno.ENOENT, "the directory was removed or replaced", str(self._path.parent))


def take(directory: Path) -> DirectoryLock:
    """Makes a directory if need be, but none above it, and locks it. Raises as `DirectoryLock`.

    Tries again: who removes it holds the lock for a moment, and the directory has gone then.
    """
    for _ in range(TRIES - 1):
        try:
            return _make_and_lock(directory)
        except (BlockingIOError, FileNotFoundError, FileExistsError):
            time.sleep(WAIT_S)
    return _make_and_lock(directory)


def _make_and_lock(directory: Path) -> DirectoryLock:
    directory.mkdir(exist_ok=True)  # FileExistsError, also if it goes just while this looks what it is.
    return DirectoryLock(directory)
