"""Bearer tokens: what they prove, what they do not, and where they are never sent."""

from __future__ import annotations

import dataclasses
import datetime as dt
import fcntl
import json
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.commands.credentials import token as app
from kvpool.protocol.errors import (
    ConfigError,
    InvalidRequestError,
    KVPoolError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from kvpool.security import files, tokens
from kvpool.security.files import LOOK_EVERY_S, WatchedFiles
from kvpool.security.principal import Principal, Role
from kvpool.security.tokens import (
    TokenRecord,
    append_record,
    create_token,
    parse_lifetime,
    read_records,
    read_token,
    remove_record,
)
from kvpool.v1 import pool_pb2 as pb
from kvpool.v1.pool_pb2_grpc import PoolStub
from tests.support.calls import is_heard
from tests.support.processes import ServerProcess, wait_for
from tests.support.secured_server import SecuredServer
from tests.support.values import namespace_spec, payload, run_of

ENGINE = Principal("acme", Role.ENGINE_WRITE)
DAY = dt.timedelta(days=1)


def test_a_token_is_a_certificates_equal(pool_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    ended, ended_record = create_token(ENGINE, -DAY)
    append_record(tmp_path / "tokens", ended_record)
    secured = SecuredServer(tmp_path, pool_server, proof="tokens")
    server, token, mine = secured.server, secured.tokens[Role.ENGINE_WRITE], secured.token_file(ENGINE)
    mine.write_text(f"{token}\n")
    with secured.client(Role.ENGINE_WRITE) as client:
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
        with secured.client(Role.ENGINE_WRITE) as client, pytest.raises(UnauthenticatedError, match=told):
            client.admin.ping()
    credentials = grpc.ssl_channel_credentials(Path(secured.ca).read_bytes())
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
    secured.token_list.write_text(create_token(ENGINE, DAY)[1].line())
    mine.write_text(token)
    with secured.client(Role.ENGINE_WRITE) as client:
        wait_for(lambda: not is_heard(client), "the token to be refused", LOOK_EVERY_S + 5)
    # What the server does not take, or what has nobody's token, it says in its log.
    secured.token_list.write_text("no record\n")
    os.kill(server.pid, signal.SIGHUP)
    wait_for(lambda: "new files cannot be used" in server.stderr, "a file that cannot be used")
    secured.token_list.write_text("# nobody's\n")
    os.kill(server.pid, signal.SIGHUP)
    wait_for(lambda: "has no token, so nobody can call" in server.stderr, "an empty file")
    (line,) = (line for line in server.stderr.splitlines() if "new files cannot be used" in line)
    assert re.match(r"\d{4}-\d\d-\d\dT\S+ \[warning", line), "neither time nor level"


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
    file, out = tmp_path / "tokens", tmp_path / "token"
    options = ["--tenant", "acme", "--role", "engine-write", "--expires", "90d"]
    token = _run("create", *options, "--file", file).strip()
    assert token.startswith(tokens.PREFIX) and token not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    (record,) = read_records(file).values()
    assert record.digest == tokens.digest_of(token) and record.principal == ENGINE
    assert dt.timedelta(days=89) < record.ends_at - dt.datetime.now(dt.UTC) <= dt.timedelta(days=90)
    out.write_text("an older one")
    assert _run("create", "--role", "operator", "--file", file, "--out", out) == ""
    assert out.stat().st_mode & 0o777 == 0o600
    assert read_records(file).keys() == {record.digest, tokens.digest_of(read_token(out))}
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
        (["--role", "operator", "--expires", "0d"], "'0d' is not a lifetime"),
    ],
)
def test_what_the_command_refuses(tmp_path: Path, options: list[str], told: str) -> None:
    done = CliRunner().invoke(app, ["create", *options, "--file", str(tmp_path / "tokens")])
    assert isinstance(done.exception, KVPoolError)
    assert told in str(done.exception)
    assert not (tmp_path / "tokens").exists()


def _run(*arguments: object) -> str:
    """What `kvpool token` prints."""
    done = CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_the_list_of_tokens_names_each_and_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.touch(0o600)
    assert _run("list", file) == f"no tokens in {file}\n"
    made = _run("create", "--role", "operator", "--expires", "12h", "--file", file).strip()
    ended, unknown = create_token(ENGINE, -DAY)[1], create_token(ENGINE, DAY)[1]
    for record in (ended, dataclasses.replace(unknown, created_at=None)):  # Tokens of earlier releases lack it.
        append_record(file, record)
    listed, digest = _run("list", file), tokens.digest_of(made)
    assert made.removeprefix(tokens.PREFIX) not in listed
    operator, _, first, when_first, second, when_second = listed.splitlines()
    assert operator == f"{digest[:12]}  spiffe://kvpool.local/kvpool/_/operator"
    assert first == f"{ended.digest[:12]}  {ENGINE}" and "; ENDED 2" in when_first and when_first.endswith(" ago")
    assert second.startswith(unknown.digest[:12]) and when_second.startswith("    ends 2")
    rows = json.loads(_run("list", file, "--json"))
    assert [(row["sha256"], row["id"], row["tenant"], row["role"]) for row in rows[:2]] == [
        (digest, digest[:12], None, "operator"),
        (ended.digest, ended.digest[:12], "acme", "engine-write"),
    ]
    lasts = dt.datetime.fromisoformat(rows[0]["ends_at"]) - dt.datetime.fromisoformat(rows[0]["created_at"])
    assert lasts == DAY / 2 and rows[2]["created_at"] is None


def test_a_revoked_token_leaves_the_rest_of_the_file_as_it_was(tmp_path: Path) -> None:
    file, link = tmp_path / "tokens", tmp_path / "link"
    records = [create_token(ENGINE, DAY)[1] for _ in range(3)]
    lines = ["# first\n", records[0].line(), "\n", records[1].line(), "# l\xe4st\n", records[2].line()]
    file.write_text("".join(lines), encoding="latin-1")
    file.chmod(0o640)
    link.symlink_to(file)
    before = file.stat()
    with open(file, "rb") as reader:
        told = _run("revoke", link, records[1].id)
        assert reader.read().decode("latin-1") == "".join(lines), "whoever reads the file reads all of the old one"
    assert told.startswith(f"revoked {records[1].id} of {ENGINE}; ") and "within 10 seconds" in told
    assert file.read_text(encoding="latin-1") == "".join(lines[:3] + lines[4:])
    after = file.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert after.st_ino != before.st_ino and link.is_symlink()
    assert {each.name for each in tmp_path.iterdir()} == {"tokens", "link"}


def test_an_id_that_is_not_one_tokens_revokes_nothing(tmp_path: Path) -> None:
    file, digest = tmp_path / "tokens", "ab" * 32
    for end in ("00", "11"):
        append_record(file, TokenRecord(digest[:-2] + end, ENGINE, dt.datetime.now(dt.UTC) + DAY))
    before = file.read_text()
    for token_id in ("", "0123456789ab", digest[:12]):
        with pytest.raises(InvalidRequestError, match="give the id of one, which"):
            remove_record(file, token_id)
    assert file.read_text() == before


def test_changes_of_a_file_at_once_lose_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A revocation that another one overwrites would bring its token back."""
    monkeypatch.setattr(files, "LOCK_S", 60.0)
    file = tmp_path / "tokens"
    old, new = ([create_token(ENGINE, DAY)[1] for _ in range(20)] for _ in range(2))
    for record in old:
        append_record(file, record)
    with ThreadPoolExecutor(4) as threads:
        done = [threads.submit(remove_record, file, record.id) for record in old]
        done += [threads.submit(append_record, file, record) for record in new]
    assert all(each.exception() is None for each in done)
    assert read_records(file).keys() == {record.digest for record in new}


def test_a_token_is_added_behind_a_line_without_an_end_and_not_to_a_locked_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LOCK_S", 0.2)
    file = tmp_path / "tokens"
    first, second = (create_token(ENGINE, DAY)[1] for _ in range(2))
    file.write_text(first.line().rstrip())
    append_record(file, second)
    assert file.read_text() == first.line() + second.line(), "the last line had no end"
    with open(file) as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=f"another process has locked {file}"):
            append_record(file, create_token(ENGINE, DAY)[1])


GOOD = {"sha256": "ab" * 32, "principal": str(ENGINE), "ends_at": "2027-01-31T12:00:00+00:00"}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("kvpool_secret", "malformed"),
        ("[" * 100_000, "Expected `object`, got `array`"),
        (json.dumps({**GOOD, "role": "operator"}), "unknown field `role`"),
        (json.dumps({**GOOD, "sha256": "kvpool_secret"}), "matching regex"),
        (json.dumps({**GOOD, "principal": "acme"}), "'acme' is not spiffe://"),
        (json.dumps({**GOOD, "ends_at": "2027-01-31T12:00:00"}), "timezone component - at `$.ends_at`"),
    ],
)
def test_a_broken_line_is_named_with_what_to_do(tmp_path: Path, line: str, told: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# first\n{json.dumps(GOOD)}\n{line}\n")
    for command in (["list", file], ["revoke", file, "ab" * 6]):
        done = CliRunner().invoke(app, list(map(str, command)))
        assert isinstance(done.exception, ConfigError)
        message = str(done.exception)
        assert message.startswith(f"{file}, line 3: not a token's sha256, principal and ends_at as JSON: ")
        assert told in message and "kvpool_secret" not in message
        assert message.endswith(
            f"; take the line out, and make another token in its place: kvpool token create --file {file}"
        )
    assert line in file.read_text()


@pytest.mark.parametrize("text", ["", "x", "90", "1y", "-1d", "99999d"])
def test_a_lifetime_that_is_none(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not a lifetime"):
        parse_lifetime(text)
