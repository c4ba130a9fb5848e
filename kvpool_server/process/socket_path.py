"""Paths of the server's Unix sockets: who holds one now, and binding it."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress

from kvpool.protocol.errors import ConfigError
from kvpool.transport.memory_socket import Address


def bind_path(path: str, mode: int, bind: Callable[[], object]) -> None:
    """Binds a Unix socket to a path, with permissions; the socket of a dead server is replaced.

    Raises OSError, and ConfigError if a server listens there, or something else is there.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"{path} exists and is not a socket; give --unix-listen another path, or remove it")
        if _is_live(path):
            raise ConfigError(f"another server listens on {path}; stop that server, or give --unix-listen another path")
        os.unlink(path)
    before = os.umask(0o777 & ~mode)  # A chmod after the bind would follow a link that has taken the socket's place.
    try:
        bind()
    finally:
        os.umask(before)


def _is_live(path: str) -> bool:
    """Whether a process listens on a socket's path, of any type. Raises OSError if this process may not connect."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK) as probe:
            try:
                probe.connect(path)
            except BlockingIOError:
                return True  # Its backlog is full.
            except ConnectionRefusedError:
                return False
            except OSError as error:
                if error.errno != errno.EPROTOTYPE:
                    raise
            else:
                return True
    return True


def cannot_bind(address: Address, error: OSError) -> ConfigError:
    """The error of a start whose Unix socket cannot be bound."""
    if isinstance(address, bytes):
        return ConfigError(f"cannot listen on an abstract Unix socket, for shared memory: {error.strerror}")
    hint = "make its directory first" if error.errno == errno.ENOENT else "give a path in a directory of this user's"
    return ConfigError(f"cannot listen on {address}, see --unix-listen: {error.strerror}; {hint}")
