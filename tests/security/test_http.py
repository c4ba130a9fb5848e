"""HTTP over TLS: /metrics is for authenticated clients that may read it, /healthz for every client."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpool.protocol.errors import PermissionDeniedError
from kvpool.security.certificates import Authority
from kvpool.security.principal import Role
from kvpool.security.tls import TlsFiles
from kvpool.security.tokens import create_token
from kvpool_server.observability import http
from kvpool_server.process import addresses
from tests.conftest import StartServer
from tests.support.audit_log import entries
from tests.support.certificates import DAY, files_in, forge
from tests.support.processes import ServerProcess, wait_for
from tests.support.secured_server import SecuredServer, principal_of

TIMEOUT_S = 10.0
REFUSED = (urllib.error.URLError, ssl.SSLError, ConnectionError)
ENGINE = str(principal_of(Role.ENGINE_WRITE))
EXPIRY = "kvpool_certificate_expiry_timestamp_seconds"


def _get(url: str, ca: str, files: TlsFiles | None = None, **headers: str) -> tuple[int, str]:
    """Status and body, as Prometheus asks: it verifies the server, and shows a certificate or a token."""
    context = ssl.create_default_context(cafile=ca)
    if files is not None:
        context.load_cert_chain(files.cert, files.key)
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    directory = tmp_path_factory.mktemp("secured")
    made = SecuredServer(directory, functools.partial(ServerProcess, directory), days=20)
    yield made
    made.server.stop()


def test_metrics_are_for_the_roles_that_may_see_all_tenants(secured: SecuredServer) -> None:
    for role in Role:
        status, text = _get(f"{secured.server.http_url}/metrics", secured.ca, secured.files(role))
        may = role in (Role.METRICS, Role.OPERATOR)
        assert (status, "kvpool_arena_bytes" in text) == ((200, True) if may else (403, False))
    for path in ("/metrics", "/api/v1/now", "/api/v1/history"):
        url = f"{secured.server.http_url}{path}?span={'x' * 1_000}"
        status, text = _get(url, secured.ca, secured.files(Role.ENGINE_WRITE))
        assert status == 403 and f"may not read {path};" in text

    def refused() -> list[tuple[object, ...]]:
        lines = [each for each in entries(secured.audit) if each["outcome"] == "PERMISSION_DENIED"]
        return [(each["call"], each["caller"]) for each in lines]

    others = [role for role in Role if role not in (Role.METRICS, Role.OPERATOR)]
    expected = [("/metrics", str(principal_of(role))) for role in others]
    expected += [(path, ENGINE) for path in ("/metrics", "/api/v1/now", "/api/v1/history")]
    wait_for(lambda: refused() == expected, "a line for each refusal, which names the path")
    assert "xxx" not in secured.audit.read_text()


def test_a_refused_path_is_short_and_printable() -> None:
    refused: list[str] = []

    def every_path(request: http.Request, check: Callable[[], None]) -> None:
        check()

    def gate(path: str, *_: object) -> None:
        refused.append(path)
        raise PermissionDeniedError("no")

    served = http.OperatorHttp("127.0.0.1", 0, CollectorRegistry(), lambda: "ok", gate=gate, pages=every_path)
    try:
        with socket.create_connection(("127.0.0.1", served.port), TIMEOUT_S) as connection:
            connection.sendall(b"GET /\x1b[31m" + b"x" * 5_000 + b"?secret HTTP/1.0\r\n\r\n")
            assert b" 403 " in connection.recv(4_096)
    finally:
        served.close()
    (path,) = refused
    assert path.startswith("/\\x1b[31mxxx") and path.isprintable() and len(path) < 80 and "secret" not in path


HOSTS = {
    "127.0.0.1:50052": 200, "[::1]:50052": 200, "10.1.2.3": 200, "localhost:50052": 200, "kvpool:50052": 200, "": 200,
    "kvpool.monitoring.svc:50052": 200, "kvpool-0.kvpool.ns.svc.cluster.local.": 200, "ip-10-0-0-1.ec2.internal": 200,
    "Kvpool.Example.com:1": 200, "full.example.org": 200,
    "evil.example:50052": 421, "127.0.0.1.evil.example": 421, "localhost.evil.example": 421, "a.svc.evil.example": 421,
    "kvpool.example.com.evil.example": 421, "x.local": 421, "evil.example:80:80": 421, "[::1": 421,
    "full.example.org@evil.example": 421, "evil.example\x1b[31m": 421,
}  # fmt: skip
"""Host headers, and what a request in plaintext with one gets."""


def test_the_headers_of_a_request_and_its_time_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECTION_S", 1.0)
    served = http.OperatorHttp("127.0.0.1", 0, CollectorRegistry(), lambda: "ok")
    address, header = ("127.0.0.1", served.port), b"X-Long: " + b"x" * 60_000 + b"\r\n"
    with contextlib.closing(served):
        with socket.create_connection(address, TIMEOUT_S) as client:
            with contextlib.suppress(ConnectionError):  # The server answers, and closes, before it has read all.
                client.sendall(b"GET /healthz HTTP/1.0\r\n" + 20 * header + b"\r\n")
            assert b" 431 " in client.recv(100)
        with socket.create_connection(address, TIMEOUT_S) as slow:

            def is_cut_off() -> bool:
                slow.setblocking(True)
                with contextlib.suppress(ConnectionError):
                    slow.sendall(b"G")
                return not _is_open(slow)

            wait_for(is_cut_off, "the end of a request that trickles in")


@pytest.mark.parametrize(("method", "path"), [("GET", "/metrics"), ("HEAD", "/healthz"), ("POST", "/")])
def test_a_page_cannot_have_its_name_lead_to_the_server(
    method: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_full_names", lambda: {"full.example.org"})
    names = ["kvpool.example.com"]
    served = http.OperatorHttp("127.0.0.1", 0, CollectorRegistry(), lambda: "ok", names=names)

    def answer(*hosts: str) -> bytes:
        headers = "".join(f"Host: {host}\r\n" for host in hosts)
        with socket.create_connection(("127.0.0.1", served.port), TIMEOUT_S) as connection:
            connection.sendall(f"{method} {path} HTTP/1.1\r\n{headers}\r\n".encode())
            return b"".join(iter(lambda: connection.recv(4_096), b""))

    try:
        usual = answer("127.0.0.1")
        refused = {host for host in HOSTS if b" 421 " in answer(host).partition(b"\r\n")[0]}
        assert refused == {host for host, status in HOSTS.items() if status == 421}
        assert b" 421 " in answer("127.0.0.1", "evil.example") and b" 421 " not in usual + answer()
        told = answer("evil.example\x1b[31m")
    finally:
        served.close()
    assert b"\x1b" not in told and (method == "HEAD") != (b"--http-listen" in told)


def test_a_stranger_learns_the_servers_state_and_nothing_else(secured: SecuredServer, tmp_path: Path) -> None:
    assert secured.server.http_url.startswith("https://")
    for headers in ({}, {"Host": "kvpool.example.com"}):  # The certificate has said who the server is.
        assert _get(f"{secured.server.http_url}/healthz", secured.ca, **headers) == (200, "ok\n")
    nobody = forge(secured.authority.directory, tmp_path / "nobody", [], starts_in=-DAY, ends_in=DAY)
    token = {"Authorization": f"Bearer {create_token(principal_of(Role.METRICS), DAY)[0]}"}
    for files, headers in ((None, {}), (nobody, {}), (None, token)):
        status, text = _get(f"{secured.server.http_url}/metrics", secured.ca, files, **headers)
        assert status == 401 and "kvpool_" not in text
    plain = secured.server.http_url.replace("https", "http")
    with pytest.raises(REFUSED):
        urllib.request.urlopen(f"{plain}/healthz", timeout=TIMEOUT_S).read()


def test_a_certificate_that_is_not_good(secured: SecuredServer, tmp_path: Path) -> None:
    uris = [str(principal_of(Role.METRICS))]
    ended = forge(secured.authority.directory, tmp_path / "old", uris, starts_in=-2 * DAY, ends_in=-DAY)
    foreign = files_in(Authority.create(tmp_path / "foreign").issue_principal(principal_of(Role.METRICS)))
    for files in (foreign, files_in(secured.authority.directory / "server"), ended):
        with pytest.raises(REFUSED):
            _get(f"{secured.server.http_url}/metrics", secured.ca, files)


def test_old_tls_is_not_spoken(secured: SecuredServer) -> None:
    context = ssl.create_default_context(cafile=secured.ca)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    host, port = secured.server.http_url.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port)), TIMEOUT_S) as plain, pytest.raises(REFUSED):
        context.wrap_socket(plain, server_hostname=host)


def test_the_end_of_certificates_is_told(secured: SecuredServer) -> None:
    _, text = _get(f"{secured.server.http_url}/metrics", secured.ca, secured.files(Role.METRICS))
    lines = [line.split(" ") for line in text.splitlines() if line.startswith(EXPIRY)]
    ends = {name.split('"')[1]: (float(value) - time.time()) / 86_400 for name, value in lines}
    assert 19 <= ends["server"] <= 20
    assert 3_649 <= ends["client_ca"] <= 3_650
    warnings = [line for line in secured.server.stderr.splitlines() if "a certificate ends soon" in line]
    assert len(warnings) == 1
    assert "certificate=server" in warnings[0] and "days_left=19" in warnings[0]


def _is_open(connection: socket.socket) -> bool:
    """Whether the server has not closed it. Does not wait; the connection does not block afterwards."""
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


class _Slow(Collector):
    """A scrape of it lasts until `end` is set."""

    def __init__(self) -> None:
        self.began, self.end = threading.Event(), threading.Event()

    def collect(self) -> Iterator[Metric]:
        self.began.set()
        self.end.wait(TIMEOUT_S)
        yield GaugeMetricFamily("scraped", "1 after a scrape.", 1)


def test_a_host_with_many_connections_ends_its_own_and_no_other_hosts() -> None:
    slow, registry = _Slow(), CollectorRegistry()
    served = http.OperatorHttp("127.0.0.1", 0, registry, lambda: "ok")
    registry.register(slow)
    address = ("127.0.0.1", served.port)
    with contextlib.ExitStack() as opened:
        opened.callback(served.close)
        scrape = opened.enter_context(socket.create_connection(address, TIMEOUT_S, ("127.0.0.2", 0)))
        scrape.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert slow.began.wait(TIMEOUT_S)
        count = 3 * http.MAX_CONNECTIONS
        silent = [opened.enter_context(socket.create_connection(address, TIMEOUT_S)) for _ in range(count)]
        wait_for(lambda: not all(map(_is_open, silent)), "the end of a silent connection", 4)
        slow.end.set()
        answer = b"".join(iter(lambda: scrape.recv(4_096), b""))
    assert b" 200 " in answer and b"scraped 1.0" in answer


def test_one_answer_with_numbers_is_made_at_a_time() -> None:
    """Threads that encode take turns with the loop at the interpreter."""
    running, most, registry = 0, list[int](), CollectorRegistry()

    def slowly() -> None:
        nonlocal running
        running += 1
        most.append(running)
        time.sleep(0.02)
        running -= 1

    class Slow(Collector):
        def collect(self) -> Iterator[Metric]:
            slowly()
            return iter(())

    def page(path: str, check: Callable[[], None]) -> http.Response:
        check()
        slowly()
        return http.Response(200, b"")

    registry.register(Slow())
    most.clear()
    served = http.OperatorHttp("127.0.0.1", 0, registry, lambda: "ok", pages=page)

    def ask(path: str) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{served.port}{path}", timeout=TIMEOUT_S) as answer:
            return int(answer.status)

    with contextlib.closing(served), ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, ["/metrics", "/numbers"] * 4)) == [200] * 8
    assert most == [1] * 8


def test_a_token_reads_metrics(pool_server: StartServer, tmp_path: Path) -> None:
    secured = SecuredServer(tmp_path, pool_server, proof="tokens")
    server, tokens = secured.server, secured.tokens

    def status(token: str) -> int:
        return _get(f"{server.http_url}/metrics", secured.ca, Authorization=f"Bearer {token}")[0]

    assert [role for role in Role if status(tokens[role]) == 200] == [Role.OPERATOR, Role.METRICS]
    assert status(tokens[Role.TENANT_OPERATOR]) == 403
    assert status(create_token(principal_of(Role.METRICS), DAY)[0]) == 401
    assert _get(f"{server.http_url}/metrics", secured.ca)[0] == 401
    assert _get(f"{server.http_url}/healthz", secured.ca) == (200, "ok\n")
    assert not any(token in server.stderr + server.stdout for token in tokens.values())
    mine = str(principal_of(Role.METRICS))
    secured.denied.write_text(f"{mine}\n")
    os.kill(server.pid, signal.SIGHUP)
    wait_for(lambda: status(tokens[Role.METRICS]) == 401, "the denial")

    def refused() -> list[object]:
        return [each["outcome"] for each in entries(secured.audit) if each["caller"] == mine]

    assert set(wait_for(refused, "the line")) == {"UNAUTHENTICATED"}


@pytest.mark.more
def test_silent_connections_end_and_probes_are_answered_meanwhile(secured: SecuredServer) -> None:
    host, port = secured.server.http_url.removeprefix("https://").split(":")
    tasks = Path(f"/proc/{secured.server.pid}/task")
    before = len(list(tasks.iterdir()))
    silent = [socket.create_connection((host, int(port)), TIMEOUT_S) for _ in range(2 * http.MAX_CONNECTIONS)]
    try:
        assert _get(f"{secured.server.http_url}/healthz", secured.ca) == (200, "ok\n")
        assert any(map(_is_open, silent)), "the probe was answered only when the others had been closed"
        assert len(list(tasks.iterdir())) <= before + http.MAX_THREADS
        for each in silent:
            each.settimeout(http.CONNECTION_S + 20.0)
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""
    finally:
        for each in silent:
            each.close()
