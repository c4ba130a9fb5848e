"""Directories of file tiers by their paths, which any user may own."""

from __future__ import annotations

from pathlib import Path

from kvpool_server.tiers.file import own_directory
from kvpool_server.tiers.file.directory import Directory
from kvpool_server.tiers.file.own_directory import DirectoryLock


def open_directory(path: Path) -> Directory:
    return Directory.open_root(path, None)


def acquire(path: Path) -> DirectoryLock:
    """Locks a directory as its server does."""
    _, lock = own_directory.acquire(open_directory(path.parent), path.name)
    return lock


def inspect(path: Path) -> DirectoryLock:
    """Locks a directory as `kvpool tier gc` does."""
    return DirectoryLock(open_directory(path), is_owner=False)
