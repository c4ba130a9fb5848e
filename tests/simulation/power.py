"""A disk that can lose power: what was written may be there, in part, or not at all, and in any order."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from kvpool_server.tiers.file.directory import Directory
from kvpool_server.tiers.file.extents import Disk

SECTOR_BYTES = 512


@dataclass
class _File:
    """What a file holds for certain, and the changes that may or may not have reached the disk."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes] | int] = field(default_factory=list)
    """(offset, bytes) of a write, or the length after a truncation."""


class PowerDisk(Disk):
    """Writes to the real file system, and remembers what a power cut could leave of it.

    Attributes:
        ops_left: changes that it makes before the machine dies; None: it does not.
    """

    def __init__(self) -> None:
        self.ops_left: int | None = None
        self._lock = threading.Lock()
        self._files: dict[int, _File] = {}
        self._names: dict[Path, int] = {}
        """Durable names."""
        self._renames: list[tuple[Path, int | None]] = []
        """Names since, and None for one that was removed."""
        self._of_fd: dict[int, int] = {}

    def open(self, directory: Directory, name: str, flags: int) -> int:
        path = directory.path / name
        is_new = not path.exists()
        fd = super().open(directory, name, flags)
        with self._lock:
            inode = os.fstat(fd).st_ino
            self._of_fd[fd] = inode
            if is_new:
                self._files[inode] = _File()
                self._renames.append((path, inode))
            self._files.setdefault(inode, _File(bytearray(path.read_bytes())))
            if not is_new and path not in self._names and all(name != path for name, _ in self._renames):
                self._names[path] = inode
        return fd

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        for view in views:
            with self._lock:
                self._live_or_die()
                self._files[self._of_fd[fd]].pending.append((offset, bytes(view)))
            super().write(fd, [view], offset)
            offset += view.nbytes

    def truncate(self, fd: int, nbytes: int) -> None:
        with self._lock:
            self._live_or_die()
            self._files[self._of_fd[fd]].pending.append(nbytes)
        super().truncate(fd, nbytes)

    def replace(self, directory: Directory, source: str, target: str) -> None:
        with self._lock:
            self._live_or_die()
            self._renames.append((directory.path / target, directory.stat(source).st_ino))
        super().replace(directory, source, target)

    def remove(self, directory: Directory, name: str) -> None:
        with self._lock:
            self._live_or_die()
            self._renames.append((directory.path / name, None))
        super().remove(directory, name)

    def _live_or_die(self) -> None:
        if self.ops_left is not None:
            self.ops_left -= 1
            if self.ops_left < 0:
                raise OSError(5, "the machine is dead")

    def sync(self) -> None:
        """Everything so far reaches the disk."""
        with self._lock:
            for file in self._files.values():
                for change in file.pending:
                    _apply(file.durable, change)
                file.pending.clear()
            _apply_names(self._names, self._renames)
            self._renames.clear()

    def cut(self, directory: Path, random: Random) -> None:
        """Leaves in `directory` what a power cut may leave; whoever has files open there must have closed them.

        Each sector of each write since the last `sync` is there or not; names are as they were after some rename.
        """
        with self._lock:
            names = dict(self._names)
            _apply_names(names, self._renames[: random.randint(0, len(self._renames))])
            share = random.choice([0.0, 0.2, 0.5, 0.9, 1.0])
            left = {}
            for path, inode in names.items():
                file = self._files[inode]
                content = bytearray(file.durable)
                for change in file.pending:
                    for part in _sectors(change):
                        if random.random() < share:
                            _apply(content, part)
                left[path] = bytes(content)
        shutil.rmtree(directory)
        directory.mkdir()
        for path, content in left.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)


def _apply_names(names: dict[Path, int], changes: Sequence[tuple[Path, int | None]]) -> None:
    for path, inode in changes:
        if inode is None:
            names.pop(path, None)
        else:
            names[path] = inode


def _sectors(change: tuple[int, bytes] | int) -> list[tuple[int, bytes] | int]:
    if isinstance(change, int):
        return [change]
    offset, data = change
    cuts = [0, *range(SECTOR_BYTES - offset % SECTOR_BYTES, len(data), SECTOR_BYTES), len(data)]
    return [(offset + start, data[start:stop]) for start, stop in itertools.pairwise(cuts)]


def _apply(content: bytearray, change: tuple[int, bytes] | int) -> None:
    if isinstance(change, int):
        del content[change:]
        content.extend(bytes(change - len(content)))
        return
    offset, data = change
    if len(content) < offset + len(data):
        content.extend(bytes(offset + len(data) - len(content)))
    content[offset : offset + len(data)] = data
