"""The memory that holds the arena: an anonymous file (memfd), which other processes map by a descriptor of it.

The file has no path: a process inherits the descriptor, or receives it from the memory socket. The file is sealed:
nobody can shrink or grow it, so no process can end another by SIGBUS. Its last page holds a nonce: a client that reads
the nonce there that came over gRPC shares the memory of that server, and of that boot.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import stat
import threading
import time

import numpy as np
import numpy.typing as npt

from kvpool.protocol.errors import ConfigError, TransferError
from kvpool.protocol.types import NONCE_BYTES, TOKEN_BYTES

NAME = "kvpool-"
"""With the server's process id behind it: /proc/PID/maps shows which server's memory a process maps."""

TRAILER_BYTES = mmap.PAGESIZE
MAP_STEP_BYTES = 4 << 20
"""Small, because the low-priority thread that maps ahead holds the mapping's lock during a step."""
IDLE_NICE = 19
MAP_AHEAD = "kvpool-map-ahead"
MAP_POLL_S = 0.1
MAP_AHEAD_S = 600.0
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_OWNER, _OTHERS = 0, 1
"""Bytes of the file whose locks say that the owner, or another process of its server, lives. The kernel ends a
process's locks once none of its threads can touch the memory any more."""
_MFD_NOEXEC_SEAL = 8
_MADV_REMOVE = 9
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)

Bytes = npt.NDArray[np.uint8]


class Segment:
    """A mapped segment. `bytes` is the arena, uint8 [nbytes], writable; `whole` is the arena with the trailer page.

    Threads may read and write disjoint parts of `bytes` freely; `close` only after they have ended.

    Args:
        fd: descriptor of the file; closed with the segment.
        nbytes: of the arena.

    Attributes:
        fd: as given; -1 once closed.
        token: clients present it at the memory socket; in the process that made the segment alone, else empty.
    """

    def __init__(self, fd: int, nbytes: int):
        self.nbytes = nbytes
        self.token = b""
        self.fd = fd
        pages = mmap.mmap(fd, nbytes + TRAILER_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        whole = np.frombuffer(pages, dtype=np.uint8)
        self.whole: Bytes = whole
        self.bytes: Bytes = whole[:nbytes]
        self._address = whole.ctypes.data
        self.nonce = whole[nbytes : nbytes + NONCE_BYTES].tobytes()

    def __repr__(self) -> str:
        return f"Segment({self.nbytes} bytes, descriptor {self.fd})"

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Makes a segment of `nbytes`, not yet backed by memory (see `populate`). Raises ConfigError if that fails."""
        try:
            fd = sealed_file(f"{NAME}{os.getpid()}", nbytes + TRAILER_BYTES)
            os.pwrite(fd, secrets.token_bytes(NONCE_BYTES), nbytes)
            return cls.adopt(fd, nbytes, secrets.token_bytes(TOKEN_BYTES))
        except OSError as error:
            raise ConfigError(
                f"cannot make {nbytes} bytes of shared memory: {error.strerror}; lower --memory"
            ) from error

    @classmethod
    def adopt(cls, fd: int, nbytes: int, token: bytes) -> Segment:
        """The owner's mapping of a segment that this process, or one before it, has made. Raises OSError.

        `fd` is closed with the segment, or on failure.
        """
        try:
            segment = cls(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        segment.token = token
        _advise(segment._address, nbytes, _MADV_HUGEPAGE)
        return segment

    @classmethod
    def attach(cls, fd: int, nbytes: int, nonce: bytes) -> Segment:
        """Maps memory whose descriptor another process has sent. `fd` is closed with the segment, or on failure.

        Raises TransferError if it is not sealed memory of the size and with the nonce that the server has announced.
        """
        try:
            if why := why_other(fd, nbytes, nonce):
                raise TransferError(f"no shared memory: the server's memory socket sent {why}")
            return cls(fd, nbytes)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise TransferError(f"no shared memory: cannot map what the server sent: {error.strerror}") from error
            raise

    @property
    def is_sealed(self) -> bool:
        """Whether the size is fixed. If the system has no seals, no client may map the memory."""
        return _seals(self.fd) & SEALS == SEALS

    def hold(self) -> None:
        """Has later owners wait until this process, which is not the owner, has ended."""
        fcntl.lockf(self.fd, fcntl.LOCK_SH, 1, _OTHERS)

    def populate(self, start: int, nbytes: int) -> None:
        """Backs a part with memory, so that later writes do not fault. Raises MemoryError if the system has none."""
        if map_pages(self._address + start, nbytes) == 0:
            return
        try:  # Linux before 5.14 has no MADV_POPULATE_WRITE.
            os.posix_fallocate(self.fd, start, nbytes)
        except OSError as fallocate_error:
            raise MemoryError(f"no memory for the arena at {start}: {fallocate_error.strerror}") from fallocate_error

    def discard(self, start: int, nbytes: int) -> None:
        """Gives the memory of a part back, which reads as zeros then, where the system can."""
        _advise(self._address + start, nbytes, _MADV_REMOVE)

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
                if self.fd < 0 or time.monotonic() > deadline:
                    return
                time.sleep(MAP_POLL_S)
            if self.fd < 0 or map_pages(self._address + start, nbytes):
                return

    def _is_backed(self, page_start: int) -> bool:
        state = ctypes.c_ubyte(0)
        address = ctypes.c_void_p(self._address + page_start)
        return _libc.mincore(address, ctypes.c_size_t(mmap.PAGESIZE), ctypes.byref(state)) == 0 and bool(state.value)

    def close(self) -> None:
        """Unmaps, once the last view is gone. The memory is free when no process maps it any more. Idempotent."""
        if self.fd < 0:
            return
        self.whole = self.bytes = np.empty(0, np.uint8)
        os.close(self.fd)
        self.fd = -1


def map_pages(address: int, nbytes: int) -> int:
    """Backs pages with memory and maps them into this process; returns 0, or the system's error number."""
    return _advise(address, nbytes, _MADV_POPULATE_WRITE)


def _advise(address: int, nbytes: int, advice: int) -> int:
    # mmap.madvise holds the GIL; populating gigabytes must not.
    return 0 if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice) == 0 else ctypes.get_errno()


def is_abandoned(fd: int) -> bool:
    """Makes this process the owner of a segment; False if a process of another server may still touch the memory.

    No descriptor of the file may be closed in this process before it ends, or owns the segment no longer.
    """
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _OWNER)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _OTHERS)
    except OSError:
        return False
    fcntl.lockf(fd, fcntl.LOCK_UN, 1, _OTHERS)
    return True


def sealed_file(name: str, nbytes: int) -> int:
    """The descriptor of a new anonymous file of a size that is fixed, if the system has seals. Raises OSError."""
    fd = _anonymous_file(name)
    try:
        os.ftruncate(fd, nbytes)
        with contextlib.suppress(OSError):  # See `is_sealed`.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def _anonymous_file(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError:  # Linux before 6.3 has no MFD_NOEXEC_SEAL, which later systems may demand (vm.memfd_noexec).
        return os.memfd_create(name, flags)


def _seals(fd: int) -> int:
    """The seals of a file; 0 if files of its kind have none."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return 0


def why_other(fd: int, nbytes: int, nonce: bytes) -> str:
    """Why a file is not the segment of this size and nonce; empty if it is. Nothing is mapped before that."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or _seals(fd) & SEALS != SEALS:  # Only memory can be sealed.
        return "no memory whose size is sealed"
    if found.st_size != nbytes + TRAILER_BYTES:
        return f"memory of another size than it announced ({found.st_size - TRAILER_BYTES} for {nbytes} bytes)"
    return "another server's memory" if os.pread(fd, NONCE_BYTES, nbytes) != nonce else ""
