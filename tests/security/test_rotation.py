"""Credentials that change, end or are taken away while a server runs: no good call fails, and no other goes on."""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol import wire
from kvpool.protocol.errors import ConfigError, UnauthenticatedError
from kvpool.protocol.types import ShardRange
from kvpool.security.certificates import Authority, load_key
from kvpool.security.files import WatchedFiles
from kvpool.security.principal import Principal, Role
from kvpool.security.tls import TlsIdentity
from kvpool.security.tokens import PREFIX
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access import control
from kvpool_server.access.audit import READ
from kvpool_server.access.authentication import Certificates, Context, Credential, DenyList
from kvpool_server.access.caller import RunningCalls, watch_access
from kvpool_server.access.control import ServerCredentials
from kvpool_server.app import composition
from kvpool_server.rpc import grpc_server
from tests.conftest import StartServer
from tests.support.audit_log import entries
from tests.support.certificates import DAY, USELESS, files_in, forge
from tests.support.in_process_server import InProcessServer
from tests.support.processes import wait_for
from tests.support.secured_server import SecuredServer
from tests.support.values import group_spec, namespace_spec, payload, run_of

WITHIN_S = 25.0
"""So soon calls under way have ended, on a busy machine too: left to themselves they would go on for a minute."""
CHUNK = 1 << 20
TTL_MS = 100_000
PIECE_EVERY_S = 0.1
"""The pause of a slow reader after each piece, until its call should have ended."""
NUM_PIECES = 1_000
"""Pieces of a slow read: enough for longer than the 60 s that a call may take here."""
NUM_ENDED = 12
"""Connections that end while calls are made."""
ENGINE = Principal("acme", Role.ENGINE_WRITE)

Outcome = Future[tuple[grpc.StatusCode, float]]


class Streams:
    """Calls of one client that go on until the server ends them. `close` lets their clients end.

    Attributes:
        outcomes: by method: the status, and when it came.
    """

    def __init__(self, client: Client, name: str):
        self._go_on = threading.Event()
        self._threads = ThreadPoolExecutor(8)
        self.stub = client.rpc.stub
        namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=CHUNK), tenant=name))
        client.put_blocks(namespace, run_of("block"), [payload("block", CHUNK)])
        run = wire.encode_runs([run_of("block")])
        lookup = pb.LookupRequest(namespace=namespace.fingerprint, runs=run, lease_ttl_ms=TTL_MS)
        self._begun = threading.Semaphore(0)
        self.lease_id = self.stub.Lookup(lookup, timeout=30).lease_id
        one = wire.encode_shards(ShardRange(0, 1))
        get = pb.GetRequest(lease_id=self.lease_id, namespace=namespace.fingerprint, runs=run, shards=one)
        self.get = lambda: self.stub.Get(get, timeout=30)
        (offset,) = wire.decode_located(self.get()).offsets
        new = wire.encode_runs([run_of("new")])
        put = pb.PutStartRequest(namespace=namespace.fingerprint, runs=new, shards=one, ticket_ttl_ms=TTL_MS)
        self.stub.PutStart(put, timeout=30)
        read = pb.GetChunksRequest(lease_id=self.lease_id, offsets=[offset] * NUM_PIECES, region_bytes=CHUNK)
        self.outcomes: dict[str, Outcome] = {
            "LookupStream": self._run(lambda: list(self.stub.LookupStream(self._one(lookup), timeout=60))),
            "PutChunks": self._run(lambda: self.stub.PutChunks(self._one(pb.PutChunksRequest()), timeout=60)),
            "GetChunks": self._run(lambda: self._read_slowly(read)),
        }
        for _ in self.outcomes:
            assert self._begun.acquire(timeout=30)

    def _one(self, message: Any) -> Iterator[Any]:
        yield message
        self._begun.release()
        self._go_on.wait(60)

    def _read_slowly(self, read: pb.GetChunksRequest) -> None:
        call = self.stub.GetChunks(read, timeout=60)
        next(call)
        self._begun.release()
        for _ in call:
            self._go_on.wait(PIECE_EVERY_S)

    def _run(self, call: Callable[[], object]) -> Outcome:
        def run() -> tuple[grpc.StatusCode, float]:
            try:
                call()
            except grpc.RpcError as error:
                return error.code(), time.monotonic()
            return grpc.StatusCode.OK, time.monotonic()

        return self._threads.submit(run)

    def check_ended(self, since: float) -> None:
        """All have ended in time, as calls of a credential that is not in force."""
        for method, outcome in self.outcomes.items():
            if method == "GetChunks":  # gRPC may have buffered hundreds of MiB, and delivers these before the status.
                self._go_on.set()
            code, ended_at = outcome.result(60)
            assert (method, code) == (method, grpc.StatusCode.UNAUTHENTICATED)
            assert ended_at - since < WITHIN_S, method

    def close(self) -> None:
        self._go_on.set()
        self._threads.shutdown()


@pytest.fixture
def deployment(pool_server: StartServer, tmp_path: Path) -> SecuredServer:
    return SecuredServer(tmp_path, pool_server, "--memory", "64MiB")


def _client(deployment: SecuredServer, tenant: str = "acme", **fields: Any) -> Client:
    return deployment.client(Role.ENGINE_WRITE, tenant, transport="grpc", data_timeout_ms=60_000, **fields)


def _fingerprint(file: Path) -> str:
    """As `openssl x509 -noout -fingerprint -sha256` prints it."""
    digest = x509.load_pem_x509_certificate(file.read_bytes()).fingerprint(hashes.SHA256())
    return f"sha256 Fingerprint={digest.hex(':').upper()}\n"


def _holds(operator: Client) -> tuple[int, int]:
    stats = operator.admin.stats()
    return stats.num_leases, stats.num_tickets


def test_who_is_denied_is_out_at_once_and_nobody_else_is(deployment: SecuredServer) -> None:
    acme, umbra = _client(deployment), _client(deployment, "umbra")
    stolen = _fingerprint(deployment.authority.directory / "tenants" / "acme" / Role.ENGINE_WRITE / "tls.crt")
    with acme, umbra, deployment.client(Role.OPERATOR) as operator:
        theirs, others = Streams(acme, "acme"), Streams(umbra, "umbra")
        # The leases of the streams' own lookups come as soon as the server has read these.
        wait_for(lambda: _holds(operator) == (4, 2), "the leases and tickets of both")
        since = time.monotonic()
        deployment.denied.write_text(stolen)
        theirs.check_ended(since)
        with pytest.raises(UnauthenticatedError, match="deny list"):
            acme.admin.ping()
        # What it may still have been told of bytes is worth nothing: permits of the data port end with these.
        wait_for(lambda: _holds(operator) == (2, 1), "its leases and its ticket to end", WITHIN_S)
        assert time.monotonic() - since < WITHIN_S
        assert others.get().offsets
        assert not any(outcome.done() for outcome in others.outcomes.values())
        theirs.close()
        others.close()
        # What cannot be read leaves the list as it was.
        deployment.denied.write_text("half of an en")
        os.kill(deployment.server.pid, signal.SIGHUP)
        wait_for(lambda: "REFUSED" in deployment.audit.read_text(), "the refusal")
        with pytest.raises(UnauthenticatedError, match="deny list"):
            acme.admin.ping()
    with _client(deployment) as renewed:
        assert renewed.admin.whoami().principal == str(ENGINE), "its principal goes on with another certificate"

    def ended() -> set[str]:
        refused = [line for line in entries(deployment.audit) if line["outcome"] == "UNAUTHENTICATED"]
        return {line["call"] for line in refused if line["caller"] == str(ENGINE)}

    wait_for(lambda: ended() >= {"LookupStream", "PutChunks", "GetChunks"}, "a line about each call")
    reads = [(line["what"], line["outcome"]) for line in entries(deployment.audit) if line["call"] == READ]
    expected = [("certificates", "OK"), ("deny list", "OK"), ("deny list", "OK"), ("deny list", "REFUSED")]
    assert reads == expected


class Aging:
    """A TLS server in this process whose connections live for `age_s`, and calls on them `grace_s` longer."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, age_s: float, grace_s: float):
        monkeypatch.setattr(grpc_server, "CONNECTION_S", age_s)
        monkeypatch.setattr(grpc_server, "MAX_STREAM_S", grace_s)
        authority = Authority.create(directory / "pki")
        self.connections: set[str] = set()
        certificates = Certificates()

        def who(context: Context) -> Credential:
            self.connections.add(context.peer())
            return certificates(context)

        credentials = ServerCredentials(files_in(authority.issue_server([]))).for_grpc
        self.server = InProcessServer(8 << 20, 1 << 20, credentials=credentials, who=who)
        files = files_in(authority.issue_principal(ENGINE))
        self.client = Client(ClientConfig(f"127.0.0.1:{self.server.port}", "grpc", tls=files, timeout_ms=10_000))
        self.namespace = self.client.open_namespace(namespace_spec(tenant="acme"))

    def close(self) -> None:
        self.client.close()
        self.server.close()


def test_no_call_fails_while_connections_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aging = Aging(tmp_path, monkeypatch, age_s=0.3, grace_s=600.0)
    client, namespace = aging.client, aging.namespace
    before, ends_at = len(aging.connections), time.monotonic() + 120.0

    def work(worker: int) -> int:
        count = 0
        while len(aging.connections) < before + NUM_ENDED or not count:
            assert time.monotonic() < ends_at, "connections do not end"
            run, block = run_of(f"{worker} {count % 20}"), payload(f"{worker} {count % 20}", 256)
            client.put_blocks(namespace, run, [block])
            found = client.lookup(namespace, [run])
            assert found.hits[0].num_leading == 1
            (loaded,) = client.get_blocks(namespace, found.lease_id, run)
            assert bytes(loaded) == block.tobytes()
            client.release([found.lease_id])
            client.admin.ping()
            count += 1
        return count

    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(list(threads.map(work, range(4))))
    finally:
        aging.close()


def test_a_stream_that_ends_with_its_connection_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aging = Aging(tmp_path, monkeypatch, age_s=0.2, grace_s=0.2)
    try:
        ends_at = time.monotonic() + 60.0
        while len(aging.connections) < 4:
            assert aging.client.lookup(aging.namespace, [run_of("nothing")]).hits[0].num_leading == 0
            assert time.monotonic() < ends_at, "connections do not end"
            time.sleep(0.7)  # Longer than a connection and its calls live.
    finally:
        aging.close()


async def _run_until(work: Coroutine[Any, Any, None], is_done: Callable[[], bool]) -> None:
    """Runs endless work until a condition holds."""
    task = asyncio.create_task(work)
    async with asyncio.timeout(10):
        while not is_done():
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait((task,))


def test_plaintext_to_other_hosts_is_warned_of_again_and_again(
    pool_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composition, "HOUR_S", 0.01)
    with capture_logs() as warned:
        asyncio.run(_run_until(composition.warn_of_plaintext(["--listen 0.0.0.0:0"]), lambda: len(warned) >= 3))
    server = pool_server("--insecure-network", "--data-listen", "0.0.0.0:0")
    (line,) = (line for line in server.stderr.splitlines() if "--insecure-network: any host that reaches" in line)
    assert "'--data-listen 0.0.0.0:0'" in line and "'--listen" not in line


def test_a_signal_has_files_read_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    watched = WatchedFiles([str(file)], file.read_text, clock=lambda: 0.0)  # Its time to look never comes.
    calls = RunningCalls(lambda credential: credential, 0.0)

    async def expire_owned(_: object) -> None:
        raise AssertionError("nobody was refused")

    async def scenario() -> None:
        woken = asyncio.Event()
        file.write_text("new")
        woken.set()
        await _run_until(watch_access([watched], calls, expire_owned, woken), lambda: watched.value == "new")

    asyncio.run(scenario())


@pytest.mark.parametrize(("starts_in", "ends_in", "told"), USELESS)
def test_a_useless_certificate_leaves_the_one_before_in_force(
    tmp_path: Path, starts_in: dt.timedelta, ends_in: dt.timedelta, told: str
) -> None:
    authority, errors = Authority.create(tmp_path / "pki"), list[ConfigError | None]()
    files = files_in(authority.issue_server([]))
    credentials = ServerCredentials(files, errors.append)
    before = credentials.value
    useless = forge(tmp_path / "pki", tmp_path / "forged", [], starts_in=starts_in, ends_in=ends_in)
    with pytest.raises(ConfigError, match=told):
        ServerCredentials(useless)
    Path(useless.key).replace(files.key)
    Path(useless.cert).replace(files.cert)
    assert credentials.look(at_once=True) == 0
    assert told in str(errors[-1])
    assert credentials.value is before and credentials.for_http() is before.context
    authority.issue_server([])
    assert credentials.look(at_once=True) == 1
    assert credentials.for_http() is not before.context
    assert errors[-1] is None


def test_an_authority_may_have_a_comment_in_any_language_and_files_that_openssl_cannot_use_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_in(Authority.create(tmp_path / "pki").issue_server([]))
    authority = Path(files.ca)
    authority.write_bytes("# Autorité\n".encode("latin-1") + authority.read_bytes())
    assert len(ServerCredentials(files).for_http().get_ca_certs()) == 1
    monkeypatch.setattr(control, "read_identity", lambda *_: TlsIdentity(b"", Path(files.cert).read_bytes()))
    with pytest.raises(ConfigError, match=f"{files.ca}.* cannot be used"):
        ServerCredentials(files)


def test_a_connection_to_http_reads_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error there would end the thread that accepts HTTP's connections."""
    files = files_in(Authority.create(tmp_path / "pki").issue_server([]))
    credentials = ServerCredentials(files)
    before = credentials.for_http()
    monkeypatch.setattr(control, "_read_server", lambda _: 1 // 0)
    monkeypatch.setattr(credentials, "_clock", lambda: math.inf)  # It is time to look.
    os.utime(files.cert, (0, 0))
    assert credentials.for_http() is before
    with pytest.raises(ZeroDivisionError):
        credentials.look()


def test_each_certificate_is_told_and_warned_of_if_it_ends_soon(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "pki")
    credentials = ServerCredentials(files_in(authority.issue_server([])))
    authority.issue_server(["renewed.example"], days=20)
    with capture_logs() as logs:
        credentials.look(at_once=True)
    told, warning = logs
    assert told["event"] == "the server's certificate" and "renewed.example" in told["names"]
    assert (warning["log_level"], warning["certificate"], warning["days_left"]) == ("warning", "server", 19)
    assert "ends soon" in warning["event"]


def test_a_file_that_is_repaired_to_what_it_was_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvpool.security.files")
    denied, errors = tmp_path / "denied", list[ConfigError | None]()
    denied.touch()
    deny_list = DenyList(str(denied), errors.append)
    for mode in (0o666, 0o662, 0o644, 0o640):  # Two that are refused, then two that are not.
        denied.chmod(mode)
        assert deny_list.look(at_once=True) == 0
    assert [error is None for error in errors] == [True, False, False, True]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]
    assert caplog.messages[-1] == f"read again: {denied}"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "end", "deny", "allow", "sweep", "later"]), st.integers(0, 3), st.integers(0, 5)
        ),
        max_size=40,
    )
)
def test_calls_end_if_and_only_if_their_credential_is_refused(steps: list[tuple[str, int, int]]) -> None:
    """Against a model: four credentials of two principals, some calls of each, in any order of events."""
    hold_s = 60.0
    now, denied = [0.0], set[str]()
    ends_at = dt.datetime.now(dt.UTC) + DAY
    credentials = [
        Credential(Principal(f"tenant{nth % 2}", Role.ENGINE_READ), f"digest{nth}", ends_at) for nth in range(4)
    ]

    def check(credential: Credential) -> Credential:
        if credential.digest in denied:
            raise UnauthenticatedError("denied")
        return credential

    async def scenario() -> None:
        running = RunningCalls(check, hold_s, lambda: now[0])
        tasks: list[tuple[Credential, asyncio.Event, asyncio.Task[str]]] = []
        last_used: dict[str, float] = {}

        async def call(credential: Credential, ends: asyncio.Event) -> str:
            try:
                with running.call(credential):
                    await ends.wait()
            except UnauthenticatedError:
                return "refused"
            return "done"

        for step, which, nth in steps:
            credential = credentials[which]
            if step == "begin" and credential.digest not in denied:
                ends = asyncio.Event()
                tasks.append((credential, ends, asyncio.create_task(call(credential, ends))))
                last_used[credential.digest] = now[0]
            elif step == "end" and tasks:
                ended, ends, task = tasks.pop(nth % len(tasks))
                ends.set()
                assert await task == "done"
                last_used[ended.digest] = now[0]
            elif step == "deny":
                denied.add(credential.digest)
            elif step == "allow":
                denied.discard(credential.digest)
            elif step == "later":
                now[0] += 0.7 * hold_s
            elif step == "sweep":
                refused = [each for each in tasks if each[0].digest in denied]
                busy = {each[0].digest for each in tasks}
                taken = running.end_refused()
                recent = {
                    digest for digest, used_at in last_used.items() if digest in busy or now[0] - used_at <= hold_s
                }
                certain = {str(each.principal) for each in credentials if each.digest in denied & recent}
                possible = {str(each.principal) for each in credentials if each.digest in denied & {*last_used}}
                assert certain <= taken <= possible
                last_used = {digest: at for digest, at in last_used.items() if digest not in denied}
                tasks = [each for each in tasks if each not in refused]
                assert [await each[2] for each in refused] == ["refused"] * len(refused)
            await asyncio.sleep(0)
            assert not any(task.done() for _, _, task in tasks)
        for _, ends, task in tasks:
            ends.set()
            assert await task == "done"

    asyncio.run(scenario())


def test_a_client_that_hangs_up_is_not_mistaken_for_one_that_is_refused() -> None:
    async def scenario() -> None:
        running = RunningCalls(lambda credential: credential, 0.0)
        credential = Credential(ENGINE, "digest", dt.datetime.now(dt.UTC) + DAY)

        async def call() -> None:
            with running.call(credential):
                await asyncio.sleep(60)

        task = asyncio.create_task(call())
        await asyncio.sleep(0)
        assert running.end_refused() == set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


SECRET = PREFIX + 43 * "x"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("acme", "'acme' is neither a tenant nor a SPIFFE ID nor"),
        ("tenants:acme", "'tenants:acme' is neither"),
        ("tenant:", "tenant '' cannot be"),
        ("tenant:_", "tenant '_' cannot be"),
        ("spiffe:/kvpool.local/kvpool/acme/metrics", "'spiffe:/kvpool.local/kvpool/acme/metrics' is neither"),
        ("spiffe://kvpool.local/kvpool/acme/root", "no role 'root'"),
        ("spiffe://other/kvpool/acme/engine-read", "domain kvpool.local; give spiffe://kvpool.local/kvpool/acme/"),
        ("ab" * 31, "an entry of 62 characters is neither"),
        ("SHA1 Fingerprint=" + "AB:" * 19 + "AB", "is neither"),
        (SECRET, "an entry of 50 characters is neither"),
    ],
)
def test_a_deny_list_with_a_wrong_line_names_it(tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "denied").write_text(f"# first\n{line}\n")
    with pytest.raises(ConfigError, match=f"denied, line 2: .*{told}") as raised:
        DenyList(str(tmp_path / "denied"), domain="kvpool.local")
    assert SECRET not in str(raised.value)


DIGEST = bytes(range(32))
ELSEWHERE = Principal("acme", Role.ENGINE_READ, "other")  # The server's own tokens may be of any trust domain.


@pytest.mark.parametrize(
    ("line", "denied"),
    [
        (str(ELSEWHERE), [(ELSEWHERE, "any")]),
        ("tenant:acme  # has left", [(ENGINE, "any"), (ELSEWHERE, "any"), (ENGINE, DIGEST.hex())]),
        (f"  {DIGEST.hex()}  # why", [(ENGINE, DIGEST.hex())]),
        (DIGEST.hex().upper(), [(ENGINE, DIGEST.hex())]),
        (f"sha256 Fingerprint={DIGEST.hex(':').upper()}", [(ENGINE, DIGEST.hex())]),
    ],
)
def test_whom_a_line_denies(tmp_path: Path, line: str, denied: list[tuple[Principal, str]]) -> None:
    (tmp_path / "denied").write_text(f"{line}\n")
    found, ends_at = DenyList(str(tmp_path / "denied")), dt.datetime.now(dt.UTC) + DAY
    neighbour = Principal("acme-2", Role.ENGINE_WRITE)
    callers = [(ENGINE, "any"), (ELSEWHERE, "any"), (ENGINE, DIGEST.hex()), (neighbour, "any")]
    assert [each for each in callers if found.denies(Credential(*each, ends_at))] == denied


def test_a_key_of_a_kind_that_nobody_knows_is_refused() -> None:
    good = ec.generate_private_key(ec.SECP256R1())
    encoded = good.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    curve, other = bytes.fromhex("06082a8648ce3d030107"), bytes.fromhex("06082a811ccf5501822d")
    assert curve in encoded
    text = b"-----BEGIN PRIVATE KEY-----\n" + base64.encodebytes(encoded.replace(curve, other))
    with pytest.raises(ConfigError, match=r"server\.key holds no key that can be read"):
        load_key(text + b"-----END PRIVATE KEY-----\n", "server.key")


def test_refused_files_are_read_again_though_they_have_not_changed(tmp_path: Path) -> None:
    """A server that is out of descriptors for a moment must not miss a new line of its deny list for ever."""
    file, faults, told = tmp_path / "file", list[Exception](), list[str]()
    file.write_text("old")

    def read() -> str:
        if faults:
            raise faults.pop(0)
        return file.read_text()

    watched = WatchedFiles([str(file)], read, when_read=lambda error: told.append(str(error)))
    file.write_text("new")
    faults += [ConfigError("too many open files"), ConfigError("too many open files"), ConfigError("line 1")]
    for _ in range(3):
        assert watched.look(at_once=True) == 0
        assert watched.is_refused and watched.value == "old"
    faults += [ZeroDivisionError(), ZeroDivisionError()]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            watched.look(at_once=True)
        assert watched.is_refused and watched.value == "old"
    assert watched.look(at_once=True) == 1
    assert watched.value == "new" and not watched.is_refused
    assert told == ["None", "too many open files", "line 1", "None"], "each reason is told once"
