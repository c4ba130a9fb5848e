"""The operating system's file calls, as the file tier uses them: every byte that reaches a disk goes through here."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvpool_server.tiers.file.directory import Directory

MAX_VIEWS = 1024
"""IOV_MAX on Linux."""


class Disk:
    """Plain files. Thread-safe; every method raises OSError. Simulations replace this class."""

    def open(self, directory: Directory, name: str, flags: int) -> int:
        return directory.open(name, flags)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Fills the views, one after the other; returns the bytes read: fewer only at the end of the file."""
        rest, done = views, 0
        while rest and (got := os.preadv(fd, rest[:MAX_VIEWS], offset + done)):
            done += got
            rest = _after(rest, got)
        return done

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        """Writes the views completely, one after the other."""
        rest = views
        while rest:
            put = os.pwritev(fd, rest[:MAX_VIEWS], offset)
            offset += put
            rest = _after(rest, put)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def replace(self, directory: Directory, source: str, target: str) -> None:
        directory.rename(source, target)

    def remove(self, directory: Directory, name: str) -> None:
        directory.unlink(name)


def _after(views: Sequence[memoryview], nbytes: int) -> Sequence[memoryview]:
    """The views without their first `nbytes`."""
    for nth, view in enumerate(views):
        if nbytes < view.nbytes:
            return [view[nbytes:], *views[nth + 1 :]]
        nbytes -= view.nbytes
    return []
