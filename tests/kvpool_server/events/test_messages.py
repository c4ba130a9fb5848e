"""What goes over the wire, and that vLLM's own decoder reads it; what is kept for replay, and what is left out.

`tests/simulation/test_events_machine.py` proves what a subscriber gets that joins late, or misses some of it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from kvpool_server.cache.entry import Entry, Group
from kvpool_server.events import messages as messages_module
from kvpool_server.events.ledger import Change, ChangeBatch, Ledger, SnapshotLostError, split
from kvpool_server.events.messages import Encoder, History
from tests.support.events import decoded, low_64_bits
from tests.support.values import block_hash, group_spec

FULL = Group(group_spec(), 0, "ab12@some/model")
WINDOW = Group(group_spec(kind="sliding_window", block_tokens=32, window_tokens=1_024), 1, "ab12@some/model")
OTHER = Group(group_spec(), 0, "cd34@other@model")


def _stored(group: Group, name: str, parent: str | None = None) -> Change:
    return Change(True, group, block_hash(name), b"" if parent is None else block_hash(parent))


def _removed(group: Group, name: str) -> Change:
    return Change(False, group, block_hash(name), b"")


def _short(name: str) -> int:
    return low_64_bits(block_hash(name))


CHANGES = [
    _stored(FULL, "a"),
    _stored(FULL, "b", "a"),
    _stored(FULL, "d", "c"),
    _stored(WINDOW, "b", "a"),
    _removed(FULL, "b"),
    _removed(FULL, "a"),
    _removed(WINDOW, "b"),
]


def _events(changes: list[Change], encoder: Encoder | None = None, *, cleared: bool = False) -> list[dict[str, Any]]:
    message, num_events = (encoder or Encoder())(ChangeBatch(7, 1.5, changes, cleared))
    ts, events, rank = msgspec.msgpack.decode(message.payload)
    assert (ts, rank, num_events) == (1.5, 0, len(events))
    return events


def test_blocks_that_follow_each_other_share_an_event() -> None:
    events = _events(CHANGES)
    assert [(event["type"], event["group_idx"], len(event["block_hashes"])) for event in events] == [
        ("BlockStored", 0, 2),
        ("BlockStored", 0, 1),
        ("BlockStored", 1, 1),
        ("BlockRemoved", 0, 2),
        ("BlockRemoved", 1, 1),
    ]
    assert [event["parent_block_hash"] for event in events[:3]] == [None, _short("c"), _short("a")]
    assert events[0]["block_hashes"] == [_short("a"), _short("b")]


def test_a_block_that_comes_and_goes_in_one_turn_does_so_in_order() -> None:
    changes = [_stored(FULL, "a"), _removed(FULL, "a"), _stored(FULL, "a")]
    assert [event["type"] for event in _events(changes)] == ["BlockStored", "BlockRemoved", "BlockStored"]


def test_topics_name_the_namespace_and_clearing_is_about_all() -> None:
    encoder = Encoder(topic="pool")
    assert encoder(ChangeBatch(1, 0.0, [_stored(OTHER, "a")]))[0].topic == b"pool@cd34@other@model"
    assert encoder(ChangeBatch(1, 0.0, [], cleared=True))[0].topic == b"pool@@"
    assert _events([], cleared=True) == [{"type": "AllBlocksCleared"}]
    assert _events([]) == []


def test_changes_are_cut_by_namespace_and_size_and_stay_in_order() -> None:
    changes = [_stored(FULL, "a"), _stored(WINDOW, "a"), _stored(FULL, "b"), _stored(OTHER, "a"), _removed(FULL, "a")]
    assert split(changes, 2) == [changes[:2], changes[2:3], changes[3:4], changes[4:]]
    assert split([], 2) == []


@pytest.mark.vllm
@pytest.mark.parametrize("full_hashes", [False, True])
def test_vllm_decodes_what_it_would_have_encoded(full_hashes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import kv_events
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(not full_hashes)))

    def name(of: str) -> int | bytes:
        return maybe_convert_block_hash(block_hash(of))  # type: ignore[arg-type]

    def stored(hashes: list[str], parent: str | None, **fields: Any) -> kv_events.BlockStored:
        return kv_events.BlockStored(
            block_hashes=[name(each) for each in hashes],
            parent_block_hash=None if parent is None else name(parent),
            token_ids=[],
            lora_id=None,
            medium=kv_events.MEDIUM_CPU,
            lora_name=None,
            locality="LOCAL",
            **fields,
        )

    def removed(hashes: list[str], group_idx: int) -> kv_events.BlockRemoved:
        return kv_events.BlockRemoved(
            block_hashes=[name(each) for each in hashes], medium="CPU", group_idx=group_idx, locality="LOCAL"
        )

    full: dict[str, Any] = {"block_size": 16, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    window: dict[str, Any] = {"block_size": 32, "group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    expected = kv_events.KVEventBatch(
        ts=1.5,
        events=[
            kv_events.AllBlocksCleared(),
            stored(["a", "b"], None, **full),
            stored(["d"], "c", **full),
            stored(["b"], "a", kv_cache_spec_sliding_window=1_024, **window),
            removed(["b", "a"], 0),
            removed(["b"], 1),
        ],
        data_parallel_rank=0,
    )
    payload = Encoder(full_hashes=full_hashes)(ChangeBatch(7, 1.5, CHANGES, cleared=True))[0].payload
    found = msgspec.msgpack.Decoder(kv_events.KVEventBatch).decode(payload)
    assert found == expected
    assert payload == msgspec.msgpack.encode(expected)
    assert hash(found.events[1]) != hash(stored(["a", "b"], None, **{**full, "group_idx": None}))


# What is kept


class Bench:
    def __init__(self) -> None:
        counters = Counter[str]()
        self.ledger = Ledger(lambda flush: None, counters, first_seq=100)
        self.history = History(self.ledger, Encoder(), counters, max_batches=100)

    def turn(self, *stored: object) -> None:
        for name in stored:
            self.ledger.stored([Entry(FULL, block_hash(name), None, 0, 0)])
        self.ledger.flush()

    def published(self) -> list[int]:
        return [message.seq for message in self.history.publish()]


def test_a_server_begins_with_nothing() -> None:
    (message,) = Bench().history.publish()
    assert decoded(message).events == [{"type": "AllBlocksCleared"}] and decoded(message).topic == "kv@@"


def test_numbers_begin_beyond_those_of_any_server_before() -> None:
    first, second = (Ledger(lambda flush: None, Counter()) for _ in range(2))
    assert 1_700_000_000 * 10**6 < first.last_seq() < second.last_seq() < 1 << 53


def test_what_is_kept_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages_module, "MAX_BYTES", 1_000)
    bench = Bench()
    for name in range(20):
        bench.turn(name)
        bench.published()
    kept = bench.history._kept
    assert 1 < len(kept) < 20 and kept[-1].seq == 120
    assert bench.history._kept_bytes == sum(len(message.payload) for message in kept) <= 1_000


def test_a_server_that_drains_holds_nothing_for_its_subscribers() -> None:
    bench = Bench()
    bench.turn("a")
    snapshot = bench.ledger.snapshot()
    assert next(snapshot) is not None
    bench.turn("b")  # Waits for the snapshot's reader.
    bench.ledger.stored([Entry(FULL, block_hash("c"), None, 0, 0)])
    bench.ledger.withdraw()
    bench.turn("d")
    bench.ledger.removed(Entry(FULL, block_hash("a"), None, 0, 0))
    bench.ledger.flush()
    *told, last = [decoded(message) for message in bench.history.publish()]
    assert len(told) == 4 and last.events == [{"type": "AllBlocksCleared"}]
    with pytest.raises(SnapshotLostError, match="the server drains"):
        list(snapshot)
    assert [batch for batch in bench.ledger.snapshot() if batch is None or batch.changes] == []
    bench.ledger.withdraw()
    assert bench.published() == []
