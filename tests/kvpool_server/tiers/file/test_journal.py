"""The journal of a file tier, after whatever has happened to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool_server.cache.entry import Record
from kvpool_server.tiers.file import journal
from kvpool_server.tiers.file.extents import Disk
from kvpool_server.tiers.file.journal import Inventory
from kvpool_server.tiers.file.own_blocks import Journal
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
    before.apply(journal.encode_head(1 << 20) + journal.encode_namespace(SPEC))
    after = Inventory()
    after.apply(b"".join(before.encode()) + journal.encode_stored(GROUP, _records(1)))
    assert after.specs == {GROUP[0]: SPEC} and len(after) == 1


def test_no_frame_is_larger_than_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_FRAME_BYTES", 1 << 16)
    monkeypatch.setattr(journal, "RECORDS_A_FRAME", 512)
    records = _records(10_000)
    inventory = Inventory()
    text = journal.encode_head(1 << 20) + journal.encode_namespace(SPEC) + journal.encode_stored(GROUP, records)
    assert inventory.apply(text) == len(text) and len(inventory) == 10_000
    text = journal.encode_removed(range(0, 10_000 * 4096, 4096))
    assert inventory.apply(text) == len(text) and len(inventory) == 0
    with pytest.raises(AssertionError):
        journal.encode_frame(journal.REMOVED, bytes((1 << 16) + 8))


def test_an_append_succeeds_though_the_compaction_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_server.tiers.file.own_blocks.COMPACT_AT_LEAST_BYTES", 4096)

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
    removal = journal.encode_removed(range(16))
    for _ in range(200):
        own.append(removal)
    written = (tmp_path / "journal").stat().st_size
    assert written > 200 * len(removal), "an append is missing"
    assert 1 <= disk.tries <= written // 4096, "tried again each time"
    assert not (tmp_path / "journal.new").exists()
    own.close()
