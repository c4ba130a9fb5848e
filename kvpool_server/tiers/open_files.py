"""Files that several threads use: each is closed with its last user, and a server keeps a bounded number open.

All tiers of a server share one `OpenFiles`. Files are opened and closed outside of its lock: a file system that hangs
stops only its own users.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator

import structlog

log = structlog.get_logger()

MAX_OPEN_FILES = 256
"""Files that the tiers of a server keep open."""
WANTED_DESCRIPTORS = 65_536

Key = tuple[int, bool]
"""(extent, whether it bypasses the page cache)"""


class OpenFile:
    """Closes its descriptor with its last reference: once closed, the number may name another file."""

    def __init__(self, fd: int, close_file: Callable[[int], None] = os.close):
        self.fd = fd
        self._close_file = close_file

    def __del__(self) -> None:
        try:
            self._close_file(self.fd)
        except OSError as error:  # NFS reports here that it lost bytes: their checksums will not match.
            log.warning("a tier's file cannot be closed; blocks written to it may be lost", error=str(error))


class OpenFiles:
    """The open files of several directories, least recently used first: `most`, and those in use beyond."""

    def __init__(self, most: int = MAX_OPEN_FILES):
        self.most = most
        self.lock = threading.Lock()
        self.files: OrderedDict[tuple[DirectoryFiles, Key], OpenFile] = OrderedDict()

    def __len__(self) -> int:
        return len(self.files)


class DirectoryFiles:
    """The open files of one directory. Thread-safe. `open_file` returns a descriptor, or raises OSError."""

    def __init__(self, files: OpenFiles, open_file: Callable[[int, bool], int], close_file: Callable[[int], None]):
        self._shared = files
        self._open_file = open_file
        self._close_file = close_file
        self._is_closed = False

    @contextlib.contextmanager
    def use(self, key: Key) -> Iterator[int]:
        """A descriptor that stays open meanwhile. Raises OSError, and FileNotFoundError once `close` was called."""
        files, place = self._shared.files, (self, key)
        surplus: list[OpenFile | None] = []
        file = None
        try:
            with self._shared.lock:
                self._check_open()
                if (file := files.get(place)) is not None:
                    files.move_to_end(place)
            if file is None:
                file = OpenFile(self._open_file(*key), self._close_file)
                with self._shared.lock:
                    self._check_open()
                    surplus.append(files.pop(place, None))  # Another thread may have opened the file meanwhile.
                    files[place] = file
                    surplus += [files.popitem(last=False)[1] for _ in range(len(files) - self._shared.most)]
                surplus.clear()
            yield file.fd
        finally:
            del file  # A traceback would keep it open.

    def close(self) -> None:
        """Opens no file any more; the last user of an open file closes it. Idempotent."""
        with self._shared.lock:
            self._is_closed = True
            mine = [place for place in self._shared.files if place[0] is self]
            closing = [self._shared.files.pop(place) for place in mine]
        closing.clear()

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed_error()


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
