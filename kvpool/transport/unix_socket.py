"""Unix sockets: endpoints `unix:PATH`, where gRPC listens, and the socket on which a server hands out the descriptor of
its memory, with the client's side of it.

The server names no place. For an endpoint `unix:PATH` the memory socket's path is PATH with a suffix. For an endpoint
HOST:PORT the memory socket has a name in Linux' abstract namespace: a hash of the token, which comes over gRPC. So a
hostile server, or an intruder who changes its replies, cannot make a client open a path of their choice.
docs/reference/protocol.md describes the conversation.
"""

from __future__ import annotations

import array
import hashlib
import os
import socket
import struct
from urllib.parse import quote

from kvpool.protocol.errors import TransferError
from kvpool.protocol.types import TOKEN_BYTES

SCHEME = "unix:"
MEMORY_SUFFIX = ".memory"
MAX_PATH_BYTES = 107 - len(MEMORY_SUFFIX)
"""A socket's address has 108 bytes for the path, and the last of them is zero (unix(7))."""

MAGIC = b"kvpoolm1"
NAME_BYTES = 16
REQUEST_BYTES = len(MAGIC) + TOKEN_BYTES
_ABSTRACT_PREFIX = b"\0kvpool-"
_MAX_DESCRIPTORS = 8
"""Received at most, to be closed if there is more than one; the kernel closes any further ones."""

Address = str | bytes
"""A path, or a name in the abstract namespace, which begins with a zero byte."""


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


def abstract_name(token: bytes) -> bytes:
    """The name of the memory socket for clients that reach gRPC by TCP. It does not give the token away."""
    return _ABSTRACT_PREFIX + hashlib.blake2b(token, digest_size=NAME_BYTES).hexdigest().encode()


def memory_address(endpoint: str, token: bytes) -> Address:
    """Where the server at an endpoint hands out its memory."""
    path = socket_path(endpoint)
    return memory_path(path) if path else abstract_name(token)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other side, as they were when it connected or began to listen."""
    pid, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def receive_memory(address: Address, token: bytes, timeout_s: float) -> int:
    """Requests the descriptor of the memory that a token stands for. The caller closes the descriptor.

    Each step, to connect, to send and to receive, waits for `timeout_s` at most. Raises TransferError if there is no
    such socket here, or the other side sends anything else.
    """
    where = f"the server's memory socket {address!r}" if isinstance(address, str) else "the server's memory socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
        # Not settimeout: a non-blocking connect fails at once if the backlog is full.
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        try:
            connection.connect(address)
            _, uid = peer_of(connection)
            if isinstance(address, bytes) and os.geteuid() != 0 and uid not in (os.geteuid(), 0):
                raise TransferError(
                    f"no shared memory: kvpool-server runs as user {uid}, and this process as user {os.geteuid()}; "
                    "give the server --unix-listen and --unix-mode, and clients endpoint=unix:PATH"
                )
            connection.send(MAGIC + token)
            reply, descriptors = _receive(connection)
        except (BrokenPipeError, ConnectionResetError):  # Disconnected before it read the request.
            reply, descriptors = b"", []
        except BlockingIOError:
            raise TransferError(f"no shared memory: {where} did not answer within {timeout_s:g} s") from None
        except OSError as error:
            raise TransferError(f"no shared memory: {where} cannot be reached from here: {error.strerror}") from None
    if reply == MAGIC and len(descriptors) == 1:
        return descriptors[0]
    for descriptor in descriptors:
        os.close(descriptor)
    if not reply:
        raise TransferError(f"no shared memory: {where} refused this client; the server's log says why")
    raise TransferError(f"no shared memory: {where} sent {len(descriptors)} descriptors or an unknown answer")


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One message and the descriptors that came with it."""
    descriptors = array.array("i")
    room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * descriptors.itemsize)
    # Unlike socket.recv_fds, with MSG_CMSG_CLOEXEC: another thread may start a process at any time.
    reply, ancillary, _, _ = connection.recvmsg(len(MAGIC) + 1, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) // descriptors.itemsize * descriptors.itemsize])
    return reply, list(descriptors)
