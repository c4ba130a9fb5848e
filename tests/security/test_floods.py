"""Clients that ask for more than their share, or never finish: memory stays bounded, and others are served.

The bounds are those of docs/explanation/security.md.
"""

from __future__ import annotations

import asyncio
import contextvars
import re
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import grpc
import pytest
import zmq
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol import wire
from kvpool.protocol.errors import BusyError, OutOfSpaceError, TransferError
from kvpool.protocol.messages import MESSAGE_BYTES, PiecedChannel
from kvpool.protocol.types import HASH_BYTES, BlockRun, ShardRange
from kvpool.v1 import pool_pb2 as pb
from kvpool.v1.pool_pb2_grpc import PoolStub
from kvpool_server.process import runtime
from kvpool_server.rpc import blocks, buffers, grpc_server, handlers
from kvpool_server.sharing import Limits
from tests.support.calls import METHODS, SERVICE
from tests.support.half_sent import HalfSentCalls
from tests.support.in_process_server import InProcessServer
from tests.support.processes import ServerProcess, wait_for
from tests.support.values import block_hash, group_spec, namespace_spec, payload, run_of

StartServer = Callable[..., ServerProcess]
MIB = 1 << 20
IDLE_STREAMS_BYTES = 256 * MIB
PING_S = 30.0
"""Far more than a call takes, because the test's machine is shared; a stalled server answers none."""
CHUNK = 64
CHECK = "/grpc.health.v1.Health/Check"


@contextmanager
def _served(server: ServerProcess, most_bytes: int) -> Iterator[None]:
    """Asserts that Ping is answered all through the body, and that the server's memory grows by less than a bound.

    While thousands of calls arrive at once, gRPC drops some by chance before the server sees them (CANCELLED): who is
    dropped asks again, and has to be answered within the same time.
    """
    before, peak, longest, ended = server.own_bytes, 0, 0.0, threading.Event()
    failures: list[BaseException] = []

    def ping() -> None:
        nonlocal peak, longest
        with Client(ClientConfig(server.endpoint, timeout_ms=int(1000 * PING_S))) as client:
            while not ended.wait(0.02):
                began = time.monotonic()
                try:
                    while not _answers(client) and time.monotonic() - began < PING_S:
                        pass
                except Exception as error:
                    failures.append(error)
                    return
                longest = max(longest, time.monotonic() - began)
                peak = max(peak, server.own_bytes)

    thread = threading.Thread(target=ping)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(2 * PING_S)
    assert not failures and longest < PING_S
    assert peak - before < most_bytes, f"the server's memory grew by {(peak - before) / MIB:.0f} MiB"


def _answers(client: Client) -> bool:
    try:
        client.admin.ping()
    except TransferError as error:
        if str(error) != "CANCELLED":
            raise
        return False
    return True


def test_calls_that_are_reset_leave_room_for_others(pool_server: StartServer) -> None:
    server, ended = pool_server(), threading.Event()
    calls = HalfSentCalls(server.endpoint)

    def reset() -> None:
        with suppress(OSError):  # The server closed the connection.
            while not ended.is_set():
                calls.reset("Ping", 500)

    thread = threading.Thread(target=reset)
    thread.start()
    try:
        with Client(ClientConfig(server.endpoint, timeout_ms=int(1000 * PING_S))) as client:
            for _ in range(50):
                client.admin.ping()
    finally:
        ended.set()
        calls.close()
        thread.join(10)


@pytest.fixture
def small_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., InProcessServer]]:
    """Starts servers in this process, with many calls a connection: `small_server(Limits(max_leases=8))`."""
    monkeypatch.setattr(grpc_server, "MAX_STREAMS", 100)
    with ExitStack() as stack:

        def start(limits: Limits | None = None) -> InProcessServer:
            server = InProcessServer(4_096 * CHUNK, 1_024 * CHUNK, limits)
            stack.callback(server.close)
            return server

        yield start


# Replies


def _slow_channel(endpoint: str) -> grpc.Channel:
    """A connection whose client takes 64 KiB before it begins to read."""
    return grpc.insecure_channel(endpoint, [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)])


def _unread(endpoint: str, name: bytes, count: int) -> list[Any]:
    """Calls of one client that reads nothing of a chunk of `name`."""
    request = pb.GetChunksRequest(keys=[pb.PoolKey(namespace=name, block_hash=block_hash("block"))])
    stub = PoolStub(_slow_channel(endpoint))
    return [stub.GetChunks(request, timeout=590) for _ in range(count)]


def test_replies_that_nobody_reads_hold_what_a_few_calls_send(pool_server: StartServer) -> None:
    chunk, server = 2 * MIB, pool_server()
    with Client(ClientConfig(server.endpoint, timeout_ms=10_000)) as client:
        namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=chunk)))
        client.put_blocks(namespace, run_of("block"), [payload("block", chunk)])
        before = server.own_bytes
        most = grpc_server.MAX_STREAMS
        channels = [_unread(server.endpoint, namespace.fingerprint, most) for _ in range(16)]
        assert len(channels) * most > 4 * buffers.MAX_DATA_STREAMS
        time.sleep(3)
        grown = server.own_bytes - before
    assert grown < 4 * chunk * buffers.MAX_DATA_STREAMS, f"{grown / MIB:.0f} MiB"


def test_requests_of_streams_that_wait_are_not_decoded(
    small_server: Callable[..., InProcessServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message of numbers is eight times as large once it is decoded."""
    monkeypatch.setattr(buffers, "MAX_DATA_STREAMS", 0)
    monkeypatch.setattr(buffers, "MESSAGE_S", 0.5)
    names: list[str] = []
    decode = handlers.decoded

    async def decoded(turns: Any, message_type: Any, message: bytes) -> Any:
        names.append(message_type.DESCRIPTOR.name)
        return await decode(turns, message_type, message)

    monkeypatch.setattr(handlers, "decoded", decoded)
    stub = small_server().stub
    with pytest.raises(grpc.RpcError, match="all that this caller may use at once is in use"):
        list(stub.GetChunks(pb.GetChunksRequest(offsets=[1] * 1_000, region_bytes=1), timeout=20))
    stub.Ping(pb.PingRequest(), timeout=10)
    assert names == ["PingRequest"]


def test_a_client_that_reads_no_replies_leaves_calls_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "MAX_CALLS", 64)
    monkeypatch.setattr(grpc_server, "MAX_STREAMS", 100)
    monkeypatch.setattr(buffers, "PIECE_S", 1.0)
    monkeypatch.setattr(buffers, "MAX_DATA_STREAMS", 16)
    server = InProcessServer(64 * MIB, MIB)
    try:
        endpoint = f"127.0.0.1:{server.port}"
        with Client(ClientConfig(endpoint, transport="grpc", timeout_ms=10_000)) as client:
            namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=MIB)))
            client.put_blocks(namespace, run_of("block"), [payload("block", MIB)])
            calls = _unread(endpoint, namespace.fingerprint, 80)
            wait_for(lambda: any(call.done() for call in calls), "calls to be refused")
            client.admin.ping()
            key = pb.PoolKey(namespace=namespace.fingerprint, block_hash=block_hash("block"))
            with grpc.insecure_channel(endpoint) as channel:  # Has its turn when calls that nobody reads have ended.
                (reply,) = PoolStub(channel).GetChunks(pb.GetChunksRequest(keys=[key]), timeout=20)
            assert reply.found
    finally:
        server.close()


def _listings(endpoint: str, count: int) -> list[Any]:
    """Calls of one client that reads no listing of namespaces, and gives no deadline."""
    listing = _slow_channel(endpoint).stream_stream(f"/{SERVICE.full_name}/ListNamespaces")
    return [listing(iter([b""])) for _ in range(count)]


def _is_refused(call: Any) -> bool:
    return bool(call.done() and call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED)


def _fill_listing(server: InProcessServer) -> int:
    """Opens namespaces, with which a listing has more bytes than fit a client's window; returns how many it has."""
    for nth in range(2):
        names = tuple(f"layer {number}" for number in range(4_800))
        spec = namespace_spec(group_spec(chunk_bytes=CHUNK, layer_names=names), salt=str(nth))
        server.on_loop(lambda spec=spec: server.pool.open_namespace(spec))
    listing: pb.ListNamespacesResponse = server.stub.ListNamespaces(pb.ListNamespacesRequest(), timeout=10)
    return listing.ByteSize()


@pytest.mark.parametrize("bound", ["calls", "bytes"])
def test_a_single_reply_counts_until_it_is_sent(
    small_server: Callable[..., InProcessServer], monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    server = small_server()
    endpoint, nbytes, share = f"127.0.0.1:{server.port}", _fill_listing(server), 24  # Three eighths of all.
    if bound == "calls":
        monkeypatch.setattr(grpc_server, "MAX_CALLS", 8 * share // 3)
    else:
        monkeypatch.setattr(buffers, "MAX_UNSENT_BYTES", 8 * share // 3 * nbytes)

    def has_its_share() -> bool:
        calls = _listings(endpoint, share)
        time.sleep(1)  # Calls that are refused later are taken for admitted.
        for call in calls:
            call.cancel()
        return not any(map(_is_refused, calls))

    calls = _listings(endpoint, 80)
    wait_for(lambda: sum(map(_is_refused, calls)) == 80 - share, "the refusal of all beyond a client's share")
    assert len(_connect(server).ListNamespaces(pb.ListNamespacesRequest(), timeout=10).namespaces) == 2
    for call in calls:
        call.cancel()
    wait_for(has_its_share, "the end of all calls")


async def _begun_at_once(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """`begun` where callers wait for their turns."""
    return asyncio.create_task(work, context=contextvars.Context())


@pytest.mark.parametrize("begun", [runtime.begun, _begun_at_once])
def test_streams_of_lookups_hold_a_clients_share_of_unread_replies(
    begun: Any, small_server: Callable[..., InProcessServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "begun", begun)
    server, runs = small_server(), wire.encode_runs([BlockRun(0, [block_hash(0)] * 1_000)])
    name = _filled(server, 1, num_shards=16)
    request = pb.LookupRequest(namespace=name, runs=runs, lease_ttl_ms=60_000, locate=True)
    nbytes = pb.LookupReply(found=server.stub.Lookup(request, timeout=10)).ByteSize()
    assert nbytes > 2 * (64 << 10), "more than fits a client's window"
    monkeypatch.setattr(buffers, "MAX_UNSENT_BYTES", 4 * nbytes)

    def num_answered(*, reads: bool = True) -> int:
        """Of four streams with two requests each, how many get an answer to the first; their client then hangs up."""
        channel = _slow_channel(f"127.0.0.1:{server.port}")
        streams = [PoolStub(channel).LookupStream(iter([request] * 2), timeout=60) for _ in range(4)]
        time.sleep(1)  # Replies that are made later are taken for answers.
        count = sum(not next(stream).HasField("error") for stream in streams if reads)
        channel.close()
        return count

    assert 1 <= num_answered() <= 2
    for _ in range(4):
        num_answered(reads=False)
    wait_for(num_answered, "room for another client's replies")


@pytest.mark.parametrize("method", ["Lookup", "LookupStream", "PutStart"])
def test_a_reply_that_is_refused_leaves_no_lease_or_ticket(
    method: str, small_server: Callable[..., InProcessServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = small_server()
    name, runs = _filled(server, 1, num_shards=16), wire.encode_runs([BlockRun(0, [block_hash(0)] * 1_000)])
    request = pb.LookupRequest(namespace=name, runs=runs, lease_ttl_ms=60_000, locate=True)
    monkeypatch.setattr(buffers, "MAX_UNSENT_BYTES", 8)
    if method == "PutStart":
        monkeypatch.setattr(buffers, "SMALL_BYTES", 8)
    if method == "LookupStream":
        (reply,) = server.stub.LookupStream(iter([request]), timeout=10)
        assert reply.error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    else:
        put = pb.PutStartRequest(namespace=name, runs=wire.encode_runs([run_of("new")]))
        put.shards.CopyFrom(wire.encode_shards(ShardRange(0, 16)))
        with pytest.raises(grpc.RpcError) as refused:
            getattr(server.stub, method)(request if method == "Lookup" else put, timeout=10)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert server.on_loop(lambda: (len(server.pool.leases), len(server.pool.tickets))) == (0, 0)


def test_a_reply_that_nobody_reads_ends_with_its_connection(
    small_server: Callable[..., InProcessServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "CONNECTION_S", 5.0)
    monkeypatch.setattr(grpc_server, "MAX_STREAM_S", 1.0)
    server = small_server()
    _fill_listing(server)
    monkeypatch.setattr(grpc_server, "MAX_CALLS", 1)

    def is_answered() -> bool:
        try:
            return bool(_connect(server).Ping(pb.PingRequest(), timeout=10).version)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:  # type: ignore[attr-defined]
                raise
            return False

    (call,) = _listings(f"127.0.0.1:{server.port}", 1)
    call.initial_metadata()  # Which comes before the reply.
    assert not is_answered()
    wait_for(is_answered, "the end of the call")


# Messages


def test_messages_larger_than_the_limit_are_not_buffered(pool_server: StartServer) -> None:
    server = pool_server()
    with _served(server, 128 * MIB):
        for method in ("PutStart", "Lookup", "PutChunks", "LookupStream"):
            calls = HalfSentCalls(server.endpoint)
            most = range(grpc_server.MAX_STREAMS)
            streams = {calls.begin(method, 40 * MIB, 40 * MIB - 1, timeout_s=2) for _ in most}
            wait_for(lambda: calls.ended >= streams, "the end of all calls")  # noqa: B023
            calls.close()


@pytest.mark.parametrize("method", ["PutStart", "PutChunks", "LookupStream", CHECK])
def test_messages_whose_last_byte_never_comes_hold_what_was_sent(pool_server: StartServer, method: str) -> None:
    server, num_connections = pool_server(), 8
    with _served(server, num_connections * grpc_server.MAX_STREAMS * MESSAGE_BYTES + 32 * MIB):
        connections = [HalfSentCalls(server.endpoint) for _ in range(num_connections)]
        for calls in grpc_server.MAX_STREAMS * connections:
            calls.begin(method, MESSAGE_BYTES, MESSAGE_BYTES - 100)  # What a client may send unasked.
        assert (
            sum(calls.sent_bytes for calls in connections)
            > num_connections * grpc_server.MAX_STREAMS * MESSAGE_BYTES // 2
        )
        with grpc.insecure_channel(server.endpoint) as channel:
            checked = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
        for calls in connections:
            calls.close()


def test_a_message_has_to_arrive_in_time(
    small_server: Callable[..., InProcessServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "MESSAGE_S", 0.5)
    monkeypatch.setattr(buffers, "PIECE_S", 0.5)
    server = small_server()
    calls = HalfSentCalls(f"127.0.0.1:{server.port}")
    streams = {calls.begin(method, 100, 99) for method in METHODS if method != "LookupStream"}  # Which may be idle.
    wait_for(lambda: calls.ended >= streams, "the end of all calls")
    assert server.stub.Ping(pb.PingRequest(), timeout=10).version
    calls.close()


def test_every_call_counts_among_those_of_its_caller_and_is_made_again_if_it_is_refused_for_now(
    small_server: Callable[..., InProcessServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = small_server()
    with Client(ClientConfig(f"127.0.0.1:{server.port}", timeout_ms=10_000)) as client, monkeypatch.context() as busy:
        busy.setattr(grpc_server, "MAX_CALLS", 0)
        for method in SERVICE.methods:
            call = server.channel.stream_stream(f"/{SERVICE.full_name}/{method.name}")
            with pytest.raises(grpc.RpcError, match="calls of this caller are under way") as raised:
                list(call(iter([b""]), timeout=10))
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, method.name
        with pytest.raises(BusyError, match="calls of this caller are under way"):
            client.admin.ping()
        threading.Timer(0.1, busy.undo).start()
        client.admin.ping()
    assert dict(wire.metadata_of(OutOfSpaceError("no free slot"))) == {wire.RETRY_KEY: "-1"}, "gRPC never tries again"


def test_requests_whose_rest_does_not_come_leave_room_for_others(
    small_server: Callable[..., InProcessServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "MESSAGE_S", 3.0)
    monkeypatch.setattr(buffers, "PIECE_S", 3.0)
    server = small_server()
    calls = HalfSentCalls(f"127.0.0.1:{server.port}")
    streams = {calls.begin("Get", MESSAGE_BYTES, MESSAGE_BYTES) for _ in range(grpc_server.MAX_STREAMS)}
    most = 3 * buffers.MAX_LARGE // 8 + buffers.MAX_OWN_LARGE_WAITING
    wait_for(lambda: len(streams & calls.ended) == grpc_server.MAX_STREAMS - most, "the refusal of the others")
    names = run_of(*range(2 * MESSAGE_BYTES // HASH_BYTES))
    with pytest.raises(grpc.RpcError) as raised:
        _connect(server).Exists(pb.ExistsRequest(namespace=bytes(32), runs=wire.encode_runs([names])), timeout=5)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    wait_for(lambda: calls.ended >= streams, "the end of all")
    calls.close()


# Leases and tickets


def _connect(server: InProcessServer) -> PoolStub:
    """A client with a connection of its own."""
    channel = grpc.insecure_channel(f"127.0.0.1:{server.port}", [("grpc.use_local_subchannel_pool", 1)])
    return PoolStub(PiecedChannel(channel))  # type: ignore[no-untyped-call]


def _filled(server: InProcessServer, count: int, num_shards: int = 1) -> bytes:
    """The fingerprint of a namespace with blocks 0, 1, ..."""
    spec = namespace_spec(group_spec(chunk_bytes=CHUNK, num_shards=num_shards))

    def fill() -> bytes:
        name = server.pool.open_namespace(spec)[0].fingerprint
        grant = server.pool.put_start(name, [run_of(*range(count))], ShardRange(0, num_shards))
        server.pool.put_end(grant.ticket_id, [0] * count * num_shards)
        return name

    return server.on_loop(fill)


def _lease(stub: PoolStub, name: bytes, run: BlockRun) -> int:
    request = pb.LookupRequest(namespace=name, runs=wire.encode_runs([run]), prefix_only=True, lease_ttl_ms=120_000)
    return int(stub.Lookup(request, timeout=10).lease_id)


def test_leases_hold_a_bounded_number_of_blocks_however_often_they_name_one(
    small_server: Callable[..., InProcessServer],
) -> None:
    server = small_server(Limits(max_leased_blocks=10_000))
    name = _filled(server, 1)
    run = BlockRun(0, [block_hash(0)] * 1_000)
    greedy, other = _connect(server), _connect(server)
    assert sum(_lease(greedy, name, run) > 0 for _ in range(100)) == 4
    assert _lease(other, name, run)
    held = sum(len(lease.entries) for lease in server.pool.leases.values())
    assert held == 5_000


def test_a_client_that_leases_and_puts_all_it_can_leaves_more_for_others(
    small_server: Callable[..., InProcessServer],
) -> None:
    server = small_server(Limits(max_leases=60, max_tickets=20))
    name = _filled(server, 1)

    def put(stub: PoolStub, block: int) -> bool:
        request = pb.PutStartRequest(
            namespace=name, runs=wire.encode_runs([run_of(block)]), shards=wire.encode_shards(ShardRange(0, 1))
        )
        try:
            return bool(stub.PutStart(request, timeout=10).ticket_id)
        except grpc.RpcError as error:
            if "puts are under way; the limit is 20" not in (error.details() or ""):  # type: ignore[attr-defined]
                raise
            return False

    greedy, other, third = _connect(server), _connect(server), _connect(server)
    assert sum(_lease(greedy, name, run_of(0)) > 0 for _ in range(100)) == 23
    assert sum(_lease(other, name, run_of(0)) > 0 for _ in range(100)) == 11
    assert _lease(third, name, run_of(0))
    assert server.pool.counters["refused_leases"] == 200 - 23 - 11
    assert sum(put(greedy, 100 + nth) for nth in range(30)) == 8
    assert put(other, 1_000)


# Streams and connections


def test_connections_beyond_the_bound_are_closed_and_the_others_go_on(
    small_server: Callable[..., InProcessServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "MAX_CONNECTIONS", 20)
    monkeypatch.setattr(grpc_server, "QUEUES", 1)
    server = small_server()
    address = ("127.0.0.1", server.port)
    with ExitStack() as stack, Client(ClientConfig("{}:{}".format(*address), timeout_ms=10_000)) as client:
        client.admin.ping()
        connections = [stack.enter_context(socket.create_connection(address, 10)) for _ in range(40)]
        greetings = [connection.recv(1) for connection in connections]
        assert greetings.count(b"") > 20 - 2 and greetings[0]
        client.admin.ping()
        connections[0].close()
        again = lambda: stack.enter_context(socket.create_connection(address, 10)).recv(1)  # noqa: E731
        wait_for(again, "a connection in the place of one that has ended")


def test_thousands_of_idle_streams_hold_little(pool_server: StartServer) -> None:
    server = pool_server()
    with _served(server, IDLE_STREAMS_BYTES):
        connections = [HalfSentCalls(server.endpoint) for _ in range(150)]
        for calls in grpc_server.MAX_STREAMS * connections:
            calls.begin("LookupStream")
        too_many = len(connections) * grpc_server.MAX_STREAMS - Limits().max_streams
        assert too_many > 0
        wait_for(lambda: sum(len(calls.ended) for calls in connections) >= too_many, "the end")
        for calls in connections:
            calls.close()


# KV events


def test_a_huge_frame_to_the_event_ports_is_not_buffered(pool_server: StartServer) -> None:
    server = pool_server("--kv-events", "tcp://127.0.0.1:0", "--kv-events-replay", "tcp://127.0.0.1:0")
    found = wait_for(lambda: re.search(r"endpoint=(\S+)\s+replay=(\S+)", server.stderr), "the event ports")
    with _served(server, 64 * MIB), zmq.Context() as context:
        for endpoint, kind in zip(found.groups(), (zmq.XSUB, zmq.DEALER), strict=True):
            with context.socket(kind) as peer, context.socket(zmq.DEALER) as asking:
                for each in (peer, asking):
                    each.setsockopt(zmq.LINGER, 0)
                peer.connect(endpoint)
                peer.send(bytes(300 * MIB))
                asking.connect(found[2])
                asking.send_multipart((b"", bytes(8)))
                assert asking.poll(60_000), "a replay is not answered"
                time.sleep(1)  # Nothing tells when the frame has gone through.


def test_a_stream_that_sends_a_byte_now_and_then_ends(
    small_server: Callable[..., InProcessServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "PIECE_S", 1.0)

    def trickle() -> Iterator[pb.PutChunksRequest]:
        for _ in range(100):
            time.sleep(0.3)
            yield pb.PutChunksRequest()

    with pytest.raises(grpc.RpcError, match="moved less than") as raised:
        small_server().stub.PutChunks(trickle(), timeout=60)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
