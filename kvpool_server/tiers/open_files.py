"""Descriptors that several threads share: the last user of each closes it, and a server keeps a bounded number open.

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

MAX_OPEN_FILES = 256
"""Files that the tiers of a server keep open."""
WANTED_DESCRIPTORS = 65_536

Key = tuple[int, bool]
"""(extent, whether it bypasses the page cache)"""


class SharedDescriptor:
    """A descriptor that stays open while it is used: once closed, its number may name another file. Thread-safe."""

    def __init__(self, fd: int, close_file: Callable[[int], None] = os.close):
        self._fd = fd
        self._close_file = close_file
        self._lock = threading.Lock()
        self._num_users = 1  # The owner, until it calls `close`.
        self._is_closed = False

    @contextlib.contextmanager
    def use(self) -> Iterator[int]:
        """The descriptor. Raises FileNotFoundError once `close` was called."""
        with self._lock:
            if self._is_closed:
                raise _closed()
            self._num_users += 1
        try:
            yield self._fd
        finally:
            self._release()

    def close(self) -> None:
        """Ends new uses; the last user closes the descriptor. Waits for no user. Idempotent."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            self._release()

    def _release(self) -> None:
        with self._lock:
            self._num_users -= 1
            is_unused = not self._num_users
        if is_unused:
            self._close_file(self._fd)


class OpenFiles:
    """The open files of several directories, least recently used first: `most`, and those in use beyond."""

    def __init__(self, most: int = MAX_OPEN_FILES):
        self.most = most
        self.lock = threading.Lock()
        self.files: OrderedDict[tuple[DirectoryFiles, Key], SharedDescriptor] = OrderedDict()

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
        place = self, key
        with contextlib.ExitStack() as stack:
            with self._shared.lock:
                if self._is_closed:
                    raise _closed()
                if (file := self._shared.files.get(place)) is not None:
                    self._shared.files.move_to_end(place)
                    fd = stack.enter_context(file.use())
            if file is None:
                file = SharedDescriptor(self._open_file(*key), self._close_file)
                fd = stack.enter_context(file.use())
                self._keep(place, file)
            yield fd

    def _keep(self, place: tuple[DirectoryFiles, Key], file: SharedDescriptor) -> None:
        """Adds a file, and closes the least recently used ones beyond the bound, or this one in a closed directory."""
        files, surplus = self._shared.files, [file]
        with self._shared.lock:
            if not self._is_closed:
                surplus = [files.pop(place)] if place in files else []  # Another thread has opened the file meanwhile.
                files[place] = file
                surplus += [files.popitem(last=False)[1] for _ in range(len(files) - self._shared.most)]
        for each in surplus:
            each.close()
        if surplus == [file]:
            raise _closed()

    def close(self) -> None:
        """Opens no file any more; the last user of an open file closes it. Idempotent."""
        with self._shared.lock:
            self._is_closed = True
            mine = [place for place in self._shared.files if place[0] is self]
            closing = [self._shared.files.pop(place) for place in mine]
        for file in closing:
            file.close()


def _closed() -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "this directory is closed")


def raise_descriptor_limit() -> None:
    """Raises this process's limit of descriptors to what the host allows, WANTED_DESCRIPTORS at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # A sandbox may forbid it: the present limit stays.
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
