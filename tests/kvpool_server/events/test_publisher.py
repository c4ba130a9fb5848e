"""Real servers on loopback, and whoever listens to them."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvpool.client.client import Client, Namespace
from kvpool.client.events import Subscriber
from kvpool.protocol.types import ShardRange
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.events.ledger import Ledger
from kvpool_server.events.messages import Encoder, History
from kvpool_server.events.publisher import MAX_REPLAYS, Publisher
from tests.support.events import Known, Listener, follow, low_64_bits
from tests.support.processes import ServerProcess, run_command, run_server, wait_for
from tests.support.values import block_hash, group_spec, namespace_spec, payload, run_of

StartServer = Callable[..., ServerProcess]
Connect = Callable[..., Client]
KVPOOL = str(Path(sys.executable).with_name("kvpool"))
ANYWHERE = "tcp://127.0.0.1:0"
Watch = Callable[..., tuple[ServerProcess, Client, Listener]]
BOTH = ("--kv-events", ANYWHERE, "--kv-events-replay", ANYWHERE, "--log-format", "json")


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


@pytest.fixture
def watch(pool_server: StartServer, connect: Connect, listen: Callable[..., Listener]) -> Watch:
    """Starts a server with further flags, a client, and a listener to its events."""

    def make(*flags: str) -> tuple[ServerProcess, Client, Listener]:
        server = pool_server(*BOTH, *flags)
        return server, connect(server), listen(*_endpoints(server))

    return make


def _known(namespace: Namespace, *names: str, group_idx: int = 0) -> set[Known]:
    label = f"{namespace.fingerprint.hex()}@{namespace.spec.model}"
    return {(label, group_idx, low_64_bits(block_hash(name))) for name in names}


def _put(client: Client, namespace: Namespace, *names: str, parent: str | None = None) -> None:
    client.put_blocks(namespace, run_of(*names, parent=parent), [payload(name, 1_000) for name in names])


def test_a_subscriber_knows_what_the_server_holds(watch: Watch, listen: Callable[..., Listener]) -> None:
    server, client, listener = watch()
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


def test_a_server_that_drains_draws_nobody(watch: Watch, listen: Callable[..., Listener]) -> None:
    server, client, listener = watch("--drain-ms", "60000")
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=1_000)))
    _put(client, namespace, "a")
    listener.wait_for(_known(namespace, "a"))
    grant = client.rpc.put_start(namespace, [run_of("late")], ShardRange(0, 1))
    client.admin.drain()
    listener.wait_for(())
    late = listen(*_endpoints(server))
    client.rpc.put_end(grant.ticket_id, [0])
    assert server.wait() == 0
    late.wait_for(())
    assert not listener.view.blocks


def test_a_block_is_told_of_when_its_last_shard_is_there(watch: Watch) -> None:
    _, client, listener = watch()
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=500, num_shards=2), salt="halves"))
    for shard in (0, 1):
        listener.wait_for(())
        grant = client.rpc.put_start(namespace, [run_of("a", "b", parent="z")], ShardRange(shard, 1))
        for _ in range(3):
            listener.listen()
        assert not listener.view.blocks
        client.rpc.put_end(grant.ticket_id, [0, 0])
    listener.wait_for(_known(namespace, "a", "b"))
    (event,) = listener.messages[-1].events
    assert event == {
        "type": "BlockStored",
        "block_hashes": [low_64_bits(block_hash(name)) for name in "ab"],
        "parent_block_hash": low_64_bits(block_hash("z")),
        "token_ids": [],
        "block_size": 16,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "locality": "LOCAL",
    }


def test_eviction_and_corruption_are_told(watch: Watch) -> None:
    _, client, listener = watch("--memory", "1MiB", "--policy", "lru")
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=256 << 10)))
    for name in "abcd":
        client.put_blocks(namespace, run_of(name), [payload(name, 256 << 10)])
    listener.wait_for(_known(namespace, *"abcd"))
    client.put_blocks(namespace, run_of("e"), [payload("e", 256 << 10)])
    listener.wait_for(_known(namespace, *"bcde"))
    client.admin.remove(namespace, [run_of("e")])
    grant = client.rpc.put_start(namespace, [run_of("f")], ShardRange(0, 1))
    client.rpc.put_end(grant.ticket_id, [1])
    listener.wait_for(_known(namespace, *"bcdf"))
    assert client.admin.verify(namespace, [run_of("f")]) == (1, 1)
    listener.wait_for(_known(namespace, *"bcd"))


def test_what_one_call_changes_is_few_messages(watch: Watch) -> None:
    _, client, listener = watch()
    listener.wait_for(())
    while len(listener.messages) < 1:
        listener.listen()
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=100)))
    names = [f"block {nth}" for nth in range(500)]
    client.put_blocks(namespace, run_of(*names), [payload(name, 100) for name in names])
    listener.wait_for(_known(namespace, *names))
    # One for each turn of the event loop that the call takes. Its turns are of a millisecond, in which a busy machine
    # may do little; without turns there would be a message for each block.
    assert 1 <= len(listener.messages[1:]) <= len(names) // 10
    assert {len(message.events) for message in listener.messages[1:]} == {1}


def test_a_restart_is_noticed(
    pool_server: StartServer, connect: Connect, listen: Callable[..., Listener], tmp_path: Path
) -> None:
    flags = ("--kv-events", f"ipc://{tmp_path}/events", "--kv-events-replay", f"ipc://{tmp_path}/replay")
    first = pool_server(*flags)
    client, listener = connect(first), listen(flags[1], flags[3])
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=1_000), salt="restart"))
    _put(client, namespace, "a", "b")
    listener.wait_for(_known(namespace, "a", "b"))
    first.kill()
    second = pool_server(*flags)
    client = connect(second)
    again = client.open_namespace(namespace_spec(group_spec(chunk_bytes=1_000), salt="restart"))
    _put(client, again, "c")
    listener.wait_for(_known(namespace, "c"))


def test_events_are_counted(watch: Watch) -> None:
    _, client, listener = watch()
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=1_000)))
    _put(client, namespace, "a")
    listener.wait_for(_known(namespace, "a"))
    # A snapshot may be ahead of the stream.
    wait_for(lambda: client.admin.stats().counters["kv_event_batches"] == 2, "both messages")
    counted = client.admin.stats().counters
    assert counted["kv_events"] == 2
    assert counted["kv_event_replays"] >= counted["kv_event_snapshots"] >= 1
    assert counted.get("dropped_kv_event_batches", 0) == 0


def test_without_the_flag_nothing_is_published(shared_server: ServerProcess, tcp_client: Client) -> None:
    namespace = tcp_client.open_namespace(namespace_spec(group_spec(chunk_bytes=1_000)))
    _put(tcp_client, namespace, "a")
    assert "publishing KV events" not in shared_server.stderr
    assert not any(count for name, count in tcp_client.admin.stats().counters.items() if "kv_event" in name)


def test_a_port_that_is_taken_ends_the_server_with_one_sentence(pool_server: StartServer) -> None:
    taken = _endpoints(pool_server(*BOTH))[0]
    done = run_server("--kv-events", taken, "--listen", "127.0.0.1:0", "--http-listen", "")
    assert done.returncode == 2
    assert f"cannot listen on {taken} for KV events" in done.stderr and "give --kv-events" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_prints_what_is_published(pool_server: StartServer, connect: Connect) -> None:
    server = pool_server(*BOTH)
    endpoint, replay = _endpoints(server)
    client = connect(server)
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=1_000)))
    _put(client, namespace, "a")
    done = follow(2, KVPOOL, "events", endpoint, "--replay", replay)
    assert done.returncode == 0 and done.stderr.startswith("kvpool: following ") and done.stderr.count("\n") == 1
    cleared, stored = (json.loads(line) for line in done.stdout.splitlines())
    assert cleared["events"] == [{"type": "AllBlocksCleared"}]
    assert stored["topic"] == f"kv@{namespace.fingerprint.hex()}@{namespace.spec.model}"
    assert stored["events"][0]["block_hashes"] == [low_64_bits(block_hash("a"))]


def test_the_command_names_a_bad_endpoint() -> None:
    done = run_command(KVPOOL, "events", "localhost")
    assert done.returncode == 2 and "cannot subscribe to 'localhost'" in done.stderr


class Bench:
    """A publisher without a server; blocks come and go by hand."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.ledger = Ledger(lambda flush: None, self.counters, first_seq=100, batch_blocks=10)
        self.publisher = Publisher(
            self.ledger, History(self.ledger, Encoder(), self.counters, 1_000), ANYWHERE, ANYWHERE
        )
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


def test_a_snapshot_comes_in_bounded_messages(bench: Bench) -> None:
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


def test_a_replay_is_what_was_published(bench: Bench) -> None:
    for name in "abc":
        bench.store(name)
    wait_for(lambda: bench.counters["kv_event_batches"] == 4, "the stream")
    with Subscriber(bench.publisher.endpoint, bench.publisher.replay_endpoint) as subscriber:
        assert [message.seq for message in subscriber.replay(102)] == [102, 103]
        assert subscriber.replay(104) == []
        assert subscriber.replay(99)[0].events == [{"type": "AllBlocksCleared"}]
    assert bench.counters["kv_event_snapshots"] == 1


def test_a_number_from_the_future_is_answered_with_a_snapshot(bench: Bench) -> None:
    bench.store("a")
    wait_for(lambda: bench.counters["kv_event_batches"] == 2, "the stream")
    with Subscriber(bench.publisher.endpoint, bench.publisher.replay_endpoint) as subscriber:
        subscriber._last_seq = 5_000
        assert [len(message.events) for message in subscriber.replay(5_001)] == [1, 1]
        assert subscriber._last_seq == 101


def test_a_malformed_request_harms_nobody(bench: Bench) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(bench.publisher.replay_endpoint)
        for frames in ([b"", b"short"], [b"no empty frame"], [b"", bytes(8), b"more"]):
            dealer.send_multipart(frames)
        assert not dealer.poll(100)
    with Subscriber(bench.publisher.endpoint, bench.publisher.replay_endpoint) as subscriber:
        assert subscriber.replay(0)


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
            for event in json.loads(json.dumps(_payload(subscriber)))[1]:
                heard += event.get("block_hashes", [])  # The stream may begin with AllBlocksCleared.
    assert low_64_bits(block_hash("last")) in heard
    assert "kvpool-events" not in [thread.name for thread in threading.enumerate()]


def _payload(subscriber: Subscriber) -> Any:
    import msgspec

    return msgspec.msgpack.decode(subscriber._sub.recv_multipart()[2])


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
