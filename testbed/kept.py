"""Servers below a keeper."""

from __future__ import annotations

import contextlib
from pathlib import Path


def server_below(keeper: int) -> int:
    """The process id of the server that a keeper has started; 0 while there is none."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split():
            if b"kvpool_server\0--listen" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return 0
