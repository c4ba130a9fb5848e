"""CURVE keys of KV events: their files, and the list of subscribers."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import zmq.auth
from typer.testing import CliRunner, Result

from kvpool.commands.credentials import certs as app
from kvpool.protocol.errors import ConfigError, InvalidRequestError
from kvpool.security.curve import append_subscriber, create_pair, read_pair, read_public, read_subscribers


def test_a_pair_is_what_pyzmq_reads(tmp_path: Path) -> None:
    pair = create_pair(tmp_path / "keys" / "acme")
    secret_file, public_file = (tmp_path / "keys" / f"acme.key{suffix}" for suffix in ("_secret", ""))
    assert zmq.auth.load_certificate(secret_file) == (pair.public, pair.secret)
    assert zmq.auth.load_certificate(public_file) == (pair.public, None)
    assert read_pair(secret_file) == pair
    assert read_public(secret_file) == read_public(public_file) == pair.public
    assert stat.S_IMODE(secret_file.stat().st_mode) == 0o600
    assert pair.secret.decode() not in repr(pair) + public_file.read_text()


def test_a_pair_is_neither_overwritten_nor_read_where_others_can_or_where_it_is_none(tmp_path: Path) -> None:
    create_pair(tmp_path / "a")
    create_pair(tmp_path / "b")
    path = tmp_path / "a.key_secret"
    good, other = path.read_text(), (tmp_path / "b.key_secret").read_text()
    mixed = good.splitlines()[:3] + other.splitlines()[3:]
    with pytest.raises(ConfigError, match=r"a\.key_secret: File exists"):
        create_pair(tmp_path / "a")
    assert path.read_text() == good
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read the private key"):
        read_pair(path)
    path.chmod(0o600)
    for text, told in (
        ("", "holds no CURVE key"),
        ((tmp_path / "a.key").read_text(), "holds no secret key"),
        ("\n".join(mixed), "holds no CURVE key pair"),
        (good.replace('secret-key = "', 'secret-key = "~'), "holds no CURVE key pair"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=told):
            read_pair(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_pair(tmp_path / "missing")
    path.write_text('public-key = "' + "#" * 40 + '"')
    with pytest.raises(ConfigError, match="holds no CURVE public key"):
        read_public(path)


def test_the_list_says_whose_events_a_key_may_see(tmp_path: Path) -> None:
    acme, operator = (create_pair(tmp_path / name).public for name in ("acme", "operator"))
    path = tmp_path / "subscribers"
    path.write_text(f"# routers\n\nacme {acme.decode()}")  # An editor may leave the last line without an end.
    append_subscriber(path, "_", operator)
    assert read_subscribers(path) == {acme: "acme", operator: "_"}
    with pytest.raises(InvalidRequestError, match="cannot be in a SPIFFE ID"):
        append_subscriber(path, "a b", acme)


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    key = create_pair(tmp_path / "a").public.decode()
    path = tmp_path / "subscribers"
    for line, told in (
        (f"a/b {key}", "cannot be in a SPIFFE ID"),
        (f"acme {key[:-1]}", "with a key of 40 characters"),
        (f"acme {key} more", "with a key of 40 characters"),
        (f"acme {'#' * 40}", "with a key of 40 characters"),
        ("acme é", "with a key of 40 characters"),
        (f"umbra {key}", "a key of tenant acme is listed again"),
    ):
        path.write_text(f"acme {key}\n{line}\n")
        with pytest.raises(ConfigError, match=f"line 2: .*{told}"):
            read_subscribers(path)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["events-key", *map(str, arguments)])


def test_the_command_makes_keys_and_lists_them(tmp_path: Path) -> None:
    listed = tmp_path / "subscribers"
    server, acme, operator = (tmp_path / name for name in ("server", "acme", "operator"))
    listing = ("--list", listed)
    for name, *flags in ((server,), (acme, *listing, "--tenant", "acme"), (operator, *listing, "--operator")):
        done = run(name, *flags)
        assert done.exit_code == 0, done.output
        assert read_pair(Path(f"{name}.key_secret")).public.decode() in done.output
    assert sorted(read_subscribers(listed).values()) == ["_", "acme"]


def test_the_command_makes_nothing_where_it_cannot_tell_whose(tmp_path: Path) -> None:
    for flags, told in (
        (["--tenant", "acme"], "give --list"),
        (["--list", "l"], "give either --tenant or --operator"),
        (["--list", "l", "--tenant", "a", "--operator"], "give either --tenant or --operator"),
        (["--list", "l", "--tenant", "a/b"], "cannot be in a SPIFFE ID"),
    ):
        done = run(tmp_path / "key", *flags)
        assert isinstance(done.exception, ConfigError | InvalidRequestError) and told in str(done.exception)
        assert not list(tmp_path.iterdir())
