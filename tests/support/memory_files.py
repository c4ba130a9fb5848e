"""The anonymous files (memfd) that hold arenas, and this process's descriptors, as /proc shows them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvpool.transport.segment import NAME


def arena_file(pid: int) -> Path:
    """A path at which the arena of a server can be opened while the server lives."""
    name = f"/memfd:{NAME}{pid} (deleted)"
    return next(fd for fd in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(fd) == name)


def descriptors() -> set[tuple[str, str]]:
    """Number and file of each descriptor of this process; gRPC closes those of other tests late."""
    return {(fd.name, os.readlink(fd)) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}


def mapped_bytes(inode: int) -> int:
    """Bytes of an arena that this process has in its page tables, over all mappings; 0 if nothing is mapped."""
    nbytes, is_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_file = int(line.split()[4]) == inode and "/memfd:" in line
        elif is_file and line.startswith("Rss:"):
            nbytes += int(line.split()[1]) << 10
    return nbytes
