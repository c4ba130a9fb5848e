from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.commands.credentials import name_key as app
from kvpool.protocol.errors import ConfigError, InvalidRequestError
from kvpool.protocol.namespace import differences
from kvpool.protocol.types import HASH_BYTES, BlockRun, in_parts
from kvpool.security.name_key import NAMES_PER_TURN, NameKey, check_key, named_by
from tests.support.values import namespace_spec, run_of

KEY, OTHER = NameKey(bytes(range(32))), NameKey(bytes(32))

hashes = st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES)
runs = st.builds(BlockRun, st.integers(0, 3), st.lists(hashes, min_size=1, max_size=12), st.just(b"") | hashes)


def blocks(parts: list[BlockRun]) -> list[tuple[int, bytes, bytes]]:
    """Group, name and parent's name of each block."""
    return [
        (run.group_idx, name, parent)
        for run in parts
        for name, parent in zip(run.block_hashes, [run.parent_hash, *run.block_hashes], strict=False)
    ]


@given(hashes)
def test_a_name_is_a_keyed_hash(block_hash: bytes) -> None:
    assert KEY.name(block_hash) == hashlib.blake2b(block_hash, key=bytes(range(32)), digest_size=32).digest()
    assert KEY.name(block_hash) != OTHER.name(block_hash)


@given(runs)
def test_names_keep_groups_order_and_parents(run: BlockRun) -> None:
    named = KEY.run(run)
    expected = [(idx, KEY.name(name), KEY.name(parent) if parent else b"") for idx, name, parent in blocks([run])]
    assert blocks([named]) == expected


def test_a_long_run_is_named_as_its_parts_are() -> None:
    whole = run_of(*range(2 * NAMES_PER_TURN + 1), parent="parent")
    assert blocks([KEY.run(whole)]) == blocks([KEY.run(part) for (part,) in in_parts([whole], 100)])


@given(st.permutations([("a", "1"), ("b", "2"), ("name_key", "ff")]), st.booleans())
def test_a_spec_names_its_key_once(extra: list[tuple[str, str]], has_key: bool) -> None:
    spec = namespace_spec(extra=tuple(extra))
    key = KEY if has_key else None
    named = named_by(spec, key)
    assert dict(named.extra) == {"a": "1", "b": "2"} | ({"name_key": KEY.digest} if has_key else {})
    assert named_by(named, key) == named
    check_key(named, key)
    with pytest.raises(InvalidRequestError, match="this client has"):
        check_key(spec, key)


def test_a_namespace_says_which_key_differs() -> None:
    spec = namespace_spec()
    mine, theirs = named_by(spec, KEY), named_by(spec, OTHER)
    assert len({each.fingerprint() for each in (spec, mine, theirs)}) == 3
    (difference,) = differences(mine, theirs)
    assert str(difference) == f"extra['name_key']: {KEY.digest!r} here, {OTHER.digest!r} there"
    assert named_by(mine, None).fingerprint() == spec.fingerprint()


def test_a_file_has_the_key_in_hexadecimal_or_base64_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "name.key"
    file.touch(0o600)
    key = bytes(range(32))
    for text in (key.hex(), key.hex().upper(), base64.b64encode(key).decode()):
        for end in ("", "\n"):
            file.write_text(text + end)
            assert NameKey.read(file).digest == KEY.digest
    short, two_lines = base64.b64encode(bytes(16)).decode(), "00" * 16 + "\n" + "00" * 16
    for text in ("", "00" * 31, "00" * 33, "zz" * 32, short, "\xff" * 64, two_lines):
        file.write_text(text)
        told = r"name\.key holds no key of 32 bytes .* `kvpool name-key create FILE`"
        with pytest.raises(ConfigError, match=told) as raised:
            Client(ClientConfig("127.0.0.1:1", name_key_file=str(file)))
        assert not text or text not in str(raised.value)


def test_a_file_is_private_and_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "name.key"
    NameKey.create(file)
    before = file.read_text()
    with pytest.raises(ConfigError, match="File exists; give the path of a new file"):
        NameKey.create(file)
    assert file.read_text() == before and before.strip() not in repr(NameKey.read(file))
    for mode in (0o604, 0o620, 0o666):
        file.chmod(mode)
        with pytest.raises(ConfigError, match=rf"others can read .*name\.key \(mode {mode:04o}\); give it mode 0600"):
            NameKey.read(file)


def test_the_command_makes_a_new_key_each_time_and_shows_its_digest_alone(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a.key", "b.key")]
    made = [CliRunner().invoke(app, ["create", file], catch_exceptions=False).output for file in files]
    shown = [CliRunner().invoke(app, ["show", file], catch_exceptions=False).output.strip() for file in files]
    assert len(set(shown)) == 2
    for file, output, digest in zip(files, made, shown, strict=True):
        assert digest == NameKey.read(Path(file)).digest and digest in output
        assert Path(file).read_text().strip() not in output
        assert Path(file).stat().st_mode & 0o777 == 0o600
