"""The journal of a file tier, after whatever has happened to it."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from kvpool_server.cache.entry import Record
from kvpool_server.tiers.file import frames
from kvpool_server.tiers.file.disk import Disk
from kvpool_server.tiers.file.journal import Inventory, Journal
from tests.contracts.tier_contract import TierContract
from tests.support.tier_directories import open_directory
from tests.support.values import block_hash

SPEC = TierContract.spec
GROUP = (SPEC.fingerprint(), 0)


def _records(count: int) -> list[Record]:
    return [Record(block_hash(nth), b"", nth * 4096, [nth, nth]) for nth in range(count)]


def test_a_namespace_without_blocks_outlives_compaction() -> None:
    """Who appends has told of it, and does not tell again: blocks that follow would be lost at the next start."""
    before = Inventory()
    before.apply(frames.encode_head(1 << 20) + frames.encode_namespace(SPEC))
    after = Inventory()
    after.apply(b"".join(before.encode()) + frames.encode_stored(GROUP, _records(1)))
    assert after.specs == {GROUP[0]: SPEC} and len(after) == 1


def test_no_frame_is_larger_than_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 1 << 16)
    monkeypatch.setattr(frames, "RECORDS_A_FRAME", 512)
    records = _records(10_000)
    inventory = Inventory()
    text = frames.encode_head(1 << 20) + frames.encode_namespace(SPEC) + frames.encode_stored(GROUP, records)
    assert inventory.apply(text) == len(text) and len(inventory) == 10_000
    text = frames.encode_removed(range(0, 10_000 * 4096, 4096))
    assert inventory.apply(text) == len(text) and len(inventory) == 0
    with pytest.raises(AssertionError):
        frames.encode_frame(frames.REMOVED, bytes((1 << 16) + 8))


def _stored(fingerprint: bytes, group_idx: int, num_shards: int) -> bytes:
    """The beginning of a frame of blocks."""
    return fingerprint + struct.pack("<II", group_idx, num_shards)


INVALID = {
    "namespace": frames.encode_frame(frames.NAMESPACE, b"{"),
    "head": frames.encode_frame(frames.HEAD, b"short"),
    "version": frames.encode_head(1, frames.FORMAT_VERSION + 1),
    "blocks": frames.encode_frame(frames.STORED, b"short"),
    "part of a block": frames.encode_frame(frames.STORED, _stored(*GROUP, 1) + b"short"),
    "no checksums": frames.encode_frame(frames.STORED, _stored(*GROUP, 0)),
    "too many checksums": frames.encode_frame(frames.STORED, _stored(*GROUP, 3)),
    "no such group": frames.encode_frame(frames.STORED, _stored(GROUP[0], 9, 2)),
    "offsets": frames.encode_frame(frames.REMOVED, b"short"),
}


@pytest.mark.parametrize("what", sorted(INVALID))
def test_a_journal_ends_at_an_invalid_frame(tmp_path: Path, what: str) -> None:
    sound = frames.encode_head(1 << 20) + frames.encode_namespace(SPEC) + frames.encode_stored(GROUP, _records(2))
    (tmp_path / "journal").write_bytes(sound + INVALID[what] + frames.encode_removed([0]))
    own = Journal(open_directory(tmp_path), Disk())
    inventory = own.load()
    assert len(inventory) == 2 and inventory.nbytes == len(sound) and not inventory.is_exact
    assert inventory.trouble
    own.begin(inventory)
    own.close()
    again = Journal(open_directory(tmp_path), Disk()).load()
    assert len(again) == 2 and again.is_exact


def test_an_append_succeeds_though_the_compaction_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_server.tiers.file.journal.COMPACT_AT_LEAST_BYTES", 4096)

    class Full(Disk):
        tries = 0

        def write(self, fd: int, views: object, offset: int) -> None:
            if (tmp_path / "journal.new").exists() and (tmp_path / "journal").exists():
                self.tries += 1
                raise OSError(28, "No space left on device")
            super().write(fd, views, offset)  # type: ignore[arg-type]

    disk = Full()
    own = Journal(open_directory(tmp_path), disk)
    own.begin(own.load())
    removal = frames.encode_removed(range(16))
    for _ in range(200):
        own.append(removal)
    written = (tmp_path / "journal").stat().st_size
    assert written > 200 * len(removal), "an append is missing"
    assert 1 <= disk.tries <= written // 4096, "tried again each time"
    assert not (tmp_path / "journal.new").exists()
    own.close()
