"""Publishing KV events: what goes over the wire, which vLLM's own decoder reads, and whoever listens to servers.

`tests/simulation/test_events_machine.py` proves what a subscriber gets that joins late, or misses some of it.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvpool.client.client import Client, Namespace
from kvpool.client.events import Subscriber
from kvpool.protocol.types import ShardRange
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.events import messages as messages_module
from kvpool_server.events.ledger import Change, ChangeBatch, Ledger, SnapshotLostError, split
from kvpool_server.events.messages import Encoder, History
from kvpool_server.events.publisher import MAX_REPLAYS, Publisher
from tests.conftest import Connect, StartServer
from tests.support.events import Known, Listener, decoded, follow, low_64_bits
from tests.support.processes import ServerProcess, run_command, wait_for
from tests.support.values import block_hash, group_spec, namespace_spec, payload, run_of

KVPOOL = str(Path(sys.executable).with_name("kvpool"))
ANYWHERE = "tcp://127.0.0.1:0"


def _endpoints(server: ServerProcess) -> tuple[str, str]:
    for line in server.stderr.splitlines():
        if line.startswith("{") and (said := json.loads(line))["event"] == "publishing KV events":
            return said["endpoint"], said["replay"] or ""
    raise AssertionError("the server does not say where it publishes")


@pytest.fixture
def listen() -> Iterator[Callable[..., Listener]]:
    listeners: list[Listener] = []

    def make(endpoint: str, replay_endpoint: str = "") -> Listener:
        listeners.append(Listener(endpoint, replay_endpoint))
        return listeners[-1]

    yield make
    for listener in listeners:
        listener.close()


def _known(namespace: Namespace, *names: str) -> set[Known]:
    label = f"{namespace.fingerprint.hex()}@{namespace.spec.model}"
    return {(label, 0, low_64_bits(block_hash(name))) for name in names}


def _put(client: Client, namespace: Namespace, *names: str) -> None:
    client.put_blocks(namespace, run_of(*names), [payload(name, 1_000) for name in names])


def test_a_subscriber_knows_what_the_server_holds(
    pool_server: StartServer, connect: Connect, listen: Callable[..., Listener]
) -> None:
    server = pool_server(
        "--kv-events", ANYWHERE, "--kv-events-replay", ANYWHERE, "--log-format", "json", "--drain-ms", "60000"
    )
    client, listener = connect(server), listen(*_endpoints(server))
    listener.wait_for(())
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=1_000)))
    other = client.open_namespace(namespace_spec(group_spec(chunk_bytes=1_000), model="other@model"))
    _put(client, namespace, "a", "b")
    _put(client, other, "a")
    listener.wait_for(_known(namespace, "a", "b") | _known(other, "a"))
    late = listen(*_endpoints(server))
    late.wait_for(_known(namespace, "a", "b") | _known(other, "a"))
    client.admin.remove(namespace, [run_of("b")])
    for each in (listener, late):
        each.wait_for(_known(namespace, "a") | _known(other, "a"))
    client.admin.clear(namespace.fingerprint)
    for each in (listener, late):
        each.wait_for(_known(other, "a"))
    counted = client.admin.stats().counters
    assert counted["kv_events"] == 5 and counted["kv_event_batches"] == 5
    assert counted["kv_event_replays"] >= counted["kv_event_snapshots"] >= 1
    assert counted.get("dropped_kv_event_batches", 0) == 0

    endpoint, replay = _endpoints(server)
    done = follow(2, KVPOOL, "events", endpoint, "--replay", replay)
    assert done.returncode == 0 and done.stderr.startswith("kvpool: following ") and done.stderr.count("\n") == 1
    cleared, stored = (json.loads(line) for line in done.stdout.splitlines())
    assert cleared["events"] == [{"type": "AllBlocksCleared"}]
    assert stored["topic"] == f"kv@{other.fingerprint.hex()}@other@model"
    assert stored["events"][0]["block_hashes"] == [low_64_bits(block_hash("a"))]
    done = run_command(KVPOOL, "events", "localhost")
    assert done.returncode == 2 and "cannot subscribe to 'localhost'" in done.stderr

    grant = client.rpc.put_start(namespace, [run_of("late")], ShardRange(0, 1))
    client.admin.drain()  # A server that drains draws nobody.
    listener.wait_for(())
    later = listen(*_endpoints(server))
    client.rpc.put_end(grant.ticket_id, [0])
    assert server.wait() == 0
    later.wait_for(())
    assert not listener.view.blocks


class Bench:
    """A publisher without a server, or its history alone; blocks come and go by hand."""

    def __init__(self, *, is_published: bool = True) -> None:
        self.counters: Counter[str] = Counter()
        self.ledger = Ledger(lambda flush: None, self.counters, first_seq=100, batch_blocks=10)
        self.history = History(self.ledger, Encoder(), self.counters, 1_000)
        if is_published:
            self.publisher = Publisher(self.ledger, self.history, ANYWHERE, ANYWHERE)
        self.group = Group(group_spec(), 0, "ns@model")

    def store(self, *names: object) -> None:
        for name in names:
            self.ledger.stored([Entry(self.group, block_hash(name), None, 0, 0)])
        self.ledger.flush()

    def known(self, *names: object) -> set[Known]:
        return {("ns@model", 0, low_64_bits(block_hash(name))) for name in names}


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.publisher.close()


def test_a_subscriber_without_replay_counts_what_it_misses(bench: Bench, listen: Callable[..., Listener]) -> None:
    listener = listen(bench.publisher.endpoint)

    def heard() -> bool:
        bench.store(len(listener.messages), time.monotonic())
        listener.listen()
        return bool(listener.messages)

    wait_for(heard, "a first message")
    assert listener.subscriber.missed == 0
    bench.ledger._next_seq += 5
    bench.store("last")
    seen = len(listener.messages)
    wait_for(lambda: listener.listen() or listener.subscriber.missed == 5, "the gap")
    assert len(listener.messages) > seen - 1


def test_a_replay_is_what_was_published_or_a_snapshot_in_bounded_messages(bench: Bench) -> None:
    for nth in range(95):
        bench.store(nth)
    wait_for(lambda: bench.counters["kv_event_batches"] == 96, "the stream")
    with Subscriber(bench.publisher.endpoint, bench.publisher.replay_endpoint) as subscriber:
        messages = subscriber.replay(0)
    assert [sum(len(event.get("block_hashes", ())) for event in message.events) for message in messages] == [
        0, *[10] * 9, 5,
    ]  # fmt: skip
    assert messages[-1].seq == bench.ledger.last_seq() == 195
    assert [message.seq for message in messages] == list(range(185, 196))
    with Subscriber(bench.publisher.endpoint, bench.publisher.replay_endpoint) as subscriber:
        assert [message.seq for message in subscriber.replay(194)] == [194, 195]
        assert subscriber.replay(196) == []
        assert subscriber.replay(99)[0].events == [{"type": "AllBlocksCleared"}]
        subscriber._last_seq = 5_000  # Of the server before.
        assert len(subscriber.replay(5_001)) == 11 and subscriber._last_seq == 195
    assert bench.counters["kv_event_snapshots"] == 3


def test_a_client_that_does_not_read_holds_up_nobody(bench: Bench) -> None:
    bench.store(*range(60_000))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.setsockopt(zmq.RCVBUF, 4_096)
        dealer.connect(bench.publisher.replay_endpoint)
        for _ in range(MAX_REPLAYS + 1):
            dealer.send_multipart((b"", bytes(8)))
        wait_for(lambda: bench.counters["kv_event_replays"] > MAX_REPLAYS, "the requests")
        wait_for(lambda: any(replay.unsent for replay in bench.publisher._replays), "the stall")
        listener = Listener(bench.publisher.endpoint, bench.publisher.replay_endpoint)
        listener.wait_for(bench.known(*range(60_000)))
        listener.close()
        assert any(replay.unsent for replay in bench.publisher._replays)


def test_a_snapshot_begins_while_another_replay_waits_for_it(bench: Bench) -> None:
    bench.store("a")
    first = bench.ledger.snapshot()
    next(first)
    bench.store("b")  # Waits to be applied, for the first snapshot is being read.
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(bench.publisher.replay_endpoint)
        dealer.send_multipart((b"", bytes(8)))
        wait_for(lambda: bool(bench.publisher._replays), "the request")
        first.close()
        assert dealer.poll(10_000), "the second snapshot never begins"
    assert not bench.ledger._unapplied


def test_closing_publishes_what_is_left_and_ends_the_thread() -> None:
    bench = Bench()
    with Subscriber(bench.publisher.endpoint, bench.publisher.replay_endpoint) as subscriber:
        subscriber.receive(1_000)
        wait_for(lambda: bench.store(time.monotonic()) or subscriber._sub.poll(10), "the subscription")
        bench.store("last")
        bench.publisher.close()
        bench.publisher.close()
        heard: list[Any] = []
        while low_64_bits(block_hash("last")) not in heard and subscriber._sub.poll(10_000):
            _, events, _ = msgspec.msgpack.decode(subscriber._sub.recv_multipart()[2])
            for event in events:
                heard += event.get("block_hashes", [])  # The stream may begin with AllBlocksCleared.
    assert low_64_bits(block_hash("last")) in heard
    assert "kvpool-events" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.vllm
def test_the_subscriber_follows_vllms_own_publisher(tmp_path: Path) -> None:
    """So what it asks this server, it asks as vLLM's subscribers do."""
    from vllm.distributed.kv_events import BlockRemoved, KVEventBatch, ZmqEventPublisher

    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    publisher = ZmqEventPublisher(0, endpoint, replay, topic="kv@pod@model")
    try:
        for nth in range(3):
            publisher.publish(KVEventBatch(ts=1.0, events=[BlockRemoved(block_hashes=[nth], medium="GPU")]))
        with Subscriber(endpoint, replay) as subscriber:
            heard: list[int] = []
            wait_for(lambda: heard.extend(m.seq for m in subscriber.receive(100)) or heard == [0, 1, 2], "the replay")
    finally:
        publisher.shutdown()


FULL = Group(group_spec(), 0, "ab12@some/model")
WINDOW = Group(group_spec(kind="sliding_window", block_tokens=32, window_tokens=1_024), 1, "ab12@some/model")
OTHER = Group(group_spec(), 0, "cd34@other@model")


def _stored(group: Group, name: str, parent: str | None = None) -> Change:
    return Change(True, group, block_hash(name), b"" if parent is None else block_hash(parent))


def _removed(group: Group, name: str) -> Change:
    return Change(False, group, block_hash(name), b"")


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


def test_changes_are_cut_by_namespace_and_size_and_stay_in_order() -> None:
    encoder = Encoder(topic="pool")
    assert encoder(ChangeBatch(1, 0.0, [_stored(OTHER, "a")]))[0].topic == b"pool@cd34@other@model"
    assert encoder(ChangeBatch(1, 0.0, [], cleared=True))[0].topic == b"pool@@"
    assert _events([], cleared=True) == [{"type": "AllBlocksCleared"}]
    assert _events([]) == []
    changes = [_stored(FULL, "a"), _removed(FULL, "a"), _stored(FULL, "a")]
    assert [event["type"] for event in _events(changes)] == ["BlockStored", "BlockRemoved", "BlockStored"]
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


def test_numbers_begin_beyond_those_of_any_server_before() -> None:
    first, second = (Ledger(lambda flush: None, Counter()) for _ in range(2))
    assert 1_700_000_000 * 10**6 < first.last_seq() < second.last_seq() < 1 << 53


def test_what_is_kept_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages_module, "MAX_BYTES", 1_000)
    bench = Bench(is_published=False)
    for name in range(20):
        bench.store(name)
        list(bench.history.publish())
    kept = bench.history._kept
    assert 1 < len(kept) < 20 and kept[-1].seq == 120
    assert bench.history._kept_bytes == sum(len(message.payload) for message in kept) <= 1_000


def test_a_server_that_drains_holds_nothing_for_its_subscribers() -> None:
    bench = Bench(is_published=False)
    bench.store("a")
    snapshot = bench.ledger.snapshot()
    assert next(snapshot) is not None
    bench.store("b")  # Waits for the snapshot's reader.
    bench.ledger.stored([Entry(bench.group, block_hash("c"), None, 0, 0)])
    bench.ledger.withdraw()
    bench.store("d")
    bench.ledger.removed(Entry(bench.group, block_hash("a"), None, 0, 0))
    bench.ledger.flush()
    first, *told, last = [decoded(message) for message in bench.history.publish()]
    assert first.events == last.events == [{"type": "AllBlocksCleared"}] and first.topic == "kv@@"
    assert len(told) == 3
    with pytest.raises(SnapshotLostError, match="the server drains"):
        list(snapshot)
    assert [batch for batch in bench.ledger.snapshot() if batch is None or batch.changes] == []
    bench.ledger.withdraw()
    assert list(bench.history.publish()) == []
