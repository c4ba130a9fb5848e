"""Directories of file tiers by their paths, which any user may own."""

from __future__ import annotations

import functools
from pathlib import Path

from kvpool_server.tiers.file.directory import Directory, DirectoryLock
from kvpool_server.tiers.file.extents import Disk, Extents
from kvpool_server.tiers.file.journal import Inventory
from kvpool_server.tiers.file.peer_directories import PeerDirectories
from kvpool_server.tiers.tier import OpenFiles


def open_directory(path: Path) -> Directory:
    return Directory.open_root(path, None)


def acquire(path: Path) -> DirectoryLock:
    """Locks a directory as its server does."""
    return DirectoryLock(open_directory(path.parent).open_directory(path.name, create=True))


def inspect(path: Path) -> DirectoryLock:
    """Locks a directory as `kvpool tier gc` does."""
    return DirectoryLock(open_directory(path), is_owner=False)


def peers_in(path: Path, max_memory_bytes: int = 1 << 30) -> PeerDirectories:
    """All directories below a tier's path but "own"."""
    make_extents = functools.partial(Extents, disk=Disk(), open_files=OpenFiles(), direct=False)
    return PeerDirectories(open_directory(path), "own", make_extents, max_memory_bytes, Inventory)
