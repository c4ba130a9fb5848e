"""Bearer tokens: what they prove, what they do not, and where they are never sent."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvpool import tokens
from kvpool.certificates import Authority
from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.errors import ConfigError, InvalidRequestError, KVPoolError, PermissionDeniedError, UnauthenticatedError
from kvpool.principal import ALL_TENANTS, Principal, Role
from kvpool.tls import TlsFiles
from kvpool.token_command import app
from kvpool.tokens import TokenRecord, append_record, create_token, parse_lifetime, read_records, read_token
from kvpool.v1 import pool_pb2 as pb
from kvpool.v1.pool_pb2_grpc import PoolStub
from kvpool.watched_files import LOOK_EVERY_S, WatchedFiles
from tests.support.certificates import files_in
from tests.support.processes import ServerProcess, wait_for
from tests.support.values import namespace_spec, payload, run_of

ENGINE = Principal("acme", Role.ENGINE_WRITE)
DAY = dt.timedelta(days=1)


def test_a_token_is_a_certificates_equal(pool_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "pki")
    files = files_in(authority.issue_server([]))
    known, mine = tmp_path / "tokens", tmp_path / "token"
    token, record = create_token(ENGINE, DAY)
    append_record(known, record)
    operator, operator_record = create_token(Principal(ALL_TENANTS, Role.OPERATOR), DAY)
    append_record(known, operator_record)
    ended, ended_record = create_token(ENGINE, -DAY)
    append_record(known, ended_record)
    for path, text in ((mine, ""), (tmp_path / "operator", operator)):
        path.touch(0o600)
        path.write_text(text)
    tls = TlsFiles(files.ca)

    def config(file: Path, **fields: object) -> ClientConfig:
        return ClientConfig(server.endpoint, tls=tls, token_file=str(file), timeout_ms=10_000, **fields)  # type: ignore[arg-type]

    server = pool_server(
        "--tls-cert", files.cert, "--tls-key", files.key, "--tokens", str(known),
        tls=tls, token_file=str(tmp_path / "operator"),
    )  # fmt: skip
    mine.write_text(f"{token}\n")
    with Client(config(mine)) as client:
        namespace = client.open_namespace(namespace_spec(tenant="acme"))
        client.put_blocks(namespace, run_of("block"), [payload("block", 256)])
        assert client.lookup(namespace, [run_of("block")]).hits[0].num_leading == 1
        with pytest.raises(PermissionDeniedError, match="may not call Stats"):
            client.admin.stats()
        with pytest.raises(PermissionDeniedError, match="give tenant 'acme'"):
            client.open_namespace(namespace_spec(tenant="umbra"))
    for wrong, told in (
        (ended, f"token ended at {ended_record.ends_at:%Y-%m-%d}"),
        (create_token(ENGINE, DAY)[0], "unknown"),
    ):
        mine.write_text(wrong)
        with Client(config(mine)) as client, pytest.raises(UnauthenticatedError, match=told):
            client.admin.ping()
    credentials = grpc.ssl_channel_credentials(Path(files.ca).read_bytes())
    with grpc.secure_channel(server.endpoint, credentials) as channel:
        ping = PoolStub(channel).Ping  # type: ignore[no-untyped-call]
        one = ("authorization", f"Bearer {token}")
        for metadata in ((), (one, one), (("authorization", token),), (("authorization", "Basic eA=="),)):
            with pytest.raises(grpc.RpcError) as raised:
                ping(pb.PingRequest(), metadata=metadata, timeout=10)
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert token not in raised.value.details()
        assert ping(pb.PingRequest(), metadata=(one,), timeout=10).version
    assert token not in server.stderr and token not in server.stdout
    # A token that is taken out of the file stops working.
    known.write_text(operator_record.line())
    mine.write_text(token)

    def is_out() -> bool:
        with Client(config(mine)) as client:
            try:
                client.admin.ping()
            except UnauthenticatedError:
                return True
        return False

    wait_for(is_out, "the token to be refused", LOOK_EVERY_S + 5)
    # What the server does not take, or what has nobody's token, it says in its log.
    known.write_text("no record\n")
    os.kill(server.pid, signal.SIGHUP)
    wait_for(lambda: "new files cannot be used" in server.stderr, "a file that cannot be used")
    known.write_text("# nobody's\n")
    os.kill(server.pid, signal.SIGHUP)
    wait_for(lambda: "has no token, so nobody can call" in server.stderr, "an empty file")
    (line,) = (line for line in server.stderr.splitlines() if "new files cannot be used" in line)
    assert re.match(r"\d{4}-\d\d-\d\dT\S+ \[warning", line), "neither time nor level"


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    known = tmp_path / "tokens"
    append_record(known, create_token(ENGINE, DAY)[1])
    known.chmod(mode)
    with pytest.raises(ConfigError, match=f"written by its group or others .mode {mode:04o}.*; chmod go-w"):
        read_records(known)
    known.chmod(0o644)
    assert len(read_records(known)) == 1


def test_a_token_is_not_sent_in_clear(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without tls"):
        Client(ClientConfig(token_file=str(tmp_path / "token")))


def test_a_new_token_is_used_without_a_new_client(tmp_path: Path) -> None:
    file, now = tmp_path / "token", [0.0]
    file.touch(0o600)
    first, second = (create_token(ENGINE, DAY)[0] for _ in range(2))
    file.write_text(first)
    watched = WatchedFiles([str(file)], lambda: read_token(file), lambda: now[0])
    file.write_text("half of a tok")
    now[0] += LOOK_EVERY_S
    assert (watched.look(), watched.value) == (0, first), "what cannot be used leaves the old one in force"
    file.write_text(second + "\n")
    assert watched.look() == 0, "not looked at yet"
    now[0] += LOOK_EVERY_S
    assert (watched.look(), watched.value) == (1, second)
    file.unlink()
    now[0] += LOOK_EVERY_S
    assert (watched.look(), watched.value) == (1, second)


def test_the_command_prints_a_token_once_and_stores_its_digest(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    options = ["--tenant", "acme", "--role", "engine-write", "--expires", "90d", "--file", str(file)]
    done = CliRunner().invoke(app, ["create", *options], catch_exceptions=False)
    token = done.stdout.strip()
    assert token.startswith(tokens.PREFIX) and token not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    (record,) = read_records(file).values()
    assert record.digest == tokens.digest_of(token) and record.principal == ENGINE
    assert dt.timedelta(days=89) < record.ends_at - dt.datetime.now(dt.UTC) <= dt.timedelta(days=90)


def test_a_token_in_a_file_is_its_owners_alone(tmp_path: Path) -> None:
    file, out = tmp_path / "tokens", tmp_path / "token"
    options = ["create", "--role", "operator", "--file", str(file), "--out", str(out)]
    out.write_text("an older one")
    done = CliRunner().invoke(app, options, catch_exceptions=False)
    assert done.stdout == "" and out.stat().st_mode & 0o777 == 0o600
    assert read_records(file).keys() == {tokens.digest_of(read_token(out))}
    for mode in (0o644, 0o620, 0o602):
        out.chmod(mode)
        with pytest.raises(ConfigError, match=f"others can read the token .*{mode:04o}"):
            read_token(out)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--role", "engine-read"], "give --tenant"),
        (["--role", "operator", "--tenant", "acme"], "role operator belongs to no tenant; leave out --tenant"),
        (["--role", "engine-read", "--tenant", "a b"], "tenant 'a b'"),
        (["--role", "operator", "--expires", "soon"], "'soon' is not a lifetime"),
        (["--role", "operator", "--expires", "0d"], "'0d' is not a lifetime"),
    ],
)
def test_what_the_command_refuses(tmp_path: Path, options: list[str], told: str) -> None:
    done = CliRunner().invoke(app, ["create", *options, "--file", str(tmp_path / "tokens")])
    assert isinstance(done.exception, KVPoolError)
    assert told in str(done.exception)
    assert not (tmp_path / "tokens").exists()


@given(st.dictionaries(st.sampled_from(["sha256", "principal", "ends_at", "more"]), st.text(max_size=70)))
def test_a_line_is_a_record_or_refused(fields: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="sha256"):
        TokenRecord.parse(json.dumps({**fields, "sha256": fields.get("sha256", "")[:63]}))


@pytest.mark.parametrize("text", ["[]", "7", "{}", "not JSON", '{"sha256": "x", "principal": "y", "ends_at": "z"}'])
def test_a_file_with_a_wrong_line_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokens").write_text(f"# tokens\n{create_token(ENGINE, DAY)[1].line()}{text}\n")
    with pytest.raises(ConfigError, match="tokens, line 3: "):
        read_records(tmp_path / "tokens")


@pytest.mark.parametrize("text", ["", "x", "90", "1y", "-1d", "99999d"])
def test_a_lifetime_that_is_none(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not a lifetime"):
        parse_lifetime(text)
