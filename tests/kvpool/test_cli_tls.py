"""`kvpool` at servers with TLS: by a certificate, by a token, and what it says where neither fits."""

from __future__ import annotations

import datetime as dt
import json
import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from typer.testing import CliRunner, Result

from kvpool.cli import app
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import ConfigError, KVPoolError, UnavailableError
from kvpool.security.certificates import Authority
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool.security.tls import TlsFiles
from testbed.ports import free_endpoint
from tests.support.certificates import DAY, files_in, forge
from tests.support.processes import ServerProcess, run_command
from tests.support.secured_server import SecuredServer


def refusal(done: Result) -> str:
    """The sentence that the command ends with."""
    assert isinstance(done.exception, KVPoolError), done.output
    return str(done.exception)


KVPOOL = str(Path(sys.executable).with_name("kvpool"))
ENGINE, OPERATOR = Principal("acme", Role.ENGINE_WRITE), Principal(ALL_TENANTS, Role.OPERATOR)


class Pool(SecuredServer):
    """A server with TLS, and a directory with nothing but its authority's certificate."""

    def __init__(self, directory: Path, proof: str):
        def start(*flags: str, **identity: Any) -> ServerProcess:
            return ServerProcess(directory, "--memory", "64MiB", *flags, **identity)

        super().__init__(directory, start, proof=proof)
        self.pki, self.trust = directory / "pki", directory / "trust"
        self.operator = self.authority.issue_principal(OPERATOR)
        self.trust.mkdir()
        shutil.copy(self.ca, self.trust)

    def run(self, *arguments: object) -> Result:
        """Runs `kvpool ARGUMENTS --endpoint ENDPOINT`."""
        return run([*arguments, "--endpoint", self.server.endpoint])


def run(arguments: list[object]) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A server that asks for certificates."""
    pool = Pool(tmp_path_factory.mktemp("certificates"), "certificates")
    yield pool
    pool.server.stop()


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A server that asks for tokens."""
    pool = Pool(tmp_path_factory.mktemp("tokens"), "tokens")
    yield pool
    pool.server.stop()


def test_a_token_and_the_authority_alone_are_enough(tokens: Pool) -> None:
    token = str(tokens.token_file(OPERATOR))
    done = tokens.run("--tls", tokens.trust, "--token-file", token, "whoami")
    assert done.exit_code == 0 and str(OPERATOR) in done.output, done.output
    done = tokens.run("--tls", tokens.trust, "--token-file", token, "whoami", "--json")
    assert str(OPERATOR) in json.loads(done.output).values()
    command = (KVPOOL, "stats", "--endpoint", tokens.server.endpoint)
    ran = run_command(*command, KVPOOL_TLS=str(tokens.trust), KVPOOL_TOKEN_FILE=token)
    assert ran.returncode == 0 and "arena_bytes" in ran.stdout, ran.stderr


def test_commands_tell_when_the_servers_certificates_end(certificates: Pool) -> None:
    told = certificates.run("--tls", certificates.operator, "stats", "--json")
    ends = json.loads(told.output)["server"]["certificate_ends"]
    files = {"server": certificates.authority.issue_server([]) / "tls.crt", "client_ca": certificates.trust / "ca.crt"}
    assert set(ends) == set(files)
    for name, path in files.items():
        ends_at = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
        assert ends[name] == pytest.approx(ends_at.timestamp(), abs=600), name
    told = certificates.run("--tls", certificates.operator, "doctor", "--json")
    findings = json.loads(told.output)["findings"]
    checks = [each["check"] for each in findings]
    assert [each["level"] for each in findings if each["check"] == "HTTP"] == ["ok"], "HTTP is checked over TLS"
    assert checks.count("certificate of the server") == checks.count("certificate of the clients' authority") == 1


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
def test_a_file_that_is_missing_or_in_the_place_of_another_is_named(
    certificates: Pool, tmp_path: Path, name: str
) -> None:
    files = tmp_path / "operator"
    shutil.copytree(certificates.operator, files)
    other = "tls.crt" if name == "tls.key" else "tls.key"
    shutil.copyfile(files / other, files / name)
    told = "certificates, not a private key" if name == "tls.key" else "a private key, not certificates"
    assert refusal(certificates.run("--tls", files, "stats")).startswith(
        f"{files / name} holds {told}; give a PEM file"
    )
    (files / name).unlink()
    with pytest.raises(ConfigError, match=f"operator has .*no {name}"):
        TlsFiles.in_directory(files)


def test_a_wrong_directory_and_a_token_that_cannot_be_read_name_their_options(
    certificates: Pool, tmp_path: Path
) -> None:
    told = refusal(certificates.run("--tls", certificates.pki, "stats"))
    assert told == f"--tls {certificates.pki} has no ca.crt; give {certificates.operator}"
    token = tmp_path / "nothing"
    told = refusal(certificates.run("--tls", certificates.trust, "--token-file", token, "stats"))
    assert told == (
        f"cannot read {token}: No such file or directory; give a file as token_file (--token-file) that exists and "
        "that this process may read"
    )


def test_commands_that_call_no_server_need_no_certificate(certificates: Pool, tmp_path: Path) -> None:
    """KVPOOL_TLS may name a directory that `kvpool certs` is about to make."""
    ran = run_command(KVPOOL, "certs", "show", str(certificates.pki), KVPOOL_TLS=str(tmp_path / "not yet"))
    assert ran.returncode == 0 and "authority" in ran.stdout, ran.stderr


WANTS_CERTIFICATE = "give tls (--tls DIR) with a client's certificate that is valid now, of an authority in"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("no TLS", WANTS_CERTIFICATE),
        ("no certificate", WANTS_CERTIFICATE),
        ("ended", WANTS_CERTIFICATE),
        ("not yet", WANTS_CERTIFICATE),
        ("a server's", WANTS_CERTIFICATE),
        ("another authority's", WANTS_CERTIFICATE),
        ("another authority", "the server's certificate is not of an authority in the ca of tls"),
    ],
)
def test_a_refused_handshake_says_what_is_wrong(certificates: Pool, tmp_path: Path, fault: str, told: str) -> None:
    engine = files_in(certificates.authority.issue_principal(ENGINE))
    foreign = files_in(Authority.create(tmp_path / "foreign").issue_principal(ENGINE))

    def forged(starts_in: dt.timedelta, ends_in: dt.timedelta) -> TlsFiles:
        return forge(certificates.pki, tmp_path / "forged", [str(ENGINE)], starts_in=starts_in, ends_in=ends_in)

    files = {
        "no TLS": lambda: None,
        "no certificate": lambda: TlsFiles(engine.ca),
        "ended": lambda: forged(-2 * DAY, -DAY),
        "not yet": lambda: forged(DAY, 2 * DAY),
        "a server's": lambda: files_in(certificates.pki / "server"),
        "another authority's": lambda: TlsFiles(engine.ca, foreign.cert, foreign.key),
        "another authority": lambda: foreign,
    }[fault]()
    config = ClientConfig(certificates.server.endpoint, tls=files, timeout_ms=10_000)
    with Client(config) as client, pytest.raises(UnavailableError, match=re.escape(told)):
        client.admin.ping()


@pytest.mark.parametrize("name", ["", "kvpool.svc"])
def test_a_server_with_a_certificate_for_another_host_says_so(certificates: Pool, name: str) -> None:
    files = files_in(certificates.pki / "server")  # It names 127.0.0.1.
    pair = Path(files.key).read_bytes(), Path(files.cert).read_bytes()
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.2:0", grpc.ssl_server_credentials([pair]))
    server.start()
    config = ClientConfig(f"127.0.0.2:{port}", tls=TlsFiles(files.ca), server_name=name, timeout_ms=10_000)
    try:
        with Client(config) as client, pytest.raises(UnavailableError, match=r"does not name the host .*--host HOST"):
            client.admin.ping()
    finally:
        server.stop(None)


def test_a_server_without_tls_says_that_it_speaks_none_in_one_line(
    shared_server: ServerProcess, certificates: Pool
) -> None:
    command = (KVPOOL, "--tls", str(certificates.operator), "ping", "--endpoint", shared_server.endpoint)
    (told,) = run_command(*command).stderr.splitlines()  # gRPC's own lines do not reach the terminal.
    assert "does not speak TLS: leave out tls" in told


@pytest.mark.parametrize("fault", ["ended", "not there"])
def test_doctor_tells_why_a_server_cannot_be_reached(certificates: Pool, tmp_path: Path, fault: str) -> None:
    endpoint, directory = certificates.server.endpoint, certificates.operator
    if fault == "ended":
        directory = tmp_path / "forged"
        forge(certificates.pki, directory, [str(OPERATOR)], starts_in=-2 * DAY, ends_in=-DAY)
    else:
        endpoint = free_endpoint()
    done = run(["--tls", directory, "doctor", "--endpoint", endpoint, "--json"])
    findings = {each["check"]: each for each in json.loads(done.output)["findings"]}
    errors = [name for name, each in findings.items() if each["level"] == "error"]
    assert errors == ["gRPC", f"certificate {directory / 'tls.crt'}"][: 1 + (fault == "ended")]
    assert ("runs" in findings["gRPC"]["fix"]) is (fault == "not there")
    assert f"certificate {directory / 'ca.crt'}" in findings and "memlock" in findings


def test_ping_names_the_role_that_a_measurement_needs_and_why_no_memory_is_shared(certificates: Pool) -> None:
    engine = certificates.authority.issue_principal(ENGINE)
    told = refusal(certificates.run("--tls", engine, "ping", "--bandwidth"))
    assert told.startswith(f"{ENGINE} may not call Stats: its role is") and "the call needs operator" in told
    done = certificates.run("--tls", certificates.operator, "ping", "--bandwidth", "--mib", "1")
    assert done.exit_code == 0 and "GB/s" in done.output, done.output
    told = certificates.run("--tls", certificates.operator, "ping").output
    assert "by tcp over the data port" in told and ": no shm: kvpool-server at" in told
    assert "use transport=tcp" not in told
