"""The operating system's file calls, as the file tier uses them: every byte that reaches a disk goes through here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

MAX_VIEWS = 1024
"""IOV_MAX on Linux."""


class Disk:
    """Plain files. Thread-safe; every method raises OSError. Simulations replace this class."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Fills the views, one after the other; returns the bytes read: fewer only at the end of the file."""
        done = 0
        for group in _at_most(views, MAX_VIEWS):
            wanted = sum(view.nbytes for view in group)
            got = os.preadv(fd, group, offset + done)
            done += got
            if got < wanted:
                return done + (self._read_rest(fd, group, got, offset + done) if got else 0)
        return done

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        """Writes the views completely, one after the other."""
        for group in _at_most(views, MAX_VIEWS):
            rest = list(group)
            while rest:
                put = os.pwritev(fd, rest, offset)
                offset += put
                rest = _after(rest, put)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def _read_rest(self, fd: int, views: Sequence[memoryview], skip: int, offset: int) -> int:
        done = 0
        rest = _after(list(views), skip)
        while rest and (got := os.preadv(fd, rest, offset + done)):
            done += got
            rest = _after(rest, got)
        return done


def _at_most(views: Sequence[memoryview], count: int) -> list[Sequence[memoryview]]:
    return [views[start : start + count] for start in range(0, len(views), count)]


def _after(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """The views without their first `nbytes`."""
    while views and nbytes >= views[0].nbytes:
        nbytes -= views[0].nbytes
        views = views[1:]
    return [views[0][nbytes:], *views[1:]] if nbytes else views
