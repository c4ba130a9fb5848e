"""File tiers with the options that tests want, on threads that are few and without the page cache's bypass."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvpool_server.cache.eviction import Policy
from kvpool_server.cache.eviction.policy import PrefixLRU
from kvpool_server.cache.steps import Run, at_once
from kvpool_server.tiers.file.directory import Directory
from kvpool_server.tiers.file.extents import Disk
from kvpool_server.tiers.file.tier import FileOptions, FileTier
from kvpool_server.tiers.tier import OpenFiles, TierContext
from tests.contracts.tier_contract import SLOT

SIZE = 8 << 20


class BadDisk(Disk):
    """Cannot read some slots of any extent; nothing can be written while `is_full`."""

    def __init__(self) -> None:
        self.is_full = False
        self.bad_slots: set[int] = set()
        self.errno = 5
        self.opened_with: list[int] = []

    def read(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        nbytes = sum(view.nbytes for view in views)
        if any(offset <= slot * SLOT < offset + nbytes for slot in self.bad_slots):
            raise OSError(self.errno, os.strerror(self.errno))
        return super().read(fd, views, offset)

    def open(self, directory: Directory, name: str, flags: int) -> int:
        self.opened_with.append(flags)
        return super().open(directory, name, flags)

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        super().write(fd, views, offset)


def file_tier(
    root: Path,
    name: str = "one",
    size: int = SIZE,
    policy: Callable[[], Policy] = PrefixLRU,
    *,
    disk: Disk | None = None,
    open_files: OpenFiles | None = None,
    kind: type[FileTier] = FileTier,
    run: Run = at_once,
    **options: Any,
) -> FileTier:
    """A tier that is not open yet; `options` are those of `--tier`."""
    given = {"threads": 2, "io": "buffered", **options}
    files = OpenFiles() if open_files is None else open_files
    context = TierContext(("127.0.0.1", 0), policy, open_files=files, run=run)
    return kind(FileOptions(path=root, size=size, name=name, **given), context, disk or Disk())
