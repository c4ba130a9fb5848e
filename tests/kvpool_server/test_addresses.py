"""Which process has a port: gRPC's sockets share it, so one that is held before is what keeps a second server away."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from kvpool_server.process.addresses import held


@contextlib.contextmanager
def _server(host: str, port: int = 0) -> Iterator[int]:
    """A socket like those of a server that runs, and its port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind((host, port))
        one.listen()
        yield one.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "[::]"])
def test_a_port_on_which_a_server_listens_is_not_held(host: str) -> None:
    with _server("127.0.0.1") as port, pytest.raises(OSError, match="in use"), held(f"{host}:{port}"):
        pass


def test_of_two_that_start_at_once_one_holds_the_port() -> None:
    with held("127.0.0.1:0") as port:
        with pytest.raises(OSError, match="in use"), held(f"127.0.0.1:{port}"):
            pass
        with _server("127.0.0.1", port), _server("127.0.0.1", port):
            pass
    with held(f"127.0.0.1:{port}") as again:
        assert again == port


def test_an_address_that_is_not_this_hosts_is_an_error() -> None:
    with pytest.raises(OSError, match="assign requested address"), held("192.0.2.1:0"):
        pass
