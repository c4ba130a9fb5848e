from __future__ import annotations

import contextlib
import datetime as dt
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.client import transport_choice
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.commands import doctor_checks
from kvpool.protocol.errors import TransferError
from kvpool.report.judgements import Finding, Level
from kvpool.security.certificates import Authority
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool.version import PROTOCOL, __version__
from testbed.ports import free_endpoint
from tests.conftest import StartServer
from tests.support.certificates import DAY, files_in, forge
from tests.support.lying_pool import LyingPool

OPERATOR = Principal(ALL_TENANTS, Role.OPERATOR)


def only(findings: list[Finding]) -> Finding:
    (found,) = findings
    assert bool(found.fix) == (found.level is not Level.OK)
    return found


def liar(**ping: object) -> Client:
    """A client of a server whose answers to Ping have other fields."""
    pool = LyingPool()

    def altered(method: str, reply: object) -> bytes:
        for name, value in ping.items() if method == "Ping" else ():
            if value is None:
                reply.ClearField(name)  # type: ignore[attr-defined]
            elif isinstance(value, dict):
                for inner, each in value.items():
                    setattr(getattr(reply, name), inner, each)
            else:
                setattr(reply, name, value)
        return reply.SerializeToString()  # type: ignore[attr-defined,no-any-return]

    pool.alter = altered
    return pool.client(ClientConfig())


def test_a_server_in_order_has_no_problem(pool_server: StartServer, connect: Callable[..., Client]) -> None:
    server = pool_server()
    client = connect(server)
    found = [*doctor_checks.grpc_port(client), *doctor_checks.transports(client)]
    found += doctor_checks.http_port(server.http_url.removeprefix("http://"), ClientConfig(), was_given=True)
    assert {each.level for each in found} == {Level.OK}, found
    assert [each.check for each in found] == ["gRPC", "versions", "transport", "network", "HTTP"]
    assert "by shm" in found[2].text and "by tcp" in found[3].text


def test_a_server_without_a_data_port_or_over_a_unix_socket(
    pool_server: StartServer, connect: Callable[..., Client], tmp_path: Path
) -> None:
    server = pool_server("--data-listen", "", "--unix-listen", str(tmp_path / "s"))
    here, network = doctor_checks.transports(connect(server))
    assert (here.level, network.level) == (Level.OK, Level.WARNING)
    assert "no tcp: the server has no data port" in network.text and "see --data-listen" in network.fix
    with Client(ClientConfig(f"unix:{tmp_path / 's'}", timeout_ms=10_000)) as client:
        found = only(doctor_checks.transports(client))
    assert (found.check, found.level) == ("transport", Level.OK), "a Unix socket has no network"


def test_other_releases_on_both_sides_are_named() -> None:
    _, versions = doctor_checks.grpc_port(liar(version="9.9", protocol=PROTOCOL + 1))
    assert versions.level is Level.OK and versions.text.endswith("they work together")
    _, versions = doctor_checks.grpc_port(liar(version="9.9", protocol=PROTOCOL + 2))
    assert versions.level is Level.ERROR and versions.fix.startswith("upgrade the older one")
    theirs, ours = f"9.9 (protocol {PROTOCOL + 2})", f"{__version__} (protocol {PROTOCOL})"
    assert versions.text == f"the server is kvpool {theirs}, and this is kvpool {ours}, which do not work together"


def test_memory_that_this_process_does_not_get_is_named(
    pool_server: StartServer, connect: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise TransferError("no shared memory: another user")

    monkeypatch.setattr(transport_choice, "receive_memory", refuse)
    found = only(doctor_checks.transports(connect(pool_server())))
    assert found.level is Level.WARNING and "no shm: no shared memory: another user" in found.text
    assert "--unix-listen" in found.fix


def test_a_server_that_drains_is_an_error() -> None:
    """Its answer is endless, and not all printable."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with listening.accept()[0] as connection, contextlib.suppress(OSError):
                connection.recv(4_096)
                connection.sendall(b"HTTP/1.0 503 No\r\n\r\ndrain\x1b[2Jing" + b"x" * 100_000)

        answering = threading.Thread(target=answer)
        answering.start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        found = only(doctor_checks.http_port(address, ClientConfig(), was_given=True))
        answering.join(10)
    assert found.level is Level.ERROR and "says 503: 'drain[2Jing" in found.text and len(found.text) < 2_000


def test_an_http_port_that_cannot_be_reached_is_an_error_only_if_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    address = free_endpoint()
    assert only(doctor_checks.http_port(address, ClientConfig(), was_given=True)).level is Level.ERROR
    assert only(doctor_checks.http_port(address, ClientConfig(), was_given=False)).level is Level.WARNING
    monkeypatch.setattr(doctor_checks, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address, began = f"127.0.0.1:{silent.getsockname()[1]}", time.monotonic()
        assert only(doctor_checks.http_port(address, ClientConfig(), was_given=True)).level is Level.ERROR
        assert time.monotonic() - began < 20, "a port that says nothing does not hang a check"


def test_clocks_that_differ_are_named() -> None:
    assert only(doctor_checks.clock(time.time())).level is Level.OK
    found = only(doctor_checks.clock(time.time() - 180))
    assert found.level is Level.WARNING and "differs by 3 min" in found.text


@pytest.mark.parametrize(
    ("ends_in", "level", "says"),
    [(90 * DAY, Level.OK, "in 90 d"), (5 * DAY, Level.WARNING, "in 5 d"), (-DAY, Level.ERROR, "ended 24 h ago")],
)
def test_the_end_of_the_clients_certificate_is_told(
    tmp_path: Path, ends_in: dt.timedelta, level: Level, says: str
) -> None:
    pki = tmp_path / "pki"
    Authority.create(pki)
    tls = forge(pki, tmp_path / "forged", [str(OPERATOR)], starts_in=-2 * DAY, ends_in=ends_in)
    config = ClientConfig(free_endpoint(), tls=tls)
    authority, own = doctor_checks.own_certificates(config)
    assert (authority.level, own.level) == (Level.OK, level) and says in own.text


def test_old_tls_is_not_spoken(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "pki")
    tls, own = files_in(authority.issue_principal(OPERATOR)), files_in(authority.issue_server([]))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(own.cert, own.key)
    failures: list[str] = []

    def answer() -> None:
        with listening.accept()[0] as plain:
            try:
                context.wrap_socket(plain, server_side=True)
            except ssl.SSLError as error:
                failures.append(str(error.reason))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        answering = threading.Thread(target=answer)
        answering.start()
        config = ClientConfig(f"127.0.0.1:{listening.getsockname()[1]}", tls=tls)
        found = only(doctor_checks.http_port(config.endpoint, config, was_given=True))
        answering.join(10)
    assert found.level is Level.ERROR and failures == ["UNSUPPORTED_PROTOCOL"]


@pytest.mark.parametrize(
    ("endpoint", "level", "callers"),
    [
        ("127.0.0.1:50051", Level.OK, "every user of the server's host"),
        ("localhost:50051", Level.OK, "every user of the server's host"),
        ("10.0.0.7:50051", Level.WARNING, "whoever reaches 10.0.0.7:50051"),
        ("unix:/run/kvpool.sock", None, ""),
    ],
)
def test_without_tls_the_doctor_says_who_can_call(endpoint: str, level: Level | None, callers: str) -> None:
    config = ClientConfig(endpoint)
    assert doctor_checks.own_certificates(config) == []
    found = doctor_checks.callers(config)
    assert [each.level for each in found] == ([] if level is None else [level])
    assert all(f"{callers} can read and write the pool" in only([each]).text for each in found)
