"""The bytes of a file tier: one file for each extent, and slots in it.

Bytes are written and read where the caller has them, without a copy of their own. Where address, offset and length suit
(multiples of 4 KiB, as the blocks of real models are) and the file system can, they pass by the page cache.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from kvpool_server.tiers.file.disk import Disk
from kvpool_server.tiers.file.open_files import DirectoryFiles, OpenFiles

DIRECT_BYTES = 4096
"""What O_DIRECT wants everything to be a multiple of, on any file system."""


class Extents:
    """The extents in one directory. Thread-safe.

    Args:
        files: where descriptors are counted.
        writable: whether they are this server's own.
        direct: whether to pass by the page cache where that is possible.
    """

    def __init__(
        self, directory: Path, extent_bytes: int, disk: Disk, files: OpenFiles, *, writable: bool, direct: bool
    ):
        self.extent_bytes = extent_bytes
        self._directory = directory
        self._disk = disk
        self._writable = writable
        self._direct = direct
        self._with_bytes: set[int] = set()
        """Of this server's own: those that take room. Others are not opened to be freed."""
        self._files = DirectoryFiles(files, self._open_file, disk.close)

    def tidy(self, num_extents: int, unused: Collection[int]) -> None:
        """Before anything is written: lets go of what an earlier, larger tier has left, and of what nothing lies in.

        Raises:
            OSError: the directory cannot be read, or something not removed.
        """
        for path in list(self._directory.glob("extent-*")):
            digits = path.name.removeprefix("extent-")
            if not digits.isdecimal() or path.name != _name(idx := int(digits)):
                continue
            if idx >= num_extents:
                self._disk.remove(path)
                continue
            size = path.stat().st_size
            kept = 0 if idx in unused else min(size, self.extent_bytes)
            if kept < size:
                with self._file(idx, 1, ()) as fd:
                    self._disk.truncate(fd, kept)
            if kept:
                self._with_bytes.add(idx)

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Writes the views side by side; all within one extent. Raises OSError."""
        idx, within = divmod(offset, self.extent_bytes)
        self._with_bytes.add(idx)
        with self._file(idx, within, views) as fd:
            self._disk.write(fd, views, within)

    def read(self, offset: int, views: Sequence[memoryview]) -> bool:
        """Fills the views from side by side, within one extent; False if the file ends before. Raises OSError."""
        idx, within = divmod(offset, self.extent_bytes)
        try:
            with self._file(idx, within, views) as fd:
                return self._disk.read(fd, views, within) == sum(view.nbytes for view in views)
        except FileNotFoundError:
            return False

    def free(self, idx: int) -> None:
        """Gives an extent's space back to the file system. Raises OSError."""
        if idx in self._with_bytes:
            with self._file(idx, 1, ()) as fd:
                self._disk.truncate(fd, 0)
            self._with_bytes.discard(idx)

    def close(self) -> None:
        """From now on reads are misses and writes fail; what is under way ends as it would have. Idempotent."""
        self._files.close()

    def _file(self, idx: int, within: int, views: Sequence[memoryview]) -> AbstractContextManager[int]:
        """An extent's file, which stays open meanwhile."""
        direct = self._direct and not within % DIRECT_BYTES and all(map(_suits_direct, views))
        return self._files.use((idx, direct))

    def _open_file(self, idx: int, direct: bool) -> int:
        flags = os.O_RDWR | os.O_CREAT if self._writable else os.O_RDONLY
        path = self._directory / _name(idx)
        if direct:
            try:
                return self._disk.open(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = False  # Not on this file system (tmpfs, some network file systems).
        return self._disk.open(path, flags)


def _name(idx: int) -> str:
    return f"extent-{idx:05}"


def _suits_direct(view: memoryview) -> bool:
    return not view.nbytes % DIRECT_BYTES and not _address(view) % DIRECT_BYTES


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes and not view.readonly else 1
