"""Addresses that a server listens on, HOST:PORT and paths of Unix sockets, and what to tell if it cannot."""

from __future__ import annotations

import errno
import functools
import os
import socket
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from kvpool.client.config import is_loopback, split_address
from kvpool.protocol.errors import ConfigError
from kvpool.transport.unix_socket import Address

EVERYWHERE = ("0.0.0.0", "::")
_PRIVATE = (".localhost", ".svc", ".svc.cluster.local", ".internal")
"""Ends of names that nobody can have on the Internet: of this host, of Kubernetes' services, of clouds' hosts."""
_full_names = functools.cache(lambda: {socket.getfqdn().lower(), socket.gethostname().lower()})
"""This host's names; called when they are needed, because DNS may be asked."""


def is_local(address: str) -> bool:
    """Whether only this host can reach an address."""
    return is_loopback(split_address(address)[0])


def name_for_clients(host: str, certificate_names: Sequence[str]) -> str:
    """What clients call a server that listens on a host: with TLS a name that its certificate has."""
    if host in EVERYWHERE:
        host = socket.gethostname()
    if host in certificate_names:
        return host
    is_near = is_local(f"{host}:0")
    named = (name for name in certificate_names if "*" not in name and is_local(f"{name}:0") == is_near)
    return next(named, host)


def is_own_name(host: str, names: Collection[str]) -> bool:
    """Whether a request with this Host header is from somebody who meant this server.

    A web page may have its own name lead to this server (DNS rebinding), to read what the browser's host can reach. So
    a name with a dot must be one that no page has: private, this host's, or one of `names`.
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return False
    if "." not in name or name.endswith(_PRIVATE) or name in names or name in _full_names():
        return True
    try:
        return bool(ip_address(name))
    except ValueError:
        return False


@contextmanager
def held(address: str) -> Iterator[int]:
    """Holds the port of an address for this process alone; only sockets with SO_REUSEPORT can be bound to it meanwhile.

    Yields the port. Raises OSError if no address of the host can be bound, or another socket is bound to one.
    """
    host, port = split_address(address)
    with ExitStack() as stack:
        errors: list[OSError] = []
        places = _places(host, port)
        for family, place in places:
            try:
                one = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                one.bind((place[0], port, *place[2:]))
                one.listen()  # Of sockets that are bound and do not listen there may be several.
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                port = one.getsockname()[1]
            except OSError as error:
                errors.append(error)
                if error.errno in (errno.EADDRINUSE, errno.EACCES) or len(errors) == len(places):
                    raise
        yield port


def _places(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    """Where gRPC listens for a host. Raises OSError if it has no address."""
    if host in EVERYWHERE:
        has_both = socket.has_dualstack_ipv6()
        return [(socket.AF_INET6, ("::", port))] if has_both else [(socket.AF_INET, ("0.0.0.0", port))]
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, place) for family, _, _, _, place in found))


@contextmanager
def listening(address: str, purpose: str, flag: str) -> Iterator[None]:
    """The body binds a port for `purpose`, set by `flag`. Raises ConfigError for its OSError."""
    try:
        yield
    except OSError as error:
        fix = f"; give {flag} an address of this host"
        if error.errno == errno.EADDRINUSE:
            fix = ". Another server may run here; give --listen, --http-listen and --data-listen free ports, or 0"
        elif error.errno == errno.EACCES:
            fix = f"; give {flag} a port of at least 1024"
        raise ConfigError(f"cannot listen on {address} for {purpose}: {error.strerror}{fix}") from None


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
