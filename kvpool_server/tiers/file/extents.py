"""The bytes of a file tier: one file for each extent, slots in it, and reads and writes of many blocks at once.

Bytes move between the file and the caller's memory without another copy, but for USRBIO's. They bypass the page cache
(O_DIRECT) if the file system can, and address, offset and length are multiples of 4 KiB, as the blocks of real models
are. Every byte that reaches a disk goes through `Disk`: by the file calls of the operating system, or, on a mount of
3FS with `io=usrbio`, by 3FS's rings in user space (USRBIO). 3FS's FUSE mount moves bytes through the kernel; its rings
move them between a buffer that both sides map and the storage nodes, over RDMA.

Source of USRBIO: 3FS, src/lib/api/UsrbIo.md, and hf3fs_fuse/io.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import re
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvpool.protocol.errors import ConfigError
from kvpool.transport.sealed_socket import without
from kvpool_server.tiers.calls import DaemonThreadPool
from kvpool_server.tiers.file.directory import Directory, OpenFile, closed_error
from kvpool_server.tiers.tier import OpenFiles, is_sound

T = TypeVar("T")

MAX_VIEWS = 1024
"""IOV_MAX on Linux."""
RING_BUFFER_BYTES = 8 << 20
RING_ENTRIES = 64
DIRECT_BYTES = 4096
"""O_DIRECT accepts multiples of this size on any file system."""
MIN_SPAN_BYTES = 1 << 20
"""A shorter span of adjacent blocks is not worth a call of its own."""
_NAME = re.compile(r"extent-[0-9]{5,19}")


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
            rest = without(rest, got)
        return done

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        """Writes the views completely, one after the other."""
        rest = views
        while rest:
            put = os.pwritev(fd, rest[:MAX_VIEWS], offset)
            offset += put
            rest = without(rest, put)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def replace(self, directory: Directory, source: str, target: str) -> None:
        directory.rename(source, target)

    def remove(self, directory: Directory, name: str) -> None:
        directory.unlink(name)


class UsrbioDisk(Disk):
    """Reads and writes extents through 3FS's rings; other files (the journal) use plain file calls.

    Each thread has a ring and a buffer for each direction: 3FS does not support sharing them. Raises ConfigError if
    hf3fs_fuse is not installed, or the path is not on a mount of 3FS.
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
            got = self._move(part, True, fd, offset + done)
            done += got
            if got < part.nbytes:
                break
        return done

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        if fd not in self._registered:
            super().write(fd, views, offset)
            return
        for part in _ring_parts(views):
            put = self._move(part, False, fd, offset)
            if put < part.nbytes:
                raise OSError(errno.EIO, f"3FS wrote {put} of {part.nbytes} bytes")
            offset += put

    def _move(self, part: memoryview, is_read: bool, fd: int, offset: int) -> int:
        """Has this thread's ring of a direction move a part; returns the bytes moved. Raises OSError."""
        rings: dict[str, Any] = self._rings.__dict__
        direction = "read" if is_read else "write"
        if direction not in rings:
            shared = SharedMemory(create=True, size=RING_BUFFER_BYTES)
            buffer = self._io.make_iovec(shared, self._mount, 0, -1)
            shared.unlink()
            rings[direction] = self._io.make_ioring(self._mount, RING_ENTRIES, is_read, 0), buffer, shared
        ring, buffer, shared = rings[direction]
        memory = shared.buf[: part.nbytes]
        if not is_read:
            memory[:] = part
        ring.prepare(buffer[: part.nbytes], is_read, fd, offset)
        (done,) = ring.submit().wait(min_results=1)
        if done.result < 0:
            raise OSError(-done.result, os.strerror(-done.result))
        if is_read:
            part[: done.result] = memory[: done.result]
        return int(done.result)


def _ring_parts(views: Sequence[memoryview]) -> Iterator[memoryview]:
    """The views, cut into parts that fit into a ring's buffer."""
    for view in views:
        for start in range(0, view.nbytes, RING_BUFFER_BYTES):
            yield view[start : start + RING_BUFFER_BYTES]


class Extents:
    """The extents in one directory. Thread-safe.

    Args:
        writable: True for this server's own directory. In a peer's directory, an error of a read is a miss.
        direct: bypass the page cache where possible.
    """

    def __init__(
        self, directory: Directory, extent_bytes: int, writable: bool, disk: Disk, open_files: OpenFiles, direct: bool
    ):
        self.extent_bytes = extent_bytes
        self._directory = directory
        self._disk = disk
        self._writable = writable
        self._direct = direct
        self._with_bytes: set[int] = set()
        """This server's own extents that take disk space: `free` opens no others."""
        self._open_files = open_files
        self._is_closed = False

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
        except (OSError, OverflowError) as error:  # As a failing disk, or an offset that no file can have.
            if self._writable and not isinstance(error, FileNotFoundError):
                raise
            return False

    def free(self, unused: Sequence[int]) -> None:
        """Frees the disk space of extents. Raises OSError."""
        for idx in self._with_bytes.intersection(unused):
            with self._file(idx, 1, ()) as fd:
                self._disk.truncate(fd, 0)
            self._with_bytes.discard(idx)

    def close(self) -> None:
        """Reads are misses and writes fail from now on; calls under way are not disturbed. Idempotent."""
        files = self._open_files.files
        with self._open_files.lock:
            self._is_closed = True
            closing = [files.pop(place) for place in list(files) if place[0] is self]
        closing.clear()

    @contextlib.contextmanager
    def _file(self, idx: int, within: int, views: Sequence[memoryview]) -> Iterator[int]:
        """The descriptor of an extent, which stays open meanwhile. Raises FileNotFoundError once `close` was called."""
        direct = self._direct and not within % DIRECT_BYTES and all(map(_suits_direct, views))
        shared, files, place = self._open_files, self._open_files.files, (self, (idx, direct))
        surplus: list[OpenFile | None] = []
        file = None
        try:
            with shared.lock:
                self._check_open()
                if (file := files.get(place)) is not None:
                    files.move_to_end(place)
            if file is None:
                file = OpenFile(self._open(idx, direct), self._disk.close)
                with shared.lock:
                    self._check_open()
                    surplus.append(files.pop(place, None))  # Another thread may have opened the file meanwhile.
                    files[place] = file
                    surplus += [files.popitem(last=False)[1] for _ in range(len(files) - shared.most)]
                surplus.clear()
            yield file.fd
        finally:
            del file  # A traceback would keep it open.

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed_error()

    def _open(self, idx: int, direct: bool) -> int:
        flags = os.O_RDWR | os.O_CREAT if self._writable else os.O_RDONLY
        if direct:
            try:
                return self._disk.open(self._directory, _name(idx), flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = False  # This file system cannot (tmpfs, some network file systems).
        return self._disk.open(self._directory, _name(idx), flags)


MakeExtents = Callable[[Directory, int, bool], Extents]
"""(directory, extent_bytes, writable) -> its extents."""


def _name(idx: int) -> str:
    return f"extent-{idx:05}"


def _suits_direct(view: memoryview) -> bool:
    if not view.nbytes or view.readonly or view.nbytes % DIRECT_BYTES:
        return False
    return not ctypes.addressof(ctypes.c_char.from_buffer(view)) % DIRECT_BYTES


class BlockSpot(NamedTuple):
    """A block's place in a tier, and in memory: uint8 [slot_bytes]; `is_authentic` verifies its tag, if it has one."""

    offset: int
    view: memoryview
    checksums: Sequence[int]
    is_authentic: Callable[[memoryview], bool] | None = None

    def is_sound(self) -> bool:
        """Whether the bytes in memory match the checksums, and the tag if there is one."""
        is_authentic = self.is_authentic is None or self.is_authentic(self.view)
        return is_authentic and is_sound(self.view, self.checksums)


async def write_all(threads: DaemonThreadPool, extents: Extents, spots: Sequence[BlockSpot]) -> None:
    """Returns, or raises OSError, when no call is under way any more."""
    await _all(
        threads.call(extents.write, span[0].offset, [spot.view for spot in span])
        for span in _spans(spots, extents.extent_bytes, threads.num_threads)
    )


async def read_all(threads: DaemonThreadPool, source: Extents, spots: Sequence[BlockSpot]) -> list[bool]:
    """For each block whether it was read and is sound; a block on a bad sector of the disk is not.

    Raises OSError if none of several blocks could be read, or the file system fails other than by a bad sector (EIO).
    No call is under way any more then.
    """
    spans = _spans(spots, source.extent_bytes, threads.num_threads)
    parts = await _all(threads.call(_read_span, source, span) for span in spans)
    results = [result for part in parts for result in part]
    errors = [result for result in results if isinstance(result, OSError)]
    if len(errors) == len(results) > 1:
        raise errors[0]
    return [result is True for result in results]


def _read_span(source: Extents, span: Sequence[BlockSpot]) -> list[bool | OSError]:
    """For each block whether it was read and is sound, or the error of its bad sector. Raises any other OSError."""
    failed: bool | OSError = False
    try:
        if source.read(span[0].offset, [spot.view for spot in span]):
            return [spot.is_sound() for spot in span]
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        failed = error
    if len(span) == 1:
        return [failed]
    # The file ends in one of the blocks, or one lies on a bad sector: read each by itself.
    return [result for spot in span for result in _read_span(source, [spot])]


def _spans(spots: Sequence[BlockSpot], extent_bytes: int, num_parts: int) -> list[list[BlockSpot]]:
    """Adjacent blocks, in their order, cut at the ends of extents and into about `num_parts` parts."""
    most = max(MIN_SPAN_BYTES, sum(spot.view.nbytes for spot in spots) // num_parts)
    spans: list[list[BlockSpot]] = []
    end = nbytes = 0
    for spot in spots:
        if spot.offset != end or spot.offset % extent_bytes == 0 or nbytes >= most:
            spans.append([])
            nbytes = 0
        spans[-1].append(spot)
        nbytes += spot.view.nbytes
        end = spot.offset + spot.view.nbytes
    return spans


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """The results of all calls. Raises the error of one of them, once all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]
