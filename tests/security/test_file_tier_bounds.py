"""Journals and directories of any length and content, which somebody else has written: no crash, bounded memory."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
from structlog.testing import capture_logs

from kvpool_server.cache.entry import Record
from kvpool_server.tiers.file import journal, peer_directories
from kvpool_server.tiers.file.journal import Inventory
from kvpool_server.tiers.file.peer_directories import PeerDirectories
from tests.contracts.tier_contract import SHARDS, TierContract, awaited, blocks_of, namespace_of, opened
from tests.support.effort import effort
from tests.support.file_tier import file_tier
from tests.support.integrity import check_integrity
from tests.support.tier_directories import peers_in
from tests.support.values import block_hash, group_spec, namespace_spec

SPEC = TierContract.spec
GROUP = (SPEC.fingerprint(), 0)
HEAD = journal.encode_head(2 << 20)
NAMED = HEAD + journal.encode_namespace(SPEC)
MIB = 1 << 20


def _records(count: int, start: int = 0) -> list[Record]:
    return [Record(block_hash(nth), b"", nth * 4096, [nth] * SHARDS) for nth in range(start, start + count)]


def _stored(count: int, start: int = 0) -> bytes:
    return journal.encode_stored(GROUP, _records(count, start))


def _peer(root: Path, name: str, text: bytes) -> Path:
    (root / name).mkdir(mode=0o700)
    path = root / name / "journal"
    path.write_bytes(text)
    return path


def _num_found(peers: PeerDirectories, count: int, start: int = 0) -> int:
    return sum(peers.find(GROUP, block_hash(nth)) is not None for nth in range(start, start + count))


@awaited
async def _open(root: Path) -> int:
    """Starts and stops a server on the directory "own"; how many blocks it has restored."""
    async with opened(file_tier(root, "own", threads=1)) as tier:
        check_integrity(tier.pool)
        return tier.stats().num_entries


def _num_read(root: Path, text: bytes, count: int) -> tuple[int, int]:
    """How many of some blocks a server has from a peer's journal with this text, and how many from its own."""
    for name in ("own", "peer"):
        _peer(root, name, text)
    peers = peers_in(root)
    peers.refresh()
    num_found = _num_found(peers, count)
    peers.close()
    return num_found, _open(root)


@contextmanager
def _memory_below(nbytes: int) -> Iterator[None]:
    """At no moment more of Python's memory than that is taken beside what was taken before."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] - before < nbytes
    finally:
        tracemalloc.stop()


# Length


@pytest.mark.timeout(60)
def test_a_journal_of_a_tebibyte_costs_no_more_than_what_it_lists(tmp_path: Path) -> None:
    for name in ("own", "peer"):
        os.truncate(_peer(tmp_path, name, NAMED + _stored(10)), 1 << 40)
    with _memory_below(16 * MIB):
        peers = peers_in(tmp_path)
        for _ in range(5):
            peers.refresh()
        assert _num_found(peers, 20) == 10
        peers.close()
        assert _open(tmp_path) == 10
    assert (tmp_path / "own" / "journal").stat().st_size < MIB, "the server's own journal is written anew"


def test_nothing_is_read_behind_the_longest_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = NAMED + _stored(10)
    monkeypatch.setattr(journal, "MAX_JOURNAL_BYTES", len(text))
    assert _num_read(tmp_path, text + _stored(10, 10), 20) == (10, 10)


def test_blocks_of_peers_take_bounded_memory_together_and_the_log_says_so_once(tmp_path: Path) -> None:
    for nth in range(4):
        text = b"".join(_stored(100, start) for start in range(1000 * nth, 1000 * nth + 1000, 100))
        _peer(tmp_path, f"peer-{nth}", NAMED + text)
    with _memory_below(2 * MIB), capture_logs() as logs:
        peers = peers_in(tmp_path, max_memory_bytes=MIB)
        for _ in range(5):
            peers.refresh()
    assert 1000 <= _num_found(peers, 4000) < 2000
    assert [line["event"] for line in logs].count("a peer's directory cannot be read") <= 4
    assert "JournalTooLargeError" in logs[0]["error"]
    others = _num_found(peers, 3000, 1000)
    (tmp_path / "peer-0" / "journal").write_bytes(HEAD)  # Its memory goes to the others.
    for _ in range(2 * peer_directories.MAX_SKIPPED_REFRESHES):
        peers.refresh()
    assert not _num_found(peers, 1000) and _num_found(peers, 3000, 1000) > others
    peers.close()


@pytest.mark.parametrize("what", ["namespaces", "groups", "long specs"])
def test_whatever_a_journal_lists_counts(what: str) -> None:
    inventory = Inventory(MIB)
    for nth in range(20_000):
        spec = namespace_spec(group_spec(num_shards=SHARDS), salt=f"{nth}")
        if what == "long specs":
            spec = namespace_spec(group_spec(layer_names=("a", "b") * 5_000), salt=f"{nth}")
        text = journal.encode_namespace(spec)
        if what == "groups":
            text += journal.encode_stored((spec.fingerprint(), 0), _records(1))
        if nth:
            if inventory.apply(text) < len(text):
                break
            continue
        tracemalloc.start()
        assert inventory.apply(text)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert inventory.trouble and taken < 1.2 * MIB


@awaited
async def test_a_namespace_that_no_reader_accepts_is_not_written(tmp_path: Path) -> None:
    long = namespace_of(namespace_spec(group_spec(layer_names=("a" * 1000,) * 2000)))
    async with opened(file_tier(tmp_path)) as tier:
        for nth in range(2):
            assert await tier.write(long.groups[0], blocks_of("a")) == 0 and tier.counters["refused_blocks"] == nth + 1
    assert (tmp_path / "one" / "journal").stat().st_size < 4096


# Number


def test_directories_beyond_the_bound_are_ignored_and_known_peers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_directories, "MAX_PEERS", 5)
    monkeypatch.setattr(peer_directories, "MAX_ENTRIES", 50)
    _peer(tmp_path, "honest", NAMED + _stored(1))
    peers = peers_in(tmp_path)
    peers.refresh()
    for nth in range(500):
        _peer(tmp_path, f"a-{nth:03}", NAMED + _stored(1, 1 + nth))
    with capture_logs() as logs:
        for _ in range(3):
            peers.refresh()
    assert len(peers) == 5 and _num_found(peers, 1) == 1
    (said,) = logs
    assert said["directory"] == str(tmp_path) and "the others are ignored" in said["error"]
    peers.close()


def test_looking_for_peers_does_not_take_memory_for_what_else_lies_there(tmp_path: Path) -> None:
    for nth in range(20_000):
        (tmp_path / f"file-{nth}").touch()
    peers = peers_in(tmp_path)
    with _memory_below(MIB), capture_logs() as logs:
        peers.refresh()
    assert len(peers) == 0
    (said,) = logs
    assert "it has more than 4096 entries" in said["error"]
    peers.close()


@awaited
async def test_long_journals_are_read_in_turns_with_heartbeats_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_directories, "REFRESH_BYTES", 1)
    monkeypatch.setattr(journal, "READ_BYTES", 16 << 10)
    monkeypatch.setattr(journal, "RECORDS_A_FRAME", 64)
    for nth in range(3):
        _peer(tmp_path, f"peer-{nth}", NAMED + _stored(1000, 1000 * nth))
    peers = peers_in(tmp_path)
    counts = []
    for _ in range(100):
        has_more = peers.refresh()
        counts.append([_num_found(peers, 1000, 1000 * nth) for nth in range(3)])
        if not has_more:
            break
    assert counts[-1] == [1000] * 3 and len(counts) > 10
    assert all(max(each) - min(each) < 300 for each in counts[3:]), "one of them waits for the others"
    peers.close()
    tier = file_tier(tmp_path, "own", threads=1)
    heartbeats: list[int] = []
    really = tier._own.send_heartbeat
    monkeypatch.setattr(tier._own, "send_heartbeat", lambda: (heartbeats.append(1), really())[1])
    async with opened(tier):
        while not all(tier.known(namespace_of(SPEC).groups[0], [block_hash(nth) for nth in (999, 1999, 2999)])):
            await tier.refresh()
        assert len(heartbeats) > 10


@pytest.mark.parametrize("has_room", [True, False])
def test_a_long_journal_that_is_replaced_serves_until_the_new_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    """Without memory for both, the old one serves until the memory is used up, and the rest is read then."""
    monkeypatch.setattr(journal, "RECORDS_A_FRAME", 64)
    text = NAMED + _stored(1000)
    path = _peer(tmp_path, "peer", text)
    peers = peers_in(tmp_path, max_memory_bytes=4 * MIB if has_room else MIB)
    assert not peers.refresh() and _num_found(peers, 1000) == 1000
    monkeypatch.setattr(peer_directories, "REFRESH_BYTES", 1)
    monkeypatch.setattr(journal, "READ_BYTES", 16 << 10)
    path.with_name("journal.new").write_bytes(NAMED + _stored(900, 100) + _stored(100, 1000))
    path.with_name("journal.new").replace(path)
    counts = []
    while peers.refresh():
        counts.append(_num_found(peers, 1100))
    assert len(counts) > 3 and set(counts[:3]) == {1000}
    assert not has_room or set(counts) == {1000}
    for _ in range(2 * peer_directories.MAX_SKIPPED_REFRESHES):
        peers.refresh()
    assert _num_found(peers, 1100) == 1000 and _num_found(peers, 1000, 100) == 1000
    peers.close()


# Content

HUGE = (1 << 32) - 1
FOREIGN: dict[str, bytes] = {
    "a frame of 4 GiB": struct.pack("<8sIIQ", b"kvptier\n", journal.STORED, HUGE, 0) + bytes(64),
    "a frame above the bound": struct.pack("<8sIIQ", b"kvptier\n", journal.STORED, journal.MAX_FRAME_BYTES + 1, 0),
    "4 billion checksums": journal.encode_frame(journal.STORED, GROUP[0] + struct.pack("<II", 0, HUGE) + bytes(72)),
    "group 4 billion": journal.encode_frame(journal.STORED, GROUP[0] + struct.pack("<II", HUGE, SHARDS) + bytes(88)),
    "an unnamed namespace": journal.encode_stored((bytes(32), 0), _records(1)),
    "a group of 2^60 shards": journal.encode_namespace(namespace_spec(group_spec(num_shards=1 << 60))),
    "an extent of 2^63 bytes": journal.encode_head(1 << 63),
    "no JSON": journal.encode_frame(journal.NAMESPACE, b"{"),
    "another version": journal.encode_head(1, journal.FORMAT_VERSION + 1),
    "no such group": journal.encode_frame(journal.STORED, GROUP[0] + struct.pack("<II", 9, SHARDS)),
    "half a frame": journal.encode_removed([0])[:-1],
    "a wrong checksum": journal.encode_removed([4096])[:-8] + bytes(8),
}


@pytest.mark.parametrize("what", sorted(FOREIGN))
def test_a_journal_ends_at_a_frame_that_is_invalid(tmp_path: Path, what: str) -> None:
    with _memory_below(8 * MIB):
        assert _num_read(tmp_path, NAMED + _stored(2) + FOREIGN[what] + _stored(2, 2), 4) == (2, 2)
        assert _open(tmp_path) == 2, "what the first start has made of it is another journal"


@pytest.mark.parametrize("extent_bytes", [1, 4096, (2 << 20) + 1, (1 << 63) - 1])
def test_the_servers_own_journal_cannot_make_its_extents_small_or_large(tmp_path: Path, extent_bytes: int) -> None:
    text = journal.encode_head(extent_bytes) + journal.encode_namespace(SPEC) + _stored(2)
    _peer(tmp_path, "own", text)
    with _memory_below(8 * MIB):
        assert _open(tmp_path) == 0


@pytest.mark.parametrize("offset", [(1 << 64) - 1, 1 << 63, 1 << 40, 5])
def test_a_block_at_an_offset_that_no_file_has_is_a_miss(tmp_path: Path, offset: int) -> None:
    record = Record(block_hash(0), b"", offset, [0] * SHARDS)
    for name in ("own", "peer"):
        _peer(tmp_path, name, NAMED + journal.encode_stored(GROUP, [record]))
    peers = peers_in(tmp_path)
    peers.refresh()
    found = peers.find(GROUP, block_hash(0))
    assert found is not None and not found[0].extents.read(offset, [memoryview(bytearray(4096))])
    peers.close()
    assert _open(tmp_path) == 0


# Fuzzed


def _frame(dice: Random) -> bytes:
    kind = dice.choice([journal.HEAD, journal.NAMESPACE, journal.REMOVED, *[journal.STORED] * 3, 0, HUGE])
    sound = {
        journal.HEAD: HEAD,
        journal.NAMESPACE: journal.encode_namespace(SPEC),
        journal.STORED: _stored(dice.randrange(4), dice.randrange(4)),
        journal.REMOVED: journal.encode_removed(range(0, 4096 * dice.randrange(5), 4096)),
    }
    payload = bytearray(sound.get(kind, b"")[24:])
    for _ in range(dice.choice([0, 0, 0, 1, 3])):
        if (at := dice.randrange(201)) < len(payload):
            payload[at] = dice.choice([0, 1, 0x7F, 0x80, 0xFF])
    return journal.encode_frame(kind, bytes(payload[: len(payload) - dice.choice([0, 0, 0, 1, 3])]))


def _journal(dice: Random) -> bytes:
    """Frames with valid checksums and any content, between frames that are sound, then bytes of any kind."""
    text = NAMED if dice.random() < 0.8 else HEAD
    for _ in range(dice.randrange(5)):
        text += _frame(dice)
    return text + dice.randbytes(dice.choice([0, 1, 8, 24, dice.randrange(41)]))


def _check(inventory: Inventory, text: bytes) -> None:
    """Applied in pieces of any size, a journal gives the same; what it lists can be written and read again."""
    count = sum(len(records) for records in inventory.groups.values())
    assert count == len(inventory) and 0 <= inventory.nbytes <= len(text)
    assert inventory.memory_bytes >= count * journal.RECORD_BYTES
    if inventory.extent_bytes:
        again = Inventory()
        assert again.apply(b"".join(inventory.encode())) and again.is_exact and again.specs == inventory.specs
        assert len(again) == count


def test_no_journal_breaks_its_reader() -> None:
    for seed in range(effort(1_000)):
        text, inventory = _journal(Random(seed)), Inventory(16 * MIB)
        try:
            inventory.apply(text)
            _check(inventory, text)
        except Exception as error:
            raise AssertionError(f"journal {seed}: {error!r}") from error


def test_no_journal_breaks_a_server(tmp_path: Path) -> None:
    random = Random(7)
    sound = NAMED + _stored(3) + journal.encode_removed([4096]) + _stored(2, 5)
    for nth in range(effort(100)):
        text = bytearray(sound)
        for _ in range(random.randint(1, 3)):
            at = random.randrange(len(text))
            text[at : at + random.choice([0, 1, 8])] = random.randbytes(random.choice([0, 1, 8]))
        for name in ("own", "peer"):
            directory = tmp_path / name
            directory.mkdir(mode=0o700, exist_ok=True)
            (directory / "journal").write_bytes(text)
        assert 0 <= _open(tmp_path) <= 4, f"journal {nth}: {text.hex()}"
