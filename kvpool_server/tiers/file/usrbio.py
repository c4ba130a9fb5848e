"""Reads and writes through 3FS's rings in user space (USRBIO), for mounts of 3FS.

3FS's FUSE mount moves bytes through the kernel; its rings move them between a buffer that both sides map and the
storage nodes, over RDMA. The package `hf3fs_fuse` comes with 3FS; this module alone imports it, for `io=usrbio`.

Each thread has a ring and a buffer for each direction: 3FS does not support sharing them.

Source: 3FS, src/lib/api/UsrbIo.md, and hf3fs_fuse/io.py.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError
from kvpool_server.tiers.file.directory import Directory
from kvpool_server.tiers.file.disk import Disk

BUFFER_BYTES = 8 << 20
ENTRIES = 64


class UsrbioDisk(Disk):
    """See the module. Files that are no extents (the journal) use plain file calls.

    Raises ConfigError if hf3fs_fuse is not installed, or the path is not on a mount of 3FS.
    """

    def __init__(self, path: Path):
        try:
            from hf3fs_fuse import io
        except ImportError as error:
            raise ConfigError(
                f"io=usrbio needs the package hf3fs_fuse, which comes with 3FS ({error}); install it, or use io=direct"
            ) from None
        self._io: Any = io
        mount = io.extract_mount_point(str(path))
        if not mount:
            raise ConfigError(f"io=usrbio: {path} is not on a mount of 3FS; give a path on one, or use io=direct")
        self._mount = mount
        self._rings = threading.local()
        self._registered: set[int] = set()

    def open(self, directory: Directory, name: str, flags: int) -> int:
        fd = super().open(directory, name, flags & ~os.O_DIRECT)
        if name.startswith("extent-"):
            self._io.register_fd(fd)
            self._registered.add(fd)
        return fd

    def close(self, fd: int) -> None:
        if fd in self._registered:
            self._registered.discard(fd)
            self._io.deregister_fd(fd)
        super().close(fd)

    def read(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        if fd not in self._registered:
            return super().read(fd, views, offset)
        done = 0
        for view in views:
            for start in range(0, view.nbytes, BUFFER_BYTES):
                part = view[start : start + BUFFER_BYTES]
                ring, buffer, memory = self._ring(for_read=True)
                got = self._move(ring, buffer[: part.nbytes], True, fd, offset + done)
                part[:got] = memory[:got]
                done += got
                if got < part.nbytes:
                    return done
        return done

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        if fd not in self._registered:
            super().write(fd, views, offset)
            return
        for view in views:
            for start in range(0, view.nbytes, BUFFER_BYTES):
                part = view[start : start + BUFFER_BYTES]
                ring, buffer, memory = self._ring(for_read=False)
                memory[: part.nbytes] = part
                put = self._move(ring, buffer[: part.nbytes], False, fd, offset)
                if put < part.nbytes:
                    raise OSError(errno.EIO, f"3FS wrote {put} of {part.nbytes} bytes")
                offset += put

    def _ring(self, *, for_read: bool) -> tuple[Any, Any, memoryview]:
        """This thread's ring of a direction, and its buffer: as 3FS knows it, and as memory."""
        name = "read" if for_read else "write"
        ring = getattr(self._rings, name, None)
        if ring is None:
            shared = SharedMemory(create=True, size=BUFFER_BYTES)
            buffer = self._io.make_iovec(shared, self._mount, 0, -1)
            shared.unlink()
            assert shared.buf is not None
            ring = (self._io.make_ioring(self._mount, ENTRIES, for_read, 0), buffer, shared.buf, shared)
            setattr(self._rings, name, ring)
        in_use: tuple[Any, Any, memoryview] = ring[:3]
        return in_use

    @staticmethod
    def _move(ring: Any, buffer: Any, is_read: bool, fd: int, offset: int) -> int:
        """Submits one request and waits for it; returns the bytes moved. Raises OSError."""
        ring.prepare(buffer, is_read, fd, offset)
        (done,) = ring.submit().wait(min_results=1)
        if done.result < 0:
            raise OSError(-done.result, os.strerror(-done.result))
        return int(done.result)
