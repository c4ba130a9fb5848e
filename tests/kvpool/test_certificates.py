"""Certificates that kvpool makes: OpenSSL's own verification, by a handshake, says who may be what."""

from __future__ import annotations

import datetime as dt
import json
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvpool.commands.credentials import certs as app
from kvpool.protocol.errors import ConfigError, InvalidRequestError, KVPoolError
from kvpool.security.certificates import LOCAL_HOSTS, Authority, read_certificates
from kvpool.security.principal import ALL_TENANTS, Principal, Role

HANDSHAKE_S = 10.0
ENGINE = Principal("acme", Role.ENGINE_WRITE)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "pki")


def _context(files: Path, is_server: bool, authority: Path | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files / "tls.crt", files / "tls.key")
    context.load_verify_locations((authority or files) / "ca.crt")
    return context


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost") -> tuple[str, ...]:
    """The URIs that the server finds in the client's certificate. Raises the client's or the server's ssl.SSLError."""
    ours, theirs = socket.socketpair()
    failed: list[ssl.SSLError] = []
    found: list[str] = []

    def serve() -> None:
        try:
            with server.wrap_socket(theirs, server_side=True) as peer:
                names = (peer.getpeercert() or {})["subjectAltName"]
                found.extend(str(value) for kind, value in names if kind == "URI")
                peer.sendall(b"!")
        except ssl.SSLError as error:
            failed.append(error)
        finally:
            theirs.close()

    for each in (ours, theirs):
        each.settimeout(HANDSHAKE_S)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ours, server_hostname=host) as peer:
            answer = peer.recv(1)
    finally:
        ours.close()
        thread.join(HANDSHAKE_S)
    if failed:
        raise failed[0]
    assert answer == b"!"
    return tuple(found)


@pytest.mark.parametrize("host", ["pool.example", "10.1.2.3", "fd00::1", *LOCAL_HOSTS])
def test_a_server_proves_its_hosts_and_a_client_who_it_is(authority: Authority, host: str) -> None:
    server = authority.issue_server(["pool.example", "10.1.2.3", "[fd00::1]"])
    client = authority.issue_principal(ENGINE)
    found = _handshake(_context(server, is_server=True), _context(client, is_server=False), host)
    assert found == ("spiffe://kvpool.local/kvpool/acme/engine-write",)


@pytest.mark.parametrize("fault", ["another host", "another authority", "server as client", "client as server"])
def test_nobody_passes_as_somebody_else(authority: Authority, tmp_path: Path, fault: str) -> None:
    server, client = authority.issue_server(["pool.example"]), authority.issue_principal(ENGINE)
    foreign = Authority.create(tmp_path / "foreign").issue_principal(ENGINE)
    client_files = {"another authority": foreign, "server as client": server}.get(fault, client)
    server_files = client if fault == "client as server" else server
    with pytest.raises(ssl.SSLError):
        _handshake(
            _context(server_files, is_server=True),
            _context(client_files, is_server=False, authority=server),
            "other.example" if fault == "another host" else "pool.example",
        )


def test_new_certificates_replace_the_old_ones(authority: Authority) -> None:
    files = authority.issue_server(["pool.example"], days=1)
    (before,) = read_certificates(files / "tls.crt")
    assert Authority.load(authority.directory).issue_server(["new.example"], days=3) == files
    (after,) = read_certificates(files / "tls.crt")
    assert after.ends_at - before.ends_at >= dt.timedelta(days=1, hours=23)
    assert after.names == ("new.example", *LOCAL_HOSTS)
    client = authority.issue_principal(ENGINE)
    assert _handshake(_context(files, is_server=True), _context(client, is_server=False), "new.example")
    assert sorted(each.name for each in files.iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
    keys = list(authority.directory.rglob("*.key"))
    assert len(keys) == 3 and {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}


@pytest.mark.parametrize("host", ["b.example", "[fd00::1]", "localhost"])
def test_another_server_gets_a_directory_of_its_own(authority: Authority, host: str) -> None:
    first = authority.issue_server_of(["a.example"])
    assert first == authority.directory / "server" == authority.issue_server_of(["a.example", "more.example"])
    before = (first / "tls.crt").read_bytes()
    other = authority.issue_server_of([host])
    assert other == authority.directory / "servers" / host.strip("[]")
    assert authority.issue_server_of([host, "more.example"]) == other
    assert (first / "tls.crt").read_bytes() == before
    names = read_certificates(other / "tls.crt")[0].names
    assert sorted(names) == sorted({host.strip("[]"), "more.example", *LOCAL_HOSTS})


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_first_server_of_local_names_is_renewed(authority: Authority, host: str) -> None:
    first = authority.issue_server_of([host])
    assert authority.issue_server_of([host]) == first == authority.issue_server_of(["127.0.0.1", "a.example"])
    assert sorted(read_certificates(first / "tls.crt")[0].names) == sorted(["a.example", *LOCAL_HOSTS])
    assert not (authority.directory / "servers").exists()


def test_what_an_authority_does_not_make_and_files_that_are_none(authority: Authority, tmp_path: Path) -> None:
    for host in ("", "..", "http://pool", "pool:50051", "two hosts", "naïve.example"):
        with pytest.raises(InvalidRequestError, match="neither a DNS name nor an address"):
            authority.issue_server([host])
    with pytest.raises(InvalidRequestError, match="give fewer"):
        authority.issue_server(["pool.example"], days=4_000)  # It would outlive the authority's own.
    with pytest.raises(ConfigError, match="kvpool certs issue"):
        Authority.create(authority.directory)
    foreign = Authority.create(tmp_path / "foreign").directory / "ca" / "ca.key"
    key = authority.directory / "ca" / "ca.key"
    for wrong in (b"nonsense", foreign.read_bytes(), bytes(2 << 20)):
        key.write_bytes(wrong)
        with pytest.raises(ConfigError, match=r"ca\b"):
            Authority.load(authority.directory)
    key.unlink()
    with pytest.raises(ConfigError, match=r"ca\b"):
        Authority.load(authority.directory)


@given(st.text(max_size=80))
def test_any_text_is_a_principal_or_refused(text: str) -> None:
    for spiffe_id in (text, f"spiffe://{text}/kvpool/acme/engine-read", f"spiffe://d/kvpool/{text}/engine-read"):
        try:
            principal = Principal.parse(spiffe_id)
        except InvalidRequestError:
            continue
        assert str(principal) == spiffe_id
        assert "/" not in principal.tenant and principal.tenant not in (".", "..")


@pytest.mark.parametrize("role", list(Role))
def test_a_principal_is_its_spiffe_id(role: Role) -> None:
    principal = Principal("acme" if role.has_tenant else ALL_TENANTS, role, "prod.example")
    assert Principal.parse(str(principal)) == principal
    with pytest.raises(KVPoolError, match="tenant"):
        Principal(ALL_TENANTS if role.has_tenant else "acme", role)


def _run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_init_makes_what_a_deployment_needs_and_show_tells_it(tmp_path: Path) -> None:
    pki = tmp_path / "pki"
    _run("init", pki, "--host", "pool.example", "--tenant", "acme", "--tenant", "umbra", "--days", "30")
    leaves = {str(each.parent.relative_to(pki)) for each in pki.rglob("tls.key")}
    roles = [f"tenants/{tenant}/{role}" for tenant in ("acme", "umbra") for role in Role if role.has_tenant]
    assert leaves == {"server", "operator", "metrics", "peer", *roles}
    shown = json.loads(_run("show", pki, "--json"))
    assert {each["use"] for each in shown} == {"authority", "server", "client"}
    assert len(shown) == len(leaves) + 1
    text = _run("show", pki / "server")
    assert "server: pool.example, localhost, 127.0.0.1, ::1" in text
    assert "in 30 d" in text


def test_issue_adds_a_server_and_a_tenant(tmp_path: Path) -> None:
    pki = tmp_path / "pki"
    _run("init", pki, "--host", "pool.example")
    names = ", ".join(["b.example", *LOCAL_HOSTS])
    made = f"made {pki}/servers/b.example/{{ca.crt,tls.crt,tls.key}} for {names}"
    assert _run("issue", pki, "--host", "b.example").splitlines() == [made]
    _run("issue", pki, "--tenant", "acme")
    (engine,) = read_certificates(pki / "tenants/acme/engine-read/tls.crt")
    assert engine.names == ("spiffe://kvpool.local/kvpool/acme/engine-read",)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("init", "{}/new"), "no --host"),
        (("init", "{}/new", "--host", "http://x"), "host 'http://x'"),
        (("init", "{}/new", "--host", "x", "--host", ".."), "host '..'"),
        (("init", "{}/new", "--host", "x", "--tenant", "a/b"), "tenant 'a/b'"),
        (("init", "{}/new", "--host", "x", "--domain", "UPPER"), "trust domain 'UPPER'"),
        (("issue", "{}"), "nothing to make"),
        (("issue", "{}/nothing", "--host", "x"), "cannot read"),
        (("show", "{}/nothing"), "cannot read"),
        (("show", "{}/ca/ca.key"), "holds a private key, not certificates"),
    ],
)
def test_what_the_commands_refuse(authority: Authority, arguments: tuple[str, ...], told: str) -> None:
    given_ = [each.format(authority.directory) for each in arguments]
    done = CliRunner().invoke(app, given_)
    assert isinstance(done.exception, KVPoolError)
    assert told in str(done.exception)
    assert not (authority.directory / "new").exists()
