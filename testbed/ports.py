"""TCP ports of the loopback interface, for servers that are started later or again."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 10_000
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_reserved: list[socket.socket] = []


def free_port() -> int:
    """A port on which no process listens, and which no other call returns until this process ends.

    The port lies below those that the kernel gives to outgoing connections: a client that knocks until its server
    is back would else be given that very port in the end.
    """
    lowest_ephemeral = int(_EPHEMERAL_RANGE.read_text().split()[0])
    while True:
        port = random.randrange(_LOWEST, lowest_ephemeral)
        if _reserve(port) and not _is_bound(port):
            return port


def free_endpoint() -> str:
    """127.0.0.1:PORT with a `free_port`."""
    return f"127.0.0.1:{free_port()}"


def is_listening(port: int) -> bool:
    """Whether a process listens on this port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _reserve(port: int) -> bool:
    """Takes a name that one process of this network namespace can have; the kernel frees it when the process ends."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0kvpool-testbed-port-{port}")
    except OSError:
        name.close()
        return False
    _reserved.append(name)
    return True


def _is_bound(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
