"""What is kept, and what is left out."""

from __future__ import annotations

from collections import Counter

import pytest

from kvpool_server.cache.entry import Entry, Group
from kvpool_server.events import history as history_module
from kvpool_server.events.encoder import Encoder
from kvpool_server.events.history import History
from kvpool_server.events.ledger import Ledger, SnapshotLostError
from tests.support.events import decoded
from tests.support.values import block_hash, group_spec

GROUP = Group(group_spec(), 0, "ns@model")


class Bench:
    def __init__(self, max_batches: int = 100, **sizes: int):
        self.counters: Counter[str] = Counter()
        self.deferred: list[object] = []
        self.ledger = Ledger(self.deferred.append, self.counters, 100, **sizes)
        self.history = History(self.ledger, Encoder(), self.counters, max_batches)

    def turn(self, *stored: object) -> None:
        for name in stored:
            self.ledger.stored(Entry(GROUP, block_hash(name), None, 0, 0))
        self.ledger.flush()

    def published(self) -> list[int]:
        return [message.seq for message in self.history.publish()]

    def answer(self, start_seq: int) -> list[int]:
        return [message.seq for message in self.history.answer(start_seq)]


def test_a_turn_is_ended_once() -> None:
    bench = Bench()
    bench.turn("a", "b", "c")
    assert bench.deferred == [bench.ledger.flush]
    bench.turn("d")
    assert len(bench.deferred) == 2
    assert bench.published() == [100, 101, 102]


def test_a_server_begins_with_nothing() -> None:
    (message,) = Bench().history.publish()
    assert decoded(message).events == [{"type": "AllBlocksCleared"}] and decoded(message).topic == "kv@@"


def test_numbers_begin_beyond_those_of_any_server_before() -> None:
    first, second = (Ledger(lambda flush: None, Counter()) for _ in range(2))
    assert 1_700_000_000 * 10**6 < first.last_seq() < second.last_seq() < 1 << 53


def test_what_is_kept_is_replayed_and_what_is_older_becomes_a_snapshot() -> None:
    bench = Bench(max_batches=3)
    for name in range(5):
        bench.turn(name)
    assert bench.published() == [100, 101, 102, 103, 104, 105]
    assert bench.answer(103) == [103, 104, 105]
    assert bench.answer(106) == []
    assert bench.answer(102) == [104, 105]  # Clearing, and everything in one batch.
    assert bench.counters["kv_event_snapshots"] == 1


def test_what_is_kept_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MAX_BYTES", 1_000)
    bench = Bench()
    for name in range(20):
        bench.turn(name)
        bench.published()
    kept = bench.history._kept
    assert 1 < len(kept) < 20 and kept[-1].seq == 120
    assert bench.history._kept_bytes == sum(len(message.payload) for message in kept) <= 1_000


def test_what_does_not_fit_shows_as_a_gap_and_is_in_the_snapshot() -> None:
    bench = Bench(max_queued_blocks=4, batch_blocks=2)
    assert bench.published() == [100]
    bench.turn(*"abcdef")
    assert bench.counters["dropped_kv_event_batches"] == 1
    assert bench.published() == [101, 102, 108]  # 103 is left out; 104 to 107 are a snapshot's, 108 shows the gap.
    assert bench.answer(103) == [105, 106, 107, 108]
    assert bench.answer(108) == [108]
    bench.turn("g")
    assert bench.published() == [109]


def test_after_a_gap_nothing_before_it_is_replayed() -> None:
    bench = Bench(max_queued_blocks=1)
    bench.turn("a")
    bench.turn("b")
    bench.published()
    messages = [decoded(message) for message in bench.history.answer(100)]
    assert messages[0].events == [{"type": "AllBlocksCleared"}]
    assert [len(event["block_hashes"]) for event in messages[1].events] == [1, 1]


def test_a_server_that_drains_holds_nothing_for_its_subscribers() -> None:
    bench = Bench()
    bench.turn("a")
    snapshot = bench.ledger.snapshot()
    assert next(snapshot) is not None
    bench.turn("b")  # Waits for the snapshot's reader.
    bench.ledger.stored(Entry(GROUP, block_hash("c"), None, 0, 0))
    bench.ledger.withdraw()
    bench.turn("d")
    bench.ledger.removed(Entry(GROUP, block_hash("a"), None, 0, 0))
    bench.ledger.flush()
    *told, last = [decoded(message) for message in bench.history.publish()]
    assert len(told) == 4 and last.events == [{"type": "AllBlocksCleared"}]
    with pytest.raises(SnapshotLostError, match="the server drains"):
        list(snapshot)
    assert [batch for batch in bench.ledger.snapshot() if batch is None or batch.changes] == []
    bench.ledger.withdraw()
    assert bench.published() == []
