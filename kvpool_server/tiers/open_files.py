"""Files that several threads use: each is closed with its last user, and a server keeps a bounded number open."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable

import structlog

log = structlog.get_logger()

MAX_OPEN_FILES = 256
"""Files that the tiers of a server keep open."""
WANTED_DESCRIPTORS = 65_536


class OpenFile:
    """Closes its descriptor with its last reference: once closed, the number may name another file."""

    def __init__(self, fd: int, close_file: Callable[[int], None] = os.close):
        self.fd = fd
        self._close_file = close_file

    def __del__(self) -> None:
        try:
            self._close_file(self.fd)
        except OSError as error:  # NFS reports here that it lost bytes: their checksums will not match.
            log.warning("a tier's file cannot be closed; blocks written to it may be lost", error=str(error))


class OpenFiles:
    """The open files of all tiers of a server, least recently used first: `most`, and those in use beyond.

    Files are opened and closed outside of the lock: a file system that hangs stops only its own users.

    Attributes:
        files: by owner and the owner's key; only with `lock` held.
    """

    def __init__(self, most: int = MAX_OPEN_FILES):
        self.most = most
        self.lock = threading.Lock()
        self.files: OrderedDict[tuple[object, object], OpenFile] = OrderedDict()


def closed_error() -> FileNotFoundError:
    """The error of a use after `close`."""
    return FileNotFoundError(errno.ENOENT, "this directory is closed")


def raise_descriptor_limit() -> None:
    """Raises this process's limit of descriptors to what the host allows, WANTED_DESCRIPTORS at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # A sandbox may forbid it: the present limit stays.
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
