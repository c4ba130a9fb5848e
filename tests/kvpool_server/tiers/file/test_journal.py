"""The journal of a file tier: what it says after whatever has happened to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool_server.cache.entry import Record
from kvpool_server.tiers.file import journal
from kvpool_server.tiers.file.disk import Disk
from kvpool_server.tiers.file.journal import Inventory, Journal
from tests.contracts.tier_contract import TierContract
from tests.support.values import block_hash

SPEC = TierContract.spec
GROUP = (SPEC.fingerprint(), 0)


def _records(count: int) -> list[Record]:
    return [Record(block_hash(nth), b"", nth * 4096, [nth, nth]) for nth in range(count)]


def test_a_namespace_without_blocks_outlives_compaction() -> None:
    """Who appends has told of it, and does not tell again: blocks that follow would be lost at the next start."""
    before = Inventory()
    before.apply(journal.head(1 << 20) + journal.opened(SPEC))
    after = Inventory()
    after.apply(b"".join(before.encode()) + journal.stored(GROUP, _records(1)))
    assert after.specs == {GROUP[0]: SPEC} and len(after) == 1


def test_no_frame_is_larger_than_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_FRAME_BYTES", 1 << 16)
    monkeypatch.setattr(journal, "RECORDS_A_FRAME", 512)
    records = _records(10_000)
    inventory = Inventory()
    text = journal.head(1 << 20) + journal.opened(SPEC) + journal.stored(GROUP, records)
    assert inventory.apply(text) == len(text) and len(inventory) == 10_000
    text = journal.removed(range(0, 10_000 * 4096, 4096))
    assert inventory.apply(text) == len(text) and len(inventory) == 0
    with pytest.raises(AssertionError):
        journal._frame(journal.REMOVED, bytes((1 << 16) + 8))


def test_as_many_removals_as_there_may_be_can_be_read() -> None:
    offsets = range(0, (journal.MAX_FRAME_BYTES // 8 + 1) * 8, 8)
    text = journal.removed(offsets)
    assert Inventory().apply(text) == len(text)


NONSENSE = {
    "namespace": journal._frame(journal.NAMESPACE, b"{"),
    "head": journal._frame(journal.HEAD, b"short"),
    "version": journal._frame(journal.HEAD, journal._HEAD.pack(journal.FORMAT_VERSION + 1, 1)),
    "blocks": journal._frame(journal.STORED, b"short"),
    "part of a block": journal._frame(journal.STORED, journal._STORED.pack(*GROUP, 1) + b"short"),
    "no checksums": journal._frame(journal.STORED, journal._STORED.pack(*GROUP, 0)),
    "too many checksums": journal._frame(journal.STORED, journal._STORED.pack(*GROUP, 3)),
    "no such group": journal._frame(journal.STORED, journal._STORED.pack(GROUP[0], 9, 2)),
    "offsets": journal._frame(journal.REMOVED, b"short"),
}


@pytest.mark.parametrize("what", sorted(NONSENSE))
def test_a_journal_ends_at_a_frame_that_makes_no_sense(tmp_path: Path, what: str) -> None:
    sound = journal.head(1 << 20) + journal.opened(SPEC) + journal.stored(GROUP, _records(2))
    (tmp_path / "journal").write_bytes(sound + NONSENSE[what] + journal.removed([0]))
    own = Journal(tmp_path, Disk())
    inventory = own.load()
    assert len(inventory) == 2 and inventory.nbytes == len(sound) and not inventory.is_exact
    assert inventory.trouble
    own.begin(inventory)
    own.close()
    again = Journal(tmp_path, Disk()).load()
    assert len(again) == 2 and again.is_exact


def test_a_compaction_that_fails_is_not_the_appends_failure(tmp_path: Path) -> None:
    class Full(Disk):
        tries = 0

        def write(self, fd: int, views: object, offset: int) -> None:
            if (tmp_path / "journal.new").exists() and (tmp_path / "journal").exists():
                self.tries += 1
                raise OSError(28, "No space left on device")
            super().write(fd, views, offset)  # type: ignore[arg-type]

    disk = Full()
    own = Journal(tmp_path, disk)
    own.COMPACT_AT_LEAST = 4096  # type: ignore[misc]
    own.begin(own.load())
    frames = journal.removed(range(16))
    for _ in range(200):
        own.append(frames)
    written = (tmp_path / "journal").stat().st_size
    assert written > 200 * len(frames), "an append is missing"
    assert 1 <= disk.tries <= written // 4096, "tried again each time"
    assert not (tmp_path / "journal.new").exists()
    own.close()
