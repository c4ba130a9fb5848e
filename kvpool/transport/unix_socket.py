"""Endpoints that are Unix sockets: `unix:PATH`, where gRPC listens; the memory socket has a name derived from PATH."""

from __future__ import annotations

import os
from urllib.parse import quote

SCHEME = "unix:"
MEMORY_SUFFIX = ".memory"
MAX_PATH_BYTES = 107 - len(MEMORY_SUFFIX)
"""A socket's address has 108 bytes for the path, and the last of them is zero (unix(7))."""


def socket_path(endpoint: str) -> str:
    """The path of a Unix-socket endpoint; empty for other endpoints."""
    return endpoint[len(SCHEME) :] if endpoint.startswith(SCHEME) else ""


def check_path(path: str) -> str:
    """Returns `path`, absolute or relative; raises ValueError if no socket can be there."""
    nbytes = len(os.fsencode(path))
    if nbytes > MAX_PATH_BYTES:
        raise ValueError(
            f"{path!r} has {nbytes} bytes, and a Unix socket's path {MAX_PATH_BYTES} at most; give a shorter path, or "
            "one relative to the working directory"
        )
    if not path or path.endswith("/") or "\0" in path:
        raise ValueError(f"{path!r} is not the path of a Unix socket; give one such as /run/kvpool/kvpool.sock")
    return path


def memory_path(path: str) -> str:
    """Where the server of a Unix socket hands out its memory: beside the socket, so that one mount shares both."""
    return path + MEMORY_SUFFIX


def grpc_target(endpoint: str) -> str:
    """An endpoint as gRPC expects it: gRPC reads the path of a Unix socket as a part of a URI."""
    path = socket_path(endpoint)
    return SCHEME + quote(path) if path else endpoint
