"""The file calls of the file tier: those of the operating system, or 3FS's rings in user space (USRBIO).

Every byte that reaches a disk goes through here.

3FS's FUSE mount moves bytes through the kernel; its rings move them between a buffer that both sides map and the
storage nodes, over RDMA. The package `hf3fs_fuse` comes with 3FS; this module alone imports it, for `io=usrbio`.

Source: 3FS, src/lib/api/UsrbIo.md, and hf3fs_fuse/io.py.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from kvpool.protocol.errors import ConfigError
from kvpool_server.tiers.file.directory import Directory

MAX_VIEWS = 1024
"""IOV_MAX on Linux."""
RING_BUFFER_BYTES = 8 << 20
RING_ENTRIES = 64


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


class UsrbioDisk(Disk):
    """Reads and writes extents through 3FS's rings; other files (the journal) use plain file calls.

    Each thread has a ring and a buffer for each direction: 3FS does not support sharing them.

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
        self._mount = io.extract_mount_point(str(path))
        if not self._mount:
            raise ConfigError(f"io=usrbio: {path} is not on a mount of 3FS; give a path on one, or use io=direct")
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
        for part in _ring_parts(views):
            ring, buffer, memory = self._ring("read")
            got = _move(ring, buffer[: part.nbytes], True, fd, offset + done)
            part[:got] = memory[:got]
            done += got
            if got < part.nbytes:
                break
        return done

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        if fd not in self._registered:
            super().write(fd, views, offset)
            return
        for part in _ring_parts(views):
            ring, buffer, memory = self._ring("write")
            memory[: part.nbytes] = part
            put = _move(ring, buffer[: part.nbytes], False, fd, offset)
            if put < part.nbytes:
                raise OSError(errno.EIO, f"3FS wrote {put} of {part.nbytes} bytes")
            offset += put

    def _ring(self, direction: str) -> tuple[Any, Any, memoryview]:
        """This thread's ring of a direction, and its buffer: as 3FS knows it, and as memory."""
        rings: dict[str, Any] = self._rings.__dict__
        if direction not in rings:
            shared = SharedMemory(create=True, size=RING_BUFFER_BYTES)
            buffer = self._io.make_iovec(shared, self._mount, 0, -1)
            shared.unlink()
            ring = self._io.make_ioring(self._mount, RING_ENTRIES, direction == "read", 0)
            rings[direction] = ring, buffer, shared.buf, shared
        ring, buffer, memory, _ = rings[direction]
        return ring, buffer, memory


def _ring_parts(views: Sequence[memoryview]) -> Iterator[memoryview]:
    """The views, cut into parts that fit into a ring's buffer."""
    for view in views:
        for start in range(0, view.nbytes, RING_BUFFER_BYTES):
            yield view[start : start + RING_BUFFER_BYTES]


def _move(ring: Any, buffer: Any, is_read: bool, fd: int, offset: int) -> int:
    """Submits one request and waits for it; returns the bytes moved. Raises OSError."""
    ring.prepare(buffer, is_read, fd, offset)
    (done,) = ring.submit().wait(min_results=1)
    if done.result < 0:
        raise OSError(-done.result, os.strerror(-done.result))
    return int(done.result)
