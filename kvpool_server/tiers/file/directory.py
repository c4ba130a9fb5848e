"""A directory of a file tier, by its descriptor, and the checks of everything that lies in it.

Other users may be able to write where a tier's path leads, or next to it. So each access names a single entry of an
open directory, never a path; no symbolic link is followed; and what has been opened is used only if it is a plain file
or a directory, belongs to a trusted owner, and can be written by nobody else. A file with a second name (a hard link)
is refused, too: it may be any file of that owner.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from kvpool.protocol.text import printable
from kvpool_server.tiers.open_files import OpenFile, closed_error

DIRECTORY_MODE, FILE_MODE = 0o700, 0o600
"""Permissions of what a server makes."""
GROUP_READABLE = 0o750
"""Permissions of a directory whose new files its group may read: an operator has made it so."""

Owners = frozenset[int] | None
"""The user ids that are trusted; None: all are, for a process that reads and writes no content."""

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
"""O_NONBLOCK: a pipe must not stop the caller until the pipe is found to be no plain file."""
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_PLAIN_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV)


class UntrustedFileError(OSError):
    """A file or directory is not one that this server may use; the message names it, the reason, and the fix."""


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
                raise UntrustedFileError(f"{_text(path)} is no directory, or a symbolic link; remove it") from None
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
                    raise UntrustedFileError(f"{_text(path)} is no plain file; remove it") from None
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
        """Removes an empty directory."""
        with self._use(name) as fd:
            os.rmdir(name, dir_fd=fd)

    def available_bytes(self) -> int:
        """Free space of the file system."""
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
                raise UntrustedFileError(f"{printable(name)!r} is no entry of {_text(self.path)}")
        if (file := self._file) is None:
            raise closed_error()
        try:
            yield file.fd
        finally:
            del file  # A traceback would keep it open.


def _check_file(found: os.stat_result, path: Path, owners: Owners) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UntrustedFileError(f"{_text(path)} is no plain file; remove it")
    if found.st_nlink > 1:
        raise UntrustedFileError(f"{_text(path)} has {found.st_nlink} names (hard links); remove it, or the others")
    _check(found, path, owners)


def _check(found: os.stat_result, path: Path, owners: Owners) -> None:
    if owners is not None and found.st_uid not in owners:
        raise UntrustedFileError(
            f"{_text(path)} belongs to uid {found.st_uid}, which this tier does not trust (it trusts "
            f"{', '.join(map(str, sorted(owners)))}); change its owner, or add owners={found.st_uid}"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedFileError(
            f"{_text(path)} can be written by others (mode {stat.S_IMODE(found.st_mode):04o}); chmod go-w it, or give "
            "a directory of this server's own"
        )


def _text(path: Path) -> str:
    """For messages: other users may have chosen the name."""
    return printable(str(path))
