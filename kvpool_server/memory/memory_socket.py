"""Hands out the descriptor of the arena's memory to clients on this host that present its token.

Clients that reach gRPC by TCP connect to a name in the abstract namespace. Any process in this network namespace can do
so, so a client's user must be the server's, or root. Clients that reach gRPC by a Unix socket connect to a path beside
it, and the path's mode says who may.

A client that connects and sends nothing takes one of `MAX_WAITING` places for `PATIENCE_S`. When all places are taken,
the client that has waited longest is disconnected.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import structlog

from kvpool.protocol.errors import ConfigError
from kvpool.transport.unix_socket import MAGIC, REQUEST_BYTES, Address, peer_of
from kvpool_server.process.addresses import bind_path, cannot_bind

log = structlog.get_logger()

BACKLOG = 128
MAX_WAITING = 64
PATIENCE_S = 1.0
ACCEPT_AGAIN_S = 0.1
LOG_EVERY_S = 10.0


class MemorySocket:
    """One listening socket. Made and used on the event loop. Raises ConfigError if it cannot listen.

    Args:
        address: a path, or a name in the abstract namespace.
        descriptor_of: the descriptor of the memory that a token stands for; None for other tokens.
        mode: permissions of a path.
    """

    def __init__(self, address: Address, descriptor_of: Callable[[bytes], int | None], mode: int = 0o600):
        self._address = address
        self._descriptor_of = descriptor_of
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[socket.socket, asyncio.TimerHandle] = {}
        self._refused, self._logged_at = 0, -LOG_EVERY_S
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            if isinstance(address, str):
                bind_path(address, mode, lambda: self._listener.bind(address))
            else:
                self._listener.bind(address)
            self._listener.listen(BACKLOG)
        except OSError as error:
            self._listener.close()
            raise cannot_bind(address, error) from None
        except ConfigError:
            self._listener.close()
            raise
        self._listen()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_WAITING):  # Then the loop's other work comes first.
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ECONNABORTED:
                    continue
                self._loop.remove_reader(self._listener)  # Too many open files: the loop would spin.
                self._loop.call_later(ACCEPT_AGAIN_S, self._listen)
                return
            client.setblocking(False)
            _, uid = peer_of(client)
            if isinstance(self._address, bytes) and uid not in (os.geteuid(), 0):
                self._refuse(client, "another user's process; see --unix-listen")
            elif not self._answer(client):
                self._wait(client)

    def _wait(self, client: socket.socket) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._hang_up(next(iter(self._waiting)))
        self._waiting[client] = self._loop.call_later(PATIENCE_S, self._hang_up, client)
        self._loop.add_reader(client, self._answer, client)

    def _answer(self, client: socket.socket) -> bool:
        """Answers a client's request, and hangs up; False if no request has arrived yet."""
        try:
            request = client.recv(REQUEST_BYTES + 1)
            is_request = len(request) == REQUEST_BYTES and request.startswith(MAGIC)
            descriptor = self._descriptor_of(request[len(MAGIC) :]) if is_request else None
            if descriptor is not None:
                socket.send_fds(client, [MAGIC], [descriptor])
                pid, uid = peer_of(client)
                log.debug("handed out shared memory", pid=pid, uid=uid)
            elif request:
                self._refuse(client, "not the token of this server's memory")
        except BlockingIOError:
            return False
        except OSError:
            pass  # The client has disconnected.
        self._hang_up(client)
        return True

    def _refuse(self, client: socket.socket, why: str) -> None:
        pid, uid = peer_of(client)
        self._hang_up(client)
        self._refused += 1
        if time.monotonic() - self._logged_at >= LOG_EVERY_S:
            self._logged_at = time.monotonic()
            log.warning("refused shared memory", why=why, pid=pid, uid=uid, refused_so_far=self._refused)

    def _hang_up(self, client: socket.socket) -> None:
        if timer := self._waiting.pop(client, None):
            timer.cancel()
            self._loop.remove_reader(client)
        client.close()

    def close(self) -> None:
        """Hands out nothing more. Memory that clients have mapped stays theirs. Idempotent."""
        if self._listener.fileno() < 0:
            return
        if isinstance(self._address, str):
            with suppress(OSError):
                os.unlink(self._address)  # First: a socket that nobody listens on may be replaced by a successor's.
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for client in list(self._waiting):
            self._hang_up(client)
