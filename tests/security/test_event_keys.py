"""KV events under CURVE: who may subscribe, what a tenant's subscriber sees, and how a key ends."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from kvpool.client.client import Namespace
from kvpool.client.events import Subscriber
from kvpool.protocol.errors import PoolTimeoutError
from kvpool.security.curve import SubscriberKeys, append_subscriber, create_pair
from kvpool.security.files import LOOK_EVERY_S, WatchedFiles
from kvpool.security.principal import ALL_TENANTS, Role
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.events import publisher as publisher_module
from kvpool_server.events.messages import Encoder
from kvpool_server.events.publisher import EventStreams, StreamEndpoints
from kvpool_server.events.sockets import Gate
from tests.support.clock import FakeClock
from tests.support.events import Known, Listener, follow, low_64_bits
from tests.support.processes import ServerProcess, run_command, wait_for
from tests.support.recorder import Recorder
from tests.support.secured_server import SecuredServer
from tests.support.values import block_hash, group_spec, namespace_spec, payload, run_of

KVPOOL = str(Path(sys.executable).with_name("kvpool"))
ANYWHERE = "tcp://127.0.0.1:0"
TENANTS = ("acme", "umbra")
LISTED = ("acme", "acme2", "acme3", "umbra", "umbra2", "operator", "operator2")
SILENCE_MS = 500
"""So long a refused subscriber waits in vain."""
Stream = tuple[str, str]
"""Endpoint, replay endpoint."""


class Keys:
    """Key files in a directory: the server's, several for each tenant and for operators, and one that is not listed.

    A key gets a snapshot every ten seconds, so tests that share a server have keys of their own.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.list = directory / "subscribers"
        self.server = create_pair(directory / "server")
        self.pairs = {name: create_pair(directory / name) for name in (*LISTED, "stranger")}
        self.write(*LISTED)

    def write(self, *names: str) -> None:
        """Lists these keys alone."""
        self.list.unlink(missing_ok=True)
        self.list.touch()
        for name in names:
            tenant = name.rstrip("23")
            append_subscriber(self.list, ALL_TENANTS if tenant == "operator" else tenant, self.pairs[name].public)

    def of(self, name: str) -> SubscriberKeys:
        return SubscriberKeys(self.pairs[name], self.server.public)

    @property
    def flags(self) -> list[str]:
        secret = self.directory / "server.key_secret"
        return ["--kv-events-key", str(secret), "--kv-events-subscribers", str(self.list)]

    def gate(self, clock: Callable[[], float], denied: WatchedFiles[frozenset[str]] | None = None) -> Gate:
        return Gate(str(self.directory / "server.key_secret"), str(self.list), denied=denied, clock=clock)


def _is_silent(stream: Stream, keys: SubscriberKeys | None) -> bool:
    """Whether a subscriber gets neither an event nor a replay."""
    with Subscriber(stream[0], keys=keys) as subscriber:
        if subscriber.receive(SILENCE_MS):
            return False
    with Subscriber(*stream, timeout_ms=SILENCE_MS, keys=keys) as subscriber:
        try:
            subscriber.replay(0)
        except PoolTimeoutError:
            return True
    return False


# A server with TLS and two tenants


class Deployment(SecuredServer):
    """A server whose tenants each have a stream and a block, and another stream about all of them."""

    def __init__(self, directory: Path):
        self.keys = Keys(directory / "events")
        streams = [flag for name in TENANTS for flag in ("--kv-events-tenant", f"{name}={ANYWHERE},{ANYWHERE}")]
        everybodys = ["--kv-events", ANYWHERE, "--kv-events-replay", ANYWHERE]
        start = functools.partial(ServerProcess, directory / "server")
        super().__init__(directory, start, *self.keys.flags, *everybodys, *streams, "--log-format", "json")
        lines = [json.loads(line) for line in self.server.stderr.splitlines() if line.startswith("{")]
        told = [line for line in lines if line["event"] == "publishing KV events"]
        assert all(line["curve"] for line in told)
        self.streams: dict[str, Stream] = {
            line["tenant"] or ALL_TENANTS: (line["endpoint"], line["replay"]) for line in told
        }
        self.clients = {name: self.client(Role.ENGINE_WRITE, name) for name in TENANTS}
        self.namespaces = {name: self._open(name) for name in TENANTS}
        for name in TENANTS:
            self.put(name, name)

    def _open(self, tenant: str) -> Namespace:
        return self.clients[tenant].open_namespace(namespace_spec(group_spec(chunk_bytes=256), tenant=tenant))

    def put(self, tenant: str, block: str) -> None:
        self.clients[tenant].put_blocks(self.namespaces[tenant], run_of(block), [payload(block, 256)])

    def known(self, tenant: str, *blocks: str) -> set[Known]:
        namespace = self.namespaces[tenant]
        label = f"{namespace.fingerprint.hex()}@{namespace.spec.model}"
        return {(label, 0, low_64_bits(block_hash(block))) for block in blocks}

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        self.server.stop()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("events"))
    yield made
    made.close()


def test_a_tenants_subscriber_sees_its_own_tenants_blocks_alone(deployment: Deployment) -> None:
    listeners = {
        name: Listener(*deployment.streams[stream], keys=deployment.keys.of(name))
        for name, stream in (("acme", "acme"), ("umbra", "umbra"), ("operator", ALL_TENANTS))
    }
    try:
        own = {name: deployment.known(name, name) for name in TENANTS}
        listeners["acme"].wait_for(own["acme"])  # The snapshot.
        listeners["umbra"].wait_for(own["umbra"])
        listeners["operator"].wait_for(own["acme"] | own["umbra"])
        first_seq = listeners["acme"].view.seq
        deployment.put("umbra", "later")
        own["umbra"] |= deployment.known("umbra", "later")
        listeners["umbra"].wait_for(own["umbra"])  # The stream.
        listeners["operator"].wait_for(own["acme"] | own["umbra"])
        deployment.put("acme", "last")
        listeners["acme"].wait_for(own["acme"] | deployment.known("acme", "last"))
        assert listeners["acme"].view.seq == first_seq + 1, "numbers tell of another tenant's blocks"
    finally:
        for listener in listeners.values():
            listener.close()


def test_a_key_opens_its_own_streams_alone(deployment: Deployment) -> None:
    keys, streams = deployment.keys, deployment.streams
    for stream in streams.values():
        with Subscriber(*stream, keys=keys.of("operator2")) as subscriber:
            assert subscriber.replay(0)
    for name, stream in (("acme", "umbra"), ("acme", ALL_TENANTS), ("stranger", "acme"), ("stranger", ALL_TENANTS)):
        assert _is_silent(streams[stream], keys.of(name)), f"{name} hears {stream}"
    false_server = SubscriberKeys(keys.of("acme").own, keys.pairs["stranger"].public)
    for theirs in (None, false_server):
        assert _is_silent(streams["acme"], theirs)
    assert _is_silent(streams[ALL_TENANTS], None)


def test_plain_vllm_style_sockets_connect_with_three_options(deployment: Deployment) -> None:
    """What docs/reference/kv-events.md has routers do, which know pyzmq alone."""
    keys = deployment.keys
    with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
        replay.setsockopt(zmq.LINGER, 0)
        replay.curve_publickey, replay.curve_secretkey = zmq.auth.load_certificate(keys.directory / "acme2.key_secret")
        replay.curve_serverkey, _ = zmq.auth.load_certificate(keys.directory / "server.key")
        replay.connect(deployment.streams["acme"][1])
        replay.send_multipart((b"", bytes(8)))
        assert replay.poll(10_000) and len(replay.recv_multipart()) == 4


def test_what_passes_names_no_block_in_clear(deployment: Deployment) -> None:
    publish, replay = deployment.streams["acme"]
    with Recorder(replay.removeprefix("tcp://")) as recorder:
        with Subscriber(publish, f"tcp://{recorder.endpoint}", keys=deployment.keys.of("acme3")) as subscriber:
            assert subscriber.replay(0)
        recorder.shutdown()
        passed = bytes(recorder.seen)
    assert len(passed) > 1_000
    fingerprint = deployment.namespaces["acme"].fingerprint.hex()
    for secret in (b"kv@", fingerprint.encode(), block_hash("acme")[-8:], b"BlockStored"):
        assert secret not in passed


def test_the_command_follows_with_keys(deployment: Deployment) -> None:
    stream, keys = deployment.streams["umbra"], deployment.keys.directory
    command = (KVPOOL, "events", stream[0], "--replay", stream[1])
    done = follow(2, *command, "--key", str(keys / "umbra2.key_secret"), "--server-key", str(keys / "server.key"))
    assert done.returncode == 0, done.stderr
    assert str(low_64_bits(block_hash("umbra"))) in done.stdout
    assert str(low_64_bits(block_hash("acme"))) not in done.stdout
    done = run_command(*command, "--key", str(keys / "umbra2.key_secret"))
    assert done.returncode == 2 and "--key and --server-key belong together" in done.stderr


def test_a_refused_list_of_subscribers_is_reported_until_it_can_be_used(deployment: Deployment) -> None:
    keys, server = deployment.keys, deployment.server
    with deployment.client(Role.OPERATOR) as client:

        def is_reported() -> bool:
            os.kill(server.pid, signal.SIGHUP)
            return tuple(client.admin.stats().server.refused_files) == ("subscribers",)

        keys.list.chmod(0o664)
        try:
            wait_for(is_reported, "the refusal in Stats")
        finally:
            keys.list.chmod(0o644)
        wait_for(lambda: not is_reported(), "the end of the refusal in Stats")


def test_a_server_cuts_a_denied_tenant_off(deployment: Deployment) -> None:
    stream, keys, server = deployment.streams["umbra"], deployment.keys, deployment.server
    deployment.denied.write_text("tenant:umbra\n")
    os.kill(server.pid, signal.SIGHUP)
    try:
        wait_for(lambda: "the connections to KV events" in server.stderr, "the end")
        assert _is_silent(stream, keys.of("umbra2"))
    finally:
        deployment.denied.write_text("")


# Streams without a server


class Bench:
    """Streams of two tenants and of all, whose blocks come and go by hand.

    Args:
        sockets: directory of Unix sockets; None: the streams are ports.
    """

    def __init__(self, keys: Keys, gate: Gate | None, sockets: Path | None = None):
        self.keys = keys
        self.counters: Counter[str] = Counter()
        flushes: list[Callable[[], None]] = []
        self._flushes = flushes
        endpoints = [
            StreamEndpoints(tenant, *(f"ipc://{sockets}/{tenant}{end}" if sockets else ANYWHERE for end in "er"))
            for tenant in (ALL_TENANTS, *TENANTS)
        ]
        self.all = EventStreams(endpoints, gate, Encoder(), self.counters, 1_000, flushes.append)
        self.publishers = dict(zip((ALL_TENANTS, *TENANTS), self.all._publishers, strict=True))

    def stream(self, tenant: str) -> Stream:
        return self.publishers[tenant].endpoint, self.publishers[tenant].replay_endpoint

    def store(self, tenant: str, *names: str) -> None:
        group = Group(group_spec(), 0, f"{tenant}@model", declared_tenant=tenant)
        for name in names:
            self.all.stored([Entry(group, block_hash(name), None, 0, 0)])
        flushes, self._flushes[:] = list(self._flushes), []
        for flush in flushes:
            flush()

    def subscriber(self, name: str, stream: str = "", timeout_ms: int = 20_000) -> Subscriber:
        return Subscriber(*self.stream(stream or name), timeout_ms=timeout_ms, keys=self.keys.of(name))

    def listener(self, name: str) -> Listener:
        return Listener(*self.stream(name), keys=self.keys.of(name))


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def denied(tmp_path: Path, clock: FakeClock) -> WatchedFiles[frozenset[str]]:
    """A deny list."""
    path = tmp_path / "denied"
    path.touch()
    return WatchedFiles([str(path)], lambda: frozenset(path.read_text().split()), clock)


@pytest.fixture
def bench(keys: Keys, clock: FakeClock, denied: WatchedFiles[frozenset[str]]) -> Iterator[Bench]:
    made = Bench(keys, keys.gate(clock, denied))
    yield made
    made.all.close()


def _known(tenant: str, *names: str) -> set[Known]:
    return {(f"{tenant}@model", 0, low_64_bits(block_hash(name))) for name in names}


@pytest.mark.parametrize("how", ["taken from the list", "denied", "taken from the list of a Unix socket"])
def test_a_key_whose_right_has_ended_hears_nothing_more(
    keys: Keys, clock: FakeClock, denied: WatchedFiles[frozenset[str]], how: str, socket_dir: Path
) -> None:
    bench = Bench(keys, keys.gate(clock, denied), socket_dir if "socket" in how else None)
    with closing(bench.all), bench.subscriber("acme") as removed, bench.subscriber("umbra") as neighbour:
        operator = Listener(*bench.stream("acme"), keys=keys.of("operator"))
        bench.store("acme", "before")
        operator.wait_for(_known("acme", "before"))
        wait_for(lambda: removed.receive(100), "the first messages")
        if how == "denied":
            Path(denied.paths[0]).write_text("tenant:acme")
        else:
            keys.write("umbra", "operator")
        clock.advance(LOOK_EVERY_S + 1)
        wait_for(lambda: bench.publishers["acme"]._version == 1, "the end of the key")
        bench.store("acme", "after")
        operator.wait_for(_known("acme", "before", "after"))  # Has connected again by itself.
        operator.close()
        heard = []
        while removed._sub.poll(SILENCE_MS):
            heard.append(removed._sub.recv_multipart())
        assert not any(block_hash("after")[-8:] in b"".join(frames) for frames in heard)
        assert _is_silent(bench.stream("acme"), keys.of("acme2"))
        assert neighbour.replay(0)


def test_a_key_that_is_added_is_served_and_a_list_that_cannot_be_read_is_not_in_force(
    bench: Bench, clock: FakeClock
) -> None:
    keys = bench.keys
    assert _is_silent(bench.stream("acme"), keys.of("stranger"))
    append_subscriber(keys.list, "acme", keys.pairs["stranger"].public)
    clock.advance(LOOK_EVERY_S + 1)
    with bench.subscriber("stranger", "acme") as subscriber:
        assert subscriber.replay(0)
    keys.list.write_text("acme not-a-key\n")
    clock.advance(LOOK_EVERY_S + 1)
    with bench.subscriber("acme") as subscriber:
        assert subscriber.replay(0)


def test_an_error_while_the_list_is_read_ends_no_thread(
    keys: Keys, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = keys.gate(clock)
    monkeypatch.setattr(gate._tenants, "_read", lambda: 1 // 0)
    bench = Bench(keys, gate)
    for name in ("acme", "acme2"):
        keys.list.write_text(keys.list.read_text() + "\n")
        clock.advance(LOOK_EVERY_S + 1)
        with bench.subscriber(name, "acme") as subscriber:
            assert subscriber.replay(0)
    bench.all.close()


def test_nobody_is_admitted_while_nobody_answers_for_the_list(bench: Bench) -> None:
    with bench.subscriber("acme") as subscriber:
        assert subscriber.replay(0)
    authenticator = bench.publishers["acme"]._sockets._authenticator
    assert authenticator is not None
    authenticator.stop()
    assert _is_silent(bench.stream("acme"), bench.keys.of("acme2"))
    with Subscriber(bench.stream("acme")[0], keys=bench.keys.of("acme2")) as subscriber:
        for nth in range(10):
            bench.store("acme", f"block {nth}")
            assert not subscriber.receive(100)


@pytest.mark.parametrize("mechanism", [b"NULL", b"CURVE"])
def test_a_stranger_cannot_begin_a_message(bench: Bench, mechanism: bytes) -> None:
    """ZeroMQ does not bound how many frames an unfinished message has: nobody may send one without a listed key."""
    host, _, port = bench.stream("acme")[1].removeprefix("tcp://").rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
    frame_of_an_unfinished_message = b"\x01\xff" + bytes(255)
    with socket.create_connection((host, int(port)), 10) as peer:
        peer.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
        with pytest.raises(ConnectionError):
            peer.sendall(frame_of_an_unfinished_message * 262_144)


def test_a_key_gets_a_snapshot_every_ten_seconds_however_often_it_connects(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "SNAPSHOT_EVERY_S", 3_600.0)
    with bench.subscriber("acme") as first:
        assert first.replay(0)
    for _ in range(3):
        with bench.subscriber("acme", timeout_ms=SILENCE_MS) as again, pytest.raises(PoolTimeoutError):
            again.replay(0)
    assert len(bench.publishers["acme"]._replays) == 1, "requests of one key for snapshots wait in one place"
    with bench.subscriber("operator", "acme") as other, bench.subscriber("umbra") as neighbour:
        assert other.replay(0) and neighbour.replay(0)


def test_a_key_that_asks_again_and_again_gets_its_snapshot_when_its_time_has_come(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "SNAPSHOT_EVERY_S", 1.0)

    def answered() -> bool:
        with bench.subscriber("acme", timeout_ms=SILENCE_MS) as subscriber:
            try:
                return bool(subscriber.replay(0))
            except PoolTimeoutError:
                return False

    for _ in range(2):
        wait_for(answered, "a snapshot")


def test_a_client_that_left_before_its_snapshot_does_not_delay_the_next_one_of_its_key(bench: Bench) -> None:
    publisher, keys = bench.publishers["acme"], bench.keys.of("acme")
    with bench.subscriber("acme") as first:
        assert first.replay(0)
    wait_for(lambda: not publisher._replays, "the end of the first request")
    sent_at = dict(publisher._snapshot_at)
    assert len(sent_at) == 1

    def leaves_no_trace() -> bool:
        nonlocal sent_at
        with zmq.Context() as context, context.socket(zmq.DEALER) as impatient:
            impatient.setsockopt(zmq.LINGER, 0)
            keys.apply(impatient)
            impatient.connect(publisher.replay_endpoint)
            impatient.send_multipart((b"", bytes(8)))
            (waiting,) = wait_for(lambda: list(publisher._replays), "the request")
        time.sleep(0.05)  # The server is to notice the end of the connection before it sends.
        waiting.begins_at = 0.0
        wait_for(lambda: not publisher._replays, "the end of the request")
        before, sent_at = sent_at, dict(publisher._snapshot_at)
        return sent_at == before

    wait_for(leaves_no_trace, "a request whose client has gone")


def test_a_tenant_whose_name_stands_for_all_is_told_of_once(keys: Keys) -> None:
    """Without identities anyone may call a tenant `_`."""
    bench = Bench(keys, None)
    listener = Listener(*bench.stream(ALL_TENANTS))
    wait_for(lambda: listener.listen() or listener.messages, "the snapshot")
    bench.store(ALL_TENANTS, "a")
    listener.wait_for(_known(ALL_TENANTS, "a"))
    listener.close()
    bench.all.close()
