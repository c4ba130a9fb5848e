"""Directories of a file tier: the checks of everything that lies in one, and how a server owns one.

Other users may be able to write where a tier's path leads, or next to it. So each access names a single entry of an
open directory, never a path; no symbolic link is followed; and what has been opened is used only if it is a plain file
or a directory, belongs to a trusted owner, and can be written by nobody else. A file with a second name (a hard link)
is refused, too: it may be any file of that owner.

A directory belongs to the process that holds its lock; a heartbeat tells hosts that the lock does not reach. The lock
file lies in the directory, which may be renamed or deleted: after locking a file, its owner checks that the path still
leads to that file.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import resource
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from kvpool.protocol.errors import ConfigError
from kvpool.protocol.text import printable
from kvpool_server.tiers.calls import ANSWER_S, DaemonThreadPool

log = structlog.get_logger()

LOCK_NAME = "lock"
RETRY_S = 0.05
MOMENT_S = 0.15
"""How long a directory that is locked, deleted or created at the same time is tried again."""
DIRECTORY_MODE, FILE_MODE = 0o700, 0o600
"""Permissions of what a server makes."""
GROUP_READABLE = 0o750
"""Permissions of a directory whose new files its group may read: an operator has made it so."""
WANTED_DESCRIPTORS = 65_536
Owners = frozenset[int] | None
"""The user ids that are trusted; None: all are, for a process that reads and writes no content."""

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
"""O_NONBLOCK: a pipe must not stop the caller until the pipe is found to be no plain file."""
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_PLAIN_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV)


class UntrustedFileError(OSError):
    """A file or directory is not one that this server may use; the message names it, the reason, and the fix."""


class OpenFile:
    """Closes its descriptor with its last reference: once closed, the number may name another file."""

    def __init__(self, fd: int, close_file: Callable[[int], None] = os.close):
        self.fd = fd
        self._close_file = close_file

    def __del__(self) -> None:
        try:
            self._close_file(self.fd)
        except OSError as error:  # NFS reports here that it lost bytes: their checksums will not match.
            log.warning("a tier's file cannot be closed; what was written to it may be lost", error=str(error))


def closed_error() -> FileNotFoundError:
    """The error of a use after `close`."""
    return FileNotFoundError(errno.ENOENT, "this directory is closed")


def raise_descriptor_limit() -> None:
    """Raises this process's limit of descriptors to what the host allows, WANTED_DESCRIPTORS at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # A sandbox may forbid it: the present limit stays.
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Directory:
    """An open directory. Thread-safe: `close` waits for no call, and the last call under way closes the descriptor.

    Every method raises OSError; one that opens something raises UntrustedFileError. `path` is for messages.
    """

    def __init__(self, fd: int, path: Path, owners: Owners):
        self.path = path
        self._owners = owners
        is_for_group = stat.S_IMODE(os.fstat(fd).st_mode) & 0o777 == GROUP_READABLE
        self._file_mode = FILE_MODE | stat.S_IRGRP if is_for_group else FILE_MODE
        self._file: OpenFile | None = OpenFile(fd)

    @classmethod
    def open_root(cls, path: Path, owners: Owners) -> Directory:
        """A tier's path, of which only the last part is checked; it may also belong to root."""
        trusted = None if owners is None else owners | {0}
        return cls._checked(os.open(path, _OPEN_DIRECTORY), path, trusted, owners)

    def open_directory(self, name: str, *, create: bool = False) -> Directory:
        """A directory in this one. Raises FileExistsError if it is deleted while it is created."""
        path = self.path / name
        with self._use(name) as fd:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, DIRECTORY_MODE, dir_fd=fd)
            try:
                opened = os.open(name, _OPEN_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            except NotADirectoryError:
                raise UntrustedFileError(f"{printable(path)} is no directory, or a symbolic link; remove it") from None
        return self._checked(opened, path, self._owners, self._owners)

    @classmethod
    def _checked(cls, fd: int, path: Path, trusted: Owners, owners: Owners) -> Directory:
        try:
            _check(os.fstat(fd), path, trusted)
            return cls(fd, path, owners)
        except BaseException:
            os.close(fd)
            raise

    def open(self, name: str, flags: int) -> int:
        """A descriptor of a plain file. Use O_CREAT without O_TRUNC, which would take effect before the checks."""
        assert not flags & os.O_TRUNC
        path = self.path / name
        with self._use(name) as directory:
            try:
                fd = os.open(name, flags | _OPEN, self._file_mode, dir_fd=directory)
            except OSError as error:
                if error.errno in _NO_PLAIN_FILE:
                    raise UntrustedFileError(f"{printable(path)} is no plain file; remove it") from None
                raise
        try:
            _check_file(os.fstat(fd), path, self._owners)
            os.set_blocking(fd, True)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def stat(self, name: str) -> os.stat_result:
        """Of the entry itself, unchecked."""
        with self._use(name) as fd:
            return os.stat(name, dir_fd=fd, follow_symlinks=False)

    def stat_file(self, name: str) -> os.stat_result:
        """Of a plain file, which passes the checks of `open`."""
        found = self.stat(name)
        _check_file(found, self.path / name, self._owners)
        return found

    def is_at(self, parent: Directory, name: str) -> bool:
        """Whether an entry of the parent is this directory."""
        with self._use() as fd:
            try:
                return os.path.samestat(parent.stat(name), os.fstat(fd))
            except FileNotFoundError:
                return False

    def entries(self) -> Iterator[os.DirEntry[str]]:
        """What lies in the directory, in no order, unchecked."""
        with self._use() as fd:
            listed = os.open(".", _OPEN_DIRECTORY, dir_fd=fd)  # With a position of its own.
        try:
            with os.scandir(listed) as found:
                yield from found
        finally:
            os.close(listed)

    def rename(self, name: str, new_name: str) -> None:
        """Replaces a file of the new name."""
        with self._use(name, new_name) as fd:
            os.rename(name, new_name, src_dir_fd=fd, dst_dir_fd=fd)

    def unlink(self, name: str) -> None:
        """Removes a name; what a symbolic link leads to stays."""
        with self._use(name) as fd:
            os.unlink(name, dir_fd=fd)

    def rmdir(self, name: str) -> None:
        with self._use(name) as fd:
            os.rmdir(name, dir_fd=fd)

    def available_bytes(self) -> int:
        with self._use() as fd:
            disk = os.statvfs(fd)
        return disk.f_bavail * disk.f_frsize

    def close(self) -> None:
        """Calls raise FileNotFoundError from now on. Idempotent."""
        self._file = None

    @contextlib.contextmanager
    def _use(self, *names: str) -> Iterator[int]:
        """The descriptor, for entries of these names."""
        for name in names:
            if name in ("", ".", "..") or "/" in name:
                raise UntrustedFileError(f"{printable(name)!r} is no entry of {printable(self.path)}")
        if (file := self._file) is None:
            raise closed_error()
        try:
            yield file.fd
        finally:
            del file  # A traceback would keep it open.


class DirectoryGoneError(FileNotFoundError):
    """The directory of a held lock was deleted, renamed or replaced."""


class DirectoryLock:
    """Held until closed, or until the process ends.

    An owner creates the file if necessary, and sends a heartbeat at once; an inspection does neither. Raises
    BlockingIOError if another process holds the lock, DirectoryGoneError if the directory was deleted, and OSError.
    """

    def __init__(self, directory: Directory, *, is_owner: bool = True):
        self._path = directory.path / LOCK_NAME
        self._fd = directory.open(LOCK_NAME, os.O_RDWR | (os.O_CREAT if is_owner else 0))
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
    return time.time() - directory.stat(LOCK_NAME).st_mtime


class OwnDirectory:
    """This server's directory below a tier's path: acquired at the start, kept with heartbeats, released last.

    Args:
        create: whether to create a root that does not exist; else that is an error: a mount may be missing.
        handover_s: how long to wait for a server of the same name to release the directory.

    Attributes:
        root, directory: both directories, open once the directory is acquired.
        is_gone: True while another directory, or none, lies at the path.
    """

    root: Directory
    directory: Directory

    def __init__(self, tier_name: str, root: Path, name: str, create: bool, handover_s: float, owners: Owners):
        self.path = root / name
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
            stack.callback((directory := root.open_directory(self.path.name, create=True)).close)
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


def _check_file(found: os.stat_result, path: Path, owners: Owners) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UntrustedFileError(f"{printable(path)} is no plain file; remove it")
    if found.st_nlink > 1:
        raise UntrustedFileError(f"{printable(path)} has {found.st_nlink} names (hard links); remove it, or the others")
    _check(found, path, owners)


def _check(found: os.stat_result, path: Path, owners: Owners) -> None:
    if owners is not None and found.st_uid not in owners:
        raise UntrustedFileError(
            f"{printable(path)} belongs to uid {found.st_uid}, which this tier does not trust (it trusts "
            f"{', '.join(map(str, sorted(owners)))}); change its owner, or add owners={found.st_uid}"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedFileError(
            f"{printable(path)} can be written by others (mode {stat.S_IMODE(found.st_mode):04o}); chmod go-w it, or "
            "give a directory of this server's own"
        )
