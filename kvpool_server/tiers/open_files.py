"""Open files: as many as a process can spare, whatever number of directories its tiers read.

All tiers of a server share one `OpenFiles`, which lists its files in the order of their last use and bounds their
number; each directory has a `DirectoryFiles`. Files are opened and closed outside of the lock: a file system that hangs
stops only its own users.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MAX_OPEN_FILES = 256
"""Files that the tiers of a server keep open."""
WANTED_DESCRIPTORS = 65_536

Key = tuple[int, bool]
"""(extent, whether it bypasses the page cache)"""


@dataclass(eq=False, slots=True)
class _Handle:
    """An open file. With `close_after_use`, the last of its users closes it."""

    fd: int
    num_users: int = 0
    close_after_use: bool = False


class OpenFiles:
    """The open files of several directories: `most` at once, or more while more are in use. Thread-safe."""

    def __init__(self, most: int = MAX_OPEN_FILES):
        self.most = most
        self.lock = threading.RLock()
        self.handles: OrderedDict[tuple[DirectoryFiles, Key], _Handle] = OrderedDict()  # Least recently used first.

    def __len__(self) -> int:
        return len(self.handles)

    def pop_surplus(self) -> list[tuple[DirectoryFiles, int]]:
        """Removes unused files beyond the bound; the caller closes them. Needs the lock."""
        found: list[tuple[DirectoryFiles, int]] = []
        for (directory, key), handle in list(self.handles.items()):
            if len(self.handles) <= self.most:
                break
            if not handle.num_users:
                del self.handles[directory, key]
                found.append((directory, handle.fd))
        return found


class DirectoryFiles:
    """The open files of one directory. `open_file` returns a descriptor, or raises OSError. Thread-safe."""

    def __init__(self, files: OpenFiles, open_file: Callable[[int, bool], int], close_file: Callable[[int], None]):
        self._all = files
        self._open_file = open_file
        self.close_file = close_file
        self._is_closed = False

    @contextlib.contextmanager
    def use(self, key: Key) -> Iterator[int]:
        """A descriptor that stays open meanwhile. Raises FileNotFoundError once closed, and OSError."""
        handle = self._acquire(key) or self._open(key)
        try:
            yield handle.fd
        finally:
            with self._all.lock:
                handle.num_users -= 1
                is_last_use = handle.close_after_use and not handle.num_users
            if is_last_use:
                self.close_file(handle.fd)

    def close(self) -> None:
        """Opens no file any more; the last user of an open file closes it. Idempotent."""
        with self._all.lock:
            self._is_closed = True
            mine = [place for place in self._all.handles if place[0] is self]
            handles = [self._all.handles.pop(place) for place in mine]
            for handle in handles:
                handle.close_after_use = True
            unused = [handle for handle in handles if not handle.num_users]
        for handle in unused:
            self.close_file(handle.fd)

    def _open(self, key: Key) -> _Handle:
        fd = self._open_file(*key)
        surplus: list[tuple[DirectoryFiles, int]] = [(self, fd)]
        try:
            with self._all.lock:
                handle = self._acquire(key)  # Another thread may have opened the file meanwhile.
                if handle is None:
                    handle = self._all.handles[self, key] = _Handle(fd, num_users=1)
                    surplus = self._all.pop_surplus()
            return handle
        finally:
            for directory, surplus_fd in surplus:
                directory.close_file(surplus_fd)

    def _acquire(self, key: Key) -> _Handle | None:
        """The file, with one more user, if it is open."""
        with self._all.lock:
            if self._is_closed:
                raise FileNotFoundError(errno.ENOENT, "this directory is closed")
            handle = self._all.handles.get((self, key))
            if handle is not None:
                self._all.handles.move_to_end((self, key))
                handle.num_users += 1
            return handle


def raise_descriptor_limit() -> None:
    """Raises this process's limit of descriptors to what the host allows, WANTED_DESCRIPTORS at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # A sandbox may forbid it: the present limit stays.
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
