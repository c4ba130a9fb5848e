"""This server's directory below a tier's path: acquired at the start, kept with heartbeats, released last.

The directory belongs to the process that holds its lock; a heartbeat tells hosts that the lock does not reach. The lock
file lies in the directory, which may be renamed or deleted: after locking a file, its owner checks that the path still
leads to that file.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

import structlog

from kvpool.protocol.errors import ConfigError
from kvpool_server.tiers.file.directory import DIRECTORY_MODE, Directory, Owners
from kvpool_server.tiers.health import ANSWER_S
from kvpool_server.tiers.thread_pool import DaemonThreadPool

FILE_NAME = "lock"
RETRY_S = 0.05
MOMENT_S = 0.15
"""How long a directory that is locked, deleted or created at the same time is tried again."""

log = structlog.get_logger()


class DirectoryGoneError(FileNotFoundError):
    """The directory of a held lock was deleted, renamed or replaced."""


class DirectoryLock:
    """Held until closed, or until the process ends.

    An owner creates the file if necessary, and sends a heartbeat at once; an inspection does neither. Raises
    BlockingIOError if another process holds the lock, DirectoryGoneError if the directory was deleted, and OSError.
    """

    def __init__(self, directory: Directory, *, is_owner: bool = True):
        self._path = directory.path / FILE_NAME
        self._fd = directory.open(FILE_NAME, os.O_RDWR | (os.O_CREAT if is_owner else 0))
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
        """Touches the file. Raises DirectoryGoneError if the path leads to another directory or none, and OSError."""
        try:
            os.utime(self._fd)
        except OSError as error:
            raise self._gone() if error.errno == errno.ESTALE else error from None
        self._check_path()

    def close(self) -> None:
        os.close(self._fd)

    def _check_path(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._fd)):
                return
        raise self._gone()

    def _gone(self) -> DirectoryGoneError:
        return DirectoryGoneError(errno.ENOENT, "the directory was removed or replaced", str(self._path.parent))


def heartbeat_age_s(directory: Directory) -> float:
    """Seconds since the owner's last heartbeat. Raises OSError, FileNotFoundError if the directory has no lock."""
    return time.time() - directory.stat(FILE_NAME).st_mtime


class OwnDirectory:
    """Acquires, keeps and releases the directory.

    Args:
        create: whether to create the root if it does not exist; by default that is an error: a mount may be missing.
        handover_s: how long to wait for a server of the same name to release the directory.
        owners: trusted user ids.

    Attributes:
        root, directory: both directories, open once the directory is acquired.
        is_gone: True while another directory, or none, lies at the path.
    """

    root: Directory
    directory: Directory

    def __init__(self, tier_name: str, root: Path, name: str, create: bool, handover_s: float, owners: Owners):
        self.path = root / name
        self.name = name
        self.is_gone = False
        self._tier_name = tier_name
        self._create = create
        self._owners = owners
        self._handover_s = handover_s
        self._lock: DirectoryLock | None = None

    async def acquire(self, threads: DaemonThreadPool) -> None:
        """Locks the directory; waits for a server of the same name to stop, and shortly for inspections and deletions.

        Raises ConfigError if the root does not exist, the directory is another server's, or the file system does not
        answer; UntrustedFileError; and OSError if the directory cannot be created or locked.
        """
        began_at, is_waiting = time.monotonic(), False
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    self.root, self.directory, self._lock = await threads.call(self._acquire)
                return
            except TimeoutError:
                raise ConfigError(
                    f"tier {self._tier_name}: the file system does not answer within {ANSWER_S:.0f} s; check the mount "
                    "and its server"
                ) from None
            except (BlockingIOError, FileNotFoundError, FileExistsError) as error:
                is_locked, waited_s = isinstance(error, BlockingIOError), time.monotonic() - began_at
                if waited_s >= max(self._handover_s if is_locked else 0.0, MOMENT_S):
                    if not is_locked:
                        raise
                    raise ConfigError(
                        f"tier {self._tier_name}: {self.path} belongs to another running server; stop that server, or "
                        "give this one another path or a name= of its own"
                    ) from None
            if waited_s >= MOMENT_S and not is_waiting:
                is_waiting = True
                event, left_s = "a tier waits for another server to release its directory", self._handover_s - waited_s
                log.warning(event, tier=self._tier_name, directory=str(self.path), left_s=round(left_s, 1))
            await asyncio.sleep(RETRY_S)

    def _acquire(self) -> tuple[Directory, Directory, DirectoryLock]:
        root_path = self.path.parent
        if self._create:
            for path in (*reversed(root_path.parents), root_path):
                if not path.exists():
                    path.mkdir(DIRECTORY_MODE, exist_ok=True)
        elif not root_path.exists():
            raise ConfigError(
                f"tier {self._tier_name}: {root_path} does not exist; mount it, or add create=yes to create it"
            )
        with contextlib.ExitStack() as stack:
            stack.callback((root := Directory.open_root(root_path, self._owners)).close)
            stack.callback((directory := root.open_directory(self.name, create=True)).close)
            lock = DirectoryLock(directory)
            stack.pop_all()
        return root, directory, lock

    def send_heartbeat(self) -> None:
        """Sends a heartbeat to other hosts, and sets `is_gone`. Blocking. Raises OSError if the disk fails."""
        assert self._lock is not None
        try:
            self._lock.send_heartbeat()
            self.is_gone = False
        except DirectoryGoneError as error:
            if not self.is_gone:
                log.error("a tier's directory was removed or replaced", tier=self._tier_name, error=str(error))
            self.is_gone = True

    def release(self) -> None:
        """Unlocks the directory. Idempotent."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
            self.directory.close()
            self.root.close()
