"""Subscribers that cannot ask for what they missed end with just the blocks that the ledger holds."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool_server.cache.entry import Group
from kvpool_server.events import ledger as ledger_module
from kvpool_server.events import live_stream as live_stream_module
from kvpool_server.events.encoder import Encoder
from kvpool_server.events.history import History, Message
from kvpool_server.events.ledger import Change, Ledger
from kvpool_server.events.live_stream import (
    MAKE_UP_EVERY_S,
    MAKE_UPS,
    MAX_RECEIVED,
    MESSAGES_A_TURN,
    PATIENCE_S,
    STALL_S,
    LiveStream,
)
from kvpool_server.events.publisher import Publisher
from tests.support.clock import FakeClock
from tests.support.events import decoded, low_64_bits
from tests.support.processes import wait_for
from tests.support.values import block_hash, group_spec

ANYWHERE = "tcp://127.0.0.1:0"
EVERY_S = 10.0
GROUP = Group(group_spec(), 0, "ns@model")
Index = dict[int, int | None]
"""name -> parent's name"""
Step = tuple[str, int]


class Reader:
    """An index as llm-d's: what it cannot make sense of it leaves out.

    Attributes:
        num_senseless: events of blocks that it does not know, or knows already.
    """

    def __init__(self) -> None:
        self.index: Index = {}
        self.seqs: list[int] = []
        self.num_clears = 0
        self.num_senseless = 0

    def apply(self, message: Message) -> None:
        self.seqs.append(message.seq)
        for event in decoded(message).events:
            self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.num_clears += 1
            self.index.clear()
        elif event["type"] == "BlockRemoved":
            self.num_senseless += sum(name not in self.index for name in event["block_hashes"])
            for name in event["block_hashes"]:
                self.index.pop(name, None)
        else:
            parent = event["parent_block_hash"]
            for name in event["block_hashes"]:
                self.num_senseless += name in self.index or (parent is not None and parent not in self.index)
                if parent is None or parent in self.index:
                    self.index[name] = parent
                parent = name


class FakePub:
    """An XPUB whose subscribers begin to receive with their subscription, and have room for some messages."""

    def __init__(self) -> None:
        self.readers: list[Reader] = []
        self.received: deque[bytes] = deque()
        self.room = 1 << 30
        self.is_patient = True
        self.is_left_out = False
        self.num_dropped = 0

    def subscribe(self) -> Reader:
        self.readers.append(Reader())
        self.received.append(b"\1kv@")
        return self.readers[-1]

    def recv(self, flags: int) -> bytes:
        if not self.received:
            raise zmq.Again
        return self.received.popleft()

    def setsockopt(self, option: int, value: int) -> None:
        assert option == zmq.XPUB_NODROP
        self.is_patient = bool(value)

    def send_multipart(self, frames: tuple[bytes, bytes, bytes], flags: int = 0) -> None:
        if not self.room:
            if self.is_patient and not self.is_left_out:
                raise zmq.Again
            self.is_left_out = True  # As ZeroMQ leaves out a subscriber until it has room again.
            self.num_dropped += 1
            return
        self.is_left_out = False
        self.room -= 1
        for reader in self.readers:
            reader.apply(Message(frames[0], int.from_bytes(frames[1], "big"), frames[2]))


class Bench:
    """A stream without a thread and without a socket; a tree of blocks comes and goes by hand."""

    def __init__(self, **sizes: int) -> None:
        self.clock = FakeClock()
        self.counters: Counter[str] = Counter()
        self.ledger = Ledger(lambda flush: None, self.counters, 100, **{"batch_blocks": 2, **sizes})
        self.history = History(self.ledger, Encoder(), self.counters, 0)
        self.stream = LiveStream(self.ledger, self.history, EVERY_S, self.clock)
        self.pub = FakePub()
        self.blocks: dict[int, int | None] = {}

    def store(self, *numbers: int, parent: int | None = None) -> None:
        """A chain of blocks."""
        for number in numbers:
            self.blocks[number] = parent
            before = block_hash(parent) if parent is not None else b""
            self.ledger.note(Change(True, GROUP, block_hash(number), before))
            parent = number
        self.ledger.flush()

    def remove(self, *numbers: int) -> None:
        for number in numbers:
            del self.blocks[number]
            self.ledger.note(Change(False, GROUP, block_hash(number), b""))
        self.ledger.flush()

    def clear(self) -> None:
        self.blocks.clear()
        self.ledger.clear()

    def turn(self) -> bool:
        return self.stream.turn(self.pub)  # type: ignore[arg-type]

    def settle(self) -> None:
        """Nothing changes any more."""
        for _ in range(140):
            self.clock.advance(1.0)
            self.ledger.beat()
            while self.turn():
                pass

    @property
    def index(self) -> Index:
        """What a reader is to know."""

        def name(number: int | None) -> int | None:
            return None if number is None else low_64_bits(block_hash(number))

        return {low_64_bits(block_hash(number)): name(parent) for number, parent in self.blocks.items()}

    @property
    def num_snapshots(self) -> int:
        return self.counters["kv_event_snapshots"]


def _one_message_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_stream_module, "MESSAGES_A_TURN", 1)


def _begin_snapshot(bench: Bench, reader: Reader) -> None:
    """Until the first blocks of a snapshot are sent: the stream has cleared at its start, too."""
    while reader.num_clears < 2 or not reader.index:
        bench.turn()


def test_a_late_subscriber_gets_all_blocks_with_the_streams_next_numbers() -> None:
    bench = Bench()
    early = bench.pub.subscribe()
    bench.store(1, 2, 3, 4, 5)
    bench.turn()
    assert early.index == bench.index and bench.num_snapshots == 1
    bench.store(6)
    late = bench.pub.subscribe()
    bench.clock.advance(EVERY_S)
    bench.turn()
    assert late.index == early.index == bench.index and bench.num_snapshots == 2
    assert early.seqs == list(range(100, 100 + len(early.seqs))), "the numbers go up by one"
    assert early.num_senseless == late.num_senseless == 0


def test_subscriptions_share_a_snapshot_and_one_begins_in_ten_seconds() -> None:
    bench = Bench()
    bench.store(*range(10))
    for _ in range(100):
        for _ in range(50):
            bench.pub.subscribe()
        del bench.pub.readers[1:]
        bench.turn()
        bench.clock.advance(EVERY_S / 20)
    assert bench.num_snapshots == 5
    bench.pub.received.extend([b"\1kv@"] * (3 * MAX_RECEIVED))
    bench.turn()
    assert len(bench.pub.received) == 2 * MAX_RECEIVED, "what one turn receives is bounded"


@pytest.mark.parametrize("received", [b"", b"\0kv@", b"kv@", b"\2"])
def test_other_messages_of_subscribers_bring_no_snapshot(received: bytes) -> None:
    bench = Bench()
    bench.pub.received.append(received)
    bench.turn()
    assert bench.num_snapshots == 0


def test_a_subscription_during_a_snapshot_gets_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _one_message_a_turn(monkeypatch)
    bench = Bench()
    first = bench.pub.subscribe()
    bench.store(*range(20))
    _begin_snapshot(bench, first)
    assert 0 < len(first.index) < 20 and bench.num_snapshots == 1
    late = bench.pub.subscribe()
    while bench.turn():
        pass
    assert first.index == bench.index and late.index != bench.index
    bench.clock.advance(EVERY_S)
    while bench.turn():
        pass
    assert late.index == first.index == bench.index and bench.num_snapshots == 2


def test_changes_during_a_snapshot_come_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _one_message_a_turn(monkeypatch)
    bench = Bench()
    reader = bench.pub.subscribe()
    bench.store(*range(20))
    _begin_snapshot(bench, reader)
    bench.remove(19, 18, 17)  # The walk has not reached them.
    bench.store(18, parent=3)
    bench.remove(18)
    bench.store(18, 19, parent=16)
    bench.remove(19)
    bench.settle()
    assert reader.index == bench.index and reader.num_senseless == 0
    assert bench.num_snapshots == 1


def test_a_clear_during_a_snapshot_has_another_one_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    _one_message_a_turn(monkeypatch)
    bench = Bench()
    reader = bench.pub.subscribe()
    bench.store(*range(20))
    _begin_snapshot(bench, reader)
    bench.clear()
    bench.store(7, 8)
    bench.settle()
    assert reader.index == bench.index and bench.num_snapshots == 2


def test_batches_that_the_ledger_dropped_are_made_up_for() -> None:
    bench = Bench(max_queued_blocks=10)
    reader = bench.pub.subscribe()
    bench.turn()
    for start in range(0, 40, 4):
        bench.store(*range(start, start + 4))
    assert bench.counters["dropped_kv_event_batches"]
    bench.turn()
    assert reader.index != bench.index
    bench.settle()
    assert reader.index == bench.index and bench.num_snapshots == 2


def test_a_snapshot_that_the_ledger_gives_up_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _one_message_a_turn(monkeypatch)
    monkeypatch.setattr(ledger_module, "MAX_UNAPPLIED", 5)
    monkeypatch.setattr(ledger_module, "APPLIED_AT_ONCE", 2)
    bench = Bench()
    reader = bench.pub.subscribe()
    bench.store(*range(20))
    _begin_snapshot(bench, reader)
    for number in range(100, 110):
        bench.store(number)
    bench.settle()
    assert reader.index == bench.index and bench.num_snapshots == 2


def test_a_stream_waits_for_a_subscriber_that_still_receives() -> None:
    bench = Bench()
    bench.store(*range(200))
    bench.settle()
    reader = bench.pub.subscribe()
    bench.pub.room = 0
    for _ in range(1_000):
        bench.turn()
        if reader.index == bench.index:
            break
        assert bench.stream.is_behind and bench.stream.wait_ms > 0
        bench.clock.advance(STALL_S / 20)
        bench.pub.room += 2
    assert reader.index == bench.index and bench.num_snapshots == 1 and not bench.pub.num_dropped
    assert reader.seqs == list(range(reader.seqs[0], reader.seqs[0] + 101))


def test_a_subscriber_that_receives_nothing_loses_messages_and_gets_a_later_snapshot() -> None:
    bench = Bench()
    bench.store(*range(200))
    bench.settle()
    reader = bench.pub.subscribe()
    bench.pub.room = 10
    bench.turn()
    bench.clock.advance(STALL_S - 0.1)
    assert not bench.turn() and not bench.pub.num_dropped
    bench.clock.advance(0.2)
    bench.turn()
    assert bench.pub.num_dropped and bench.pub.is_patient
    bench.pub.room = 1 << 30
    while bench.turn():
        pass
    assert reader.index != bench.index and bench.num_snapshots == 1
    bench.clock.advance(MAKE_UP_EVERY_S)
    while bench.turn():
        pass
    assert reader.index == bench.index and bench.num_snapshots == 2


@pytest.mark.parametrize("away_s", [MAKE_UP_EVERY_S / 2, 2.5 * MAKE_UP_EVERY_S])
def test_a_subscriber_that_is_left_out_for_long_has_what_it_lost_made_up_for(away_s: float) -> None:
    bench = Bench()
    bench.store(*range(200))
    bench.settle()
    reader = bench.pub.subscribe()
    bench.pub.room = 10
    bench.turn()
    bench.clock.advance(STALL_S)
    bench.turn()
    assert bench.pub.num_dropped
    bench.clock.advance(EVERY_S)
    bench.pub.subscribe()  # Its snapshot comes while the other subscriber is left out.
    lost_at = bench.clock.now
    while bench.clock.now < lost_at + away_s:
        while bench.turn():
            pass
        bench.clock.advance(5.0)
    assert reader.index != bench.index and bench.num_snapshots >= 2
    bench.pub.room = 1 << 30
    for _ in range(200):
        while bench.turn():
            pass
        bench.clock.advance(5.0)
    assert reader.index == bench.index
    assert bench.num_snapshots == 2 + MAKE_UPS


def test_a_stream_waits_before_its_first_snapshot_too() -> None:
    bench = Bench()
    bench.pub.room = 10
    reader = bench.pub.subscribe()
    bench.store(*range(200))
    bench.turn()
    bench.clock.advance(STALL_S / 2)
    assert not bench.turn() and not bench.pub.num_dropped
    bench.pub.room = 1 << 30
    while bench.turn():
        pass
    assert reader.index == bench.index and not bench.pub.num_dropped


def test_a_slow_subscriber_holds_the_stream_up_for_two_minutes_at_most() -> None:
    bench = Bench()
    bench.store(*range(2_000))
    bench.settle()
    bench.pub.subscribe()
    bench.pub.room = 0
    waited = 0.0
    while not bench.pub.num_dropped:
        bench.turn()
        bench.clock.advance(STALL_S / 2)
        waited += STALL_S / 2
        bench.pub.room = 1
    assert PATIENCE_S <= waited <= PATIENCE_S + STALL_S


def test_one_turn_sends_few_messages_and_the_next_one_is_due_at_once() -> None:
    bench = Bench()
    reader = bench.pub.subscribe()
    bench.store(*range(1_000))
    bench.turn()
    assert len(reader.seqs) == MESSAGES_A_TURN and bench.stream.wait_ms == 0
    while bench.turn():
        pass
    assert bench.stream.wait_ms == live_stream_module.POLL_MS
    bench.pub.subscribe()
    bench.turn()
    assert bench.stream.wait_ms == live_stream_module.POLL_MS  # Less than the ten seconds until its snapshot.


def test_a_stream_goes_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    reader = bench.pub.subscribe()
    bench.turn()
    encode = bench.history._encode
    monkeypatch.setattr(bench.history, "_encode", lambda batch: 1 / 0)
    bench.store(1, 2)
    with pytest.raises(ZeroDivisionError):
        bench.turn()
    monkeypatch.setattr(bench.history, "_encode", encode)
    bench.settle()
    assert reader.index == bench.index and bench.num_snapshots == 2


def test_the_end_brings_what_is_left_and_gives_up_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    _one_message_a_turn(monkeypatch)
    bench = Bench()
    reader = bench.pub.subscribe()
    bench.store(*range(1_000))
    _begin_snapshot(bench, reader)
    bench.ledger.withdraw()
    bench.pub.readers.append(slow := Reader())
    bench.stream.finish(bench.pub)  # type: ignore[arg-type]
    assert not reader.index and reader.num_clears > 1
    assert len(slow.seqs) < 10 and not bench.ledger._readers


class _Watched(dict[bytes, Change]):
    """Blocks that may not be walked over under a lock."""

    def __init__(self, blocks: dict[bytes, Change], lock: threading.Lock):
        super().__init__(blocks)
        self._lock = lock
        self.num_walked = 0

    def values(self) -> Any:
        for change in super().values():
            assert not self._lock.locked(), "the pool's loop waits while blocks are walked over"
            self.num_walked += 1
            yield change

    __iter__ = keys = items = None  # type: ignore[assignment]


def test_no_step_over_the_blocks_is_taken_under_the_lock() -> None:
    bench = Bench(batch_blocks=100)
    reader = bench.pub.subscribe()
    bench.store(*range(5_000))
    watched = _Watched(bench.ledger._held[GROUP], bench.ledger._lock)
    bench.ledger._held[GROUP] = watched
    while bench.turn():
        pass
    assert watched.num_walked == 5_000 and reader.index == bench.index


STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "store", "remove", "turn", "turn", "wait", "subscribe", "clear", "stall"]),
              st.integers(0, 30)),
    max_size=120,
)  # fmt: skip


def _take(bench: Bench, step: str, number: int) -> None:
    if step == "store":
        if number not in bench.blocks:
            known = sorted(bench.blocks)
            bench.store(number, parent=known[number % len(known)] if known and number % 3 else None)
    elif step == "remove":
        below = [number] if number in bench.blocks else []
        for each in below:  # Those behind a block go before it.
            below += [child for child, parent in bench.blocks.items() if parent == each]
        bench.remove(*reversed(below))
    elif step == "turn":
        bench.turn()
    elif step == "wait":
        bench.clock.advance(number / 2)
    elif step == "subscribe":
        bench.pub.subscribe()
    elif step == "clear":
        bench.clear()
    else:
        bench.pub.room = number % 4


@given(STEPS, st.sampled_from([3, 20, 1 << 20]), st.sampled_from([5, 1 << 20]))
@settings(max_examples=100, deadline=None)
def test_whatever_happens_every_subscriber_ends_with_the_ledgers_blocks(
    steps: list[Step], max_queued_blocks: int, max_unapplied: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        _one_message_a_turn(patched)
        patched.setattr(ledger_module, "MAX_UNAPPLIED", max_unapplied)
        patched.setattr(ledger_module, "APPLIED_AT_ONCE", 2)
        bench = Bench(max_queued_blocks=max_queued_blocks)
        bench.pub.subscribe()
        for step, number in steps:
            _take(bench, step, number)
        bench.pub.subscribe()
        bench.pub.room = 1 << 30
        bench.settle()
        for reader in bench.pub.readers:
            assert reader.index == bench.index
            assert reader.seqs == sorted(set(reader.seqs))
        held = bench.ledger._held.get(GROUP, {})
        assert {low_64_bits(each) for each in held} == set(bench.index), "the test is wrong about the ledger's blocks"
        assert not bench.ledger._readers and not bench.ledger._unapplied and not bench.ledger._queue


# With sockets


class Follower:
    """A subscriber without replays, by plain sockets."""

    def __init__(self, endpoint: str):
        self.reader = Reader()
        self._context = zmq.Context()
        self.sub = self._context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.RECONNECT_IVL, 20)
        self.sub.setsockopt(zmq.RCVHWM, 1)
        self.sub.setsockopt(zmq.RCVBUF, 4_096)
        self.sub.connect(endpoint)
        self.sub.subscribe("kv@")

    def read(self) -> Index:
        while self.sub.poll(20):
            topic, seq, payload = self.sub.recv_multipart()
            self.reader.apply(Message(topic, int.from_bytes(seq, "big"), payload))
        return self.reader.index

    def close(self) -> None:
        self._context.destroy(linger=0)


class Published(Bench):
    """The same blocks with a publisher's thread and sockets. It can be started again at its endpoint."""

    def __init__(self, endpoint: str = ANYWHERE, snapshot_every_s: float = 0.2, batch_blocks: int = 2):
        super().__init__()
        self.ledger = Ledger(lambda flush: None, self.counters, batch_blocks=batch_blocks)
        self.history = History(self.ledger, Encoder(), self.counters, 0)
        self.publisher = Publisher(
            self.ledger, self.history, endpoint, "",
            beat_s=0.2, snapshot_every_s=snapshot_every_s, snapshots_in_stream=True,
        )  # fmt: skip


@pytest.fixture
def follow() -> Iterator[Callable[[str], Follower]]:
    followers: list[Follower] = []

    def make(endpoint: str) -> Follower:
        followers.append(Follower(endpoint))
        return followers[-1]

    yield make
    for each in followers:
        each.close()


@pytest.fixture
def published() -> Iterator[Published]:
    made = Published()
    yield made
    made.publisher.close()


def _agree(followers: Iterable[Follower], bench: Bench) -> None:
    for each in followers:
        wait_for(lambda each=each: each.read() == bench.index, "the ledger's blocks")  # type: ignore[misc]


def test_each_subscriber_of_the_same_topic_gets_a_snapshot(
    published: Published, follow: Callable[[str], Follower]
) -> None:
    published.store(*range(50))
    followers = []
    for nth in range(3):
        followers.append(follow(published.publisher.endpoint))
        _agree(followers, published)
        published.store(100 + nth, parent=49)
        _agree(followers, published)
    followers[0].sub.unsubscribe("kv@")
    time.sleep(0.3)
    published.remove(102)
    followers[0].sub.subscribe("kv@")  # The same connection.
    _agree(followers, published)


def test_a_flood_of_subscriptions_brings_few_snapshots(follow: Callable[[str], Follower]) -> None:
    bench = Published(snapshot_every_s=0.5)
    try:
        bench.store(*range(50))
        begins, follower = time.monotonic(), follow(bench.publisher.endpoint)
        with zmq.Context() as context, context.socket(zmq.XSUB) as flood:
            flood.setsockopt(zmq.LINGER, 0)
            flood.connect(bench.publisher.endpoint)
            for nth in range(20_000):
                flood.send(b"\1kv@%d" % nth)
            _agree([follower], bench)
            time.sleep(1)
        assert 1 <= bench.num_snapshots <= 1 + (time.monotonic() - begins) / 0.5
    finally:
        bench.publisher.close()


def test_a_subscriber_that_connects_again_after_a_restart_has_the_new_servers_blocks(
    follow: Callable[[str], Follower],
) -> None:
    first = Published()
    follower, endpoint = follow(first.publisher.endpoint), first.publisher.endpoint
    first.store(1, 2, 3)
    _agree([follower], first)
    first.publisher.close()
    second = Published(endpoint)
    try:
        second.store(7, 8)
        _agree([follower], second)
        assert follower.reader.seqs == sorted(set(follower.reader.seqs))
    finally:
        second.publisher.close()


def test_a_snapshot_larger_than_what_zeromq_queues_arrives_whole(follow: Callable[[str], Follower]) -> None:
    bench = Published(batch_blocks=1, snapshot_every_s=60.0)
    try:
        bench.store(*range(10_000))
        follower = follow(bench.publisher.endpoint)
        live = bench.publisher._live
        wait_for(lambda: live is not None and live._stalled_at < math.inf, "a full queue")
        _agree([follower], bench)
        assert bench.num_snapshots == 1
    finally:
        bench.publisher.close()


def test_a_publisher_stops_in_the_middle_of_a_snapshot(follow: Callable[[str], Follower]) -> None:
    bench = Published(batch_blocks=1)
    bench.store(*range(10_000))
    follower = follow(bench.publisher.endpoint)
    wait_for(lambda: bool(follower.sub.poll(0)), "the snapshot")
    begins = time.monotonic()
    bench.publisher.close()
    assert time.monotonic() - begins < 5
    assert not bench.publisher._thread.is_alive()
