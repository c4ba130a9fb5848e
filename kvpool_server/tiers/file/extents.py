"""The bytes of a file tier: one file for each extent, and slots in it.

Bytes move between the file and the caller's memory without another copy. They bypass the page cache (O_DIRECT) if the
file system can, and address, offset and length are multiples of 4 KiB, as the blocks of real models are.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

from kvpool_server.tiers.file.directory import Directory
from kvpool_server.tiers.file.disk import Disk
from kvpool_server.tiers.open_files import DirectoryFiles, OpenFiles

_NAME = re.compile(r"extent-[0-9]{5,19}")
DIRECT_BYTES = 4096
"""O_DIRECT accepts multiples of this size on any file system."""


class Extents:
    """The extents in one directory. Thread-safe.

    Args:
        open_files: bounds the files that are kept open.
        writable: True for this server's own directory.
        direct: bypass the page cache where possible.
    """

    def __init__(
        self,
        directory: Directory,
        extent_bytes: int,
        disk: Disk,
        open_files: OpenFiles,
        *,
        writable: bool,
        direct: bool,
    ):
        self.extent_bytes = extent_bytes
        self._directory = directory
        self._disk = disk
        self._writable = writable
        self._direct = direct
        self._with_bytes: set[int] = set()
        """This server's own extents that take disk space: `free` opens no others."""
        self._files = DirectoryFiles(open_files, self._open_file, disk.close)

    def tidy(self, num_extents: int, unused: Collection[int]) -> None:
        """Deletes extents beyond the tier's size, and empties unused ones. Called before anything is written.

        Raises OSError if the directory cannot be read, a file is not trusted, or a file cannot be deleted.
        """
        for entry in self._directory.entries():
            if not _NAME.fullmatch(entry.name) or entry.name != _name(idx := int(entry.name.removeprefix("extent-"))):
                continue
            size = self._directory.stat_file(entry.name).st_size
            if idx >= num_extents:
                self._disk.remove(self._directory, entry.name)
                continue
            kept = 0 if idx in unused else min(size, self.extent_bytes)
            if kept < size:
                with self._file(idx, 1, ()) as fd:
                    self._disk.truncate(fd, kept)
            if kept:
                self._with_bytes.add(idx)

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Writes the views one after the other, within one extent. Raises OSError."""
        idx, within = divmod(offset, self.extent_bytes)
        self._with_bytes.add(idx)
        with self._file(idx, within, views) as fd:
            self._disk.write(fd, views, within)

    def read(self, offset: int, views: Sequence[memoryview]) -> bool:
        """Fills the views one after the other, within one extent; False if the file ends before. Raises OSError."""
        idx, within = divmod(offset, self.extent_bytes)
        try:
            with self._file(idx, within, views) as fd:
                return self._disk.read(fd, views, within) == sum(view.nbytes for view in views)
        except FileNotFoundError:
            return False

    def free(self, unused: Sequence[int]) -> None:
        """Frees the disk space of extents. Raises OSError."""
        for idx in self._with_bytes.intersection(unused):
            with self._file(idx, 1, ()) as fd:
                self._disk.truncate(fd, 0)
            self._with_bytes.discard(idx)

    def close(self) -> None:
        """Reads are misses and writes fail from now on; calls under way are not disturbed. Idempotent."""
        self._files.close()

    def _file(self, idx: int, within: int, views: Sequence[memoryview]) -> AbstractContextManager[int]:
        """The descriptor of an extent, which stays open meanwhile."""
        direct = self._direct and not within % DIRECT_BYTES and all(map(_suits_direct, views))
        return self._files.use((idx, direct))

    def _open_file(self, idx: int, direct: bool) -> int:
        flags = os.O_RDWR | os.O_CREAT if self._writable else os.O_RDONLY
        if direct:
            try:
                return self._disk.open(self._directory, _name(idx), flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = False  # This file system cannot (tmpfs, some network file systems).
        return self._disk.open(self._directory, _name(idx), flags)


def _name(idx: int) -> str:
    return f"extent-{idx:05}"


def _suits_direct(view: memoryview) -> bool:
    return not view.nbytes % DIRECT_BYTES and not _address(view) % DIRECT_BYTES


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes and not view.readonly else 1
