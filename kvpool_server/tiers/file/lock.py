"""Whose a directory is: a lock that ends with its process, and a time stamp for those whom locks do not reach."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

FILE_NAME = "lock"


class DirectoryLock:
    """Held until closed, or until the process ends.

    Raises:
        BlockingIOError: another process holds it.
        OSError: there is no such directory, or it is not writable.
    """

    def __init__(self, directory: Path):
        self._fd = os.open(directory / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise

    def give_sign_of_life(self) -> None:
        """Touches the file. On a file system whose locks end at the host, this is how others know. Raises OSError."""
        os.utime(self._fd)

    def close(self) -> None:
        os.close(self._fd)
