"""The shared-memory object that holds the arena, and how another process proves that it sees the same one.

The file is in a RAM-backed directory (/dev/shm). Its last page holds a nonce: a client that reads the same nonce there
as the server sent over gRPC shares the server's memory, whatever container or host name either of them has.

The creator keeps an exclusive flock on the file. A file without a lock belongs to a dead server; the next server
removes it (`sweep`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import secrets
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvpool.errors import ConfigError, TransferError
from kvpool.types import SegmentInfo

PREFIX = "kvpool-"
TRAILER_BYTES = mmap.PAGESIZE
NONCE_BYTES = 16
MAP_STEP_BYTES = 4 << 20
"""Small, because the low-priority thread that maps ahead holds the mapping's lock during a step."""
IDLE_NICE = 19
MAP_AHEAD = "kvpool-map-ahead"
MAP_POLL_S = 0.1
MAP_AHEAD_S = 600.0
MEMORY_FILE_SYSTEM = "tmpfs"
"""Neither ramfs, which does not report its free space, nor hugetlbfs, which does not support write(2)."""
_ESCAPED = re.compile(r"\\([0-7]{3})")
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)

Bytes = npt.NDArray[np.uint8]


class Segment:
    """A mapped segment. `bytes` is the arena, uint8 [nbytes], writable; `whole` is the arena with the trailer page.

    Threads may read and write disjoint parts of `bytes` freely; `close` only after they have ended.
    """

    def __init__(self, fd: int, path: str, nbytes: int, owner: bool):
        self.path = path
        self.nbytes = nbytes
        self._fd = fd
        self._owner = owner
        self._map = mmap.mmap(fd, nbytes + TRAILER_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        self.whole: Bytes = whole
        self.bytes: Bytes = whole[:nbytes]
        self._address = whole.ctypes.data
        self.nonce = whole[nbytes : nbytes + NONCE_BYTES].tobytes()

    def __repr__(self) -> str:
        return f"Segment({self.path}, {self.nbytes} bytes, {'owner' if self._owner else 'attached'})"

    @classmethod
    def create(cls, directory: str, nbytes: int) -> Segment:
        """Makes a segment of `nbytes`, not yet backed by memory (see `populate`).

        Raises ConfigError if the directory cannot hold the segment.
        """
        path = os.path.join(directory, f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}")
        unlocked = os.path.join(directory, f".{os.path.basename(path)}")  # A name that `sweep` skips.
        try:
            _require_memory(directory)
            space = os.statvfs(directory)
            available = space.f_bavail * space.f_frsize
            if nbytes + TRAILER_BYTES > available:
                raise ConfigError(
                    f"{directory} has {available} bytes free, and the arena needs {nbytes}; "
                    "lower --memory, or give the directory more (docker: --shm-size)"
                )
            fd = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot make shared memory in {directory!r}: {error}; see --shm-dir") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, nbytes + TRAILER_BYTES)
            os.pwrite(fd, secrets.token_bytes(NONCE_BYTES), nbytes)
            segment = cls(fd, path, nbytes, owner=True)
            os.rename(unlocked, path)
        except OSError as error:
            os.close(fd)
            Path(unlocked).unlink(missing_ok=True)
            raise ConfigError(f"cannot make {nbytes} bytes of shared memory in {directory!r}: {error}") from error
        segment._advise(0, nbytes, _MADV_HUGEPAGE)
        return segment

    @classmethod
    def attach(cls, info: SegmentInfo) -> Segment:
        """Maps another process's segment.

        Raises TransferError if the segment is not on this host, or belongs to another server.
        """
        try:
            fd = os.open(info.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransferError(f"no shared memory at {info.path}: {error.strerror}") from error
        try:
            if os.fstat(fd).st_size != info.nbytes + TRAILER_BYTES:
                raise TransferError(f"the shared memory at {info.path} has another size than the server's")
            segment = cls(fd, info.path, info.nbytes, owner=False)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, (OSError, ValueError)):
                raise TransferError(f"cannot map the shared memory at {info.path}: {error}") from error
            raise
        if segment.nonce != info.nonce:
            segment.close()
            raise TransferError(f"the shared memory at {info.path} is another server's")
        return segment

    def info(self) -> SegmentInfo:
        return SegmentInfo(self.path, self.nbytes, self.nonce, self.nbytes)

    def populate(self, start: int, nbytes: int) -> None:
        """Backs a part with memory, so that later writes neither fault nor fail in a full file system.

        Raises MemoryError if the system has no free memory.
        """
        error = self._advise(start, nbytes, _MADV_POPULATE_WRITE)
        if error == 0:
            return
        try:  # Linux before 5.14 has no MADV_POPULATE_WRITE.
            os.posix_fallocate(self._fd, start, nbytes)
        except OSError as fallocate_error:
            raise MemoryError(f"no memory for the arena at {start}: {fallocate_error.strerror}") from fallocate_error

    def map_ahead(self) -> None:
        """Maps pages that the owner has backed with memory, in the background: a first touch costs ten copies.

        Never touches a page before its owner: the container that touches a page first is charged for its memory.
        """
        threading.Thread(target=self._map_ahead, args=(self.bytes,), name=MAP_AHEAD, daemon=True).start()

    def _map_ahead(self, view: Bytes) -> None:
        # `view` keeps the mapping alive until this thread notices that the segment is closed.
        with contextlib.suppress(OSError):
            # At normal priority, 64 engines that start together would occupy the cores for seconds.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), IDLE_NICE)
        deadline = time.monotonic() + MAP_AHEAD_S
        for start in range(0, len(view), MAP_STEP_BYTES):
            nbytes = min(MAP_STEP_BYTES, len(view) - start)
            while not self._is_backed(start + nbytes - TRAILER_BYTES):
                if self._fd < 0 or time.monotonic() > deadline:
                    return
                time.sleep(MAP_POLL_S)
            if self._fd < 0 or self._advise(start, nbytes, _MADV_POPULATE_WRITE):
                return

    def _is_backed(self, page_start: int) -> bool:
        state = ctypes.c_ubyte(0)
        address = ctypes.c_void_p(self._address + page_start)
        return _libc.mincore(address, ctypes.c_size_t(mmap.PAGESIZE), ctypes.byref(state)) == 0 and bool(state.value)

    def _advise(self, start: int, nbytes: int, advice: int) -> int:
        # mmap.madvise holds the GIL; populating gigabytes must not.
        address = ctypes.c_void_p(self._address + start)
        return 0 if _libc.madvise(address, ctypes.c_size_t(nbytes), advice) == 0 else ctypes.get_errno()

    def close(self) -> None:
        """Unmaps (once the last view is gone) and, for the owner, removes the file. Idempotent."""
        if self._fd < 0:
            return
        self.whole = self.bytes = np.empty(0, np.uint8)
        try:
            self._map.close()
        except BufferError:
            pass  # A view still exists; the mapping ends with it.
        if self._owner:
            Path(self.path).unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1


def _require_memory(directory: str) -> None:
    """Raises ConfigError if a directory is not on a tmpfs, OSError if it cannot be read."""
    real = os.path.realpath(directory, strict=True)
    kind, mount_point = mount_of(real, Path("/proc/self/mountinfo").read_text())
    if kind != MEMORY_FILE_SYSTEM:
        raise ConfigError(
            f"{directory} is on a file system of type {kind} (mounted at {mount_point}), and the arena has to be in "
            "memory; give a directory on a tmpfs, such as /dev/shm (Kubernetes: an emptyDir with medium: Memory); "
            "see --shm-dir"
        )


def mount_of(path: str, mountinfo: str) -> tuple[str, str]:
    """Type and mount point of the file system of an absolute path without links.

    Args:
        mountinfo: as in /proc/self/mountinfo, see proc(5).
    """
    found = ("unknown", "")
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        mount_point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), mount.split()[4])
        is_below = path == mount_point or path.startswith(mount_point.rstrip("/") + "/")
        if is_below and len(mount_point) >= len(found[1]):  # A later mount on the same point hides the earlier.
            found = (source.split()[0], mount_point)
    return found


def could_hold(directory: str, nbytes: int) -> bool:
    """Whether a segment would fit into the directory if it were empty."""
    try:
        _require_memory(directory)
        space = os.statvfs(directory)
    except (ConfigError, OSError):
        return False
    return nbytes + TRAILER_BYTES <= space.f_blocks * space.f_frsize


def sweep(directory: str) -> list[str]:
    """Removes the segments of dead servers; returns their paths."""
    removed = []
    for path in Path(directory).glob(f"{PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # Of another user, or gone.
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(str(path))
        except BlockingIOError:
            pass  # Its server lives.
        finally:
            os.close(fd)
    return removed
