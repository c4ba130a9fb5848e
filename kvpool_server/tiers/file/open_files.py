"""Descriptors: as many as a process can spare, whatever number of directories it reads.

Which are open is one list, in the order of their last use; each directory has its share of it. Nothing is opened or
closed under the lock: a file system may hang, and only those who use it shall.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator

MAX_OPEN_FILES = 256
"""Of all directories of a process."""
WANTED_DESCRIPTORS = 65_536

Key = tuple[int, bool]
"""(extent, whether it passes by the page cache)"""


class _Handle:
    """An open file, how many use it, and whether the last of them closes it."""

    __slots__ = ("fd", "is_last_use", "num_users")

    def __init__(self, fd: int):
        self.fd = fd
        self.num_users = 0
        self.is_last_use = False


class OpenFiles:
    """All of them. Thread-safe.

    Args:
        most: open at once, besides those that more users than that need at the same time.
    """

    def __init__(self, most: int = MAX_OPEN_FILES):
        self.most = most
        self.lock = threading.Lock()
        self.handles: OrderedDict[tuple[DirectoryFiles, Key], _Handle] = OrderedDict()  # Used last, last.

    def surplus(self) -> list[tuple[DirectoryFiles, int]]:
        """Takes out what is too much and in nobody's use, for the caller to close. Needs the lock."""
        found: list[tuple[DirectoryFiles, int]] = []
        for (directory, key), handle in list(self.handles.items()):
            if len(self.handles) <= self.most:
                break
            if not handle.num_users:
                del self.handles[directory, key]
                found.append((directory, handle.fd))
        return found


class DirectoryFiles:
    """Those of one directory. Thread-safe.

    Args:
        open_file: returns a descriptor, or raises OSError.
    """

    def __init__(self, files: OpenFiles, open_file: Callable[[int, bool], int], close_file: Callable[[int], None]):
        self._all = files
        self._open_file = open_file
        self.close_file = close_file
        self._is_closed = False

    @contextlib.contextmanager
    def use(self, key: Key) -> Iterator[int]:
        """A descriptor, open meanwhile. Raises FileNotFoundError once closed, and OSError."""
        handle = self._take(key) or self._open(key)
        try:
            yield handle.fd
        finally:
            with self._all.lock:
                handle.num_users -= 1
                is_done = handle.is_last_use and not handle.num_users
            if is_done:
                self.close_file(handle.fd)

    def close(self) -> None:
        """Nothing is opened any more; what is in use is closed by its last user. Idempotent."""
        with self._all.lock:
            self._is_closed = True
            mine = [place for place in self._all.handles if place[0] is self]
            handles = [self._all.handles.pop(place) for place in mine]
            for handle in handles:
                handle.is_last_use = True
            unused = [handle for handle in handles if not handle.num_users]
        for handle in unused:
            self.close_file(handle.fd)

    def _open(self, key: Key) -> _Handle:
        fd = self._open_file(*key)
        surplus: list[tuple[DirectoryFiles, int]] = [(self, fd)]
        try:
            with self._all.lock:
                handle = self._find(key)  # Another thread may have opened it meanwhile.
                if handle is None:
                    handle = self._all.handles[self, key] = _Handle(fd)
                    handle.num_users = 1
                    surplus = self._all.surplus()
            return handle
        finally:
            for directory, surplus_fd in surplus:
                directory.close_file(surplus_fd)

    def _take(self, key: Key) -> _Handle | None:
        with self._all.lock:
            return self._find(key)

    def _find(self, key: Key) -> _Handle | None:
        """The file, for one more user, if it is open. Needs the lock."""
        if self._is_closed:
            raise FileNotFoundError(errno.ENOENT, "this directory is closed")
        handle = self._all.handles.get((self, key))
        if handle is not None:
            self._all.handles.move_to_end((self, key))
            handle.num_users += 1
        return handle


OPEN_FILES = OpenFiles()
"""Of this process: descriptors are the process's, however many tiers it has."""


def raise_descriptor_limit() -> None:
    """Lets this process have as many descriptors as the host allows, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # A sandbox may forbid it: then those that there are must do.
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
