"""Many clients at once: none starves, and one that does not read delays nobody and costs a bounded amount of memory.

The clients of the data port are raw sockets, on threads: the kernel fills their buffers without Python's lock.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message_factory import GetMessageClass

from kvpool.client.client import Client
from kvpool.client.handles import Namespace
from kvpool.protocol import wire
from kvpool.protocol.types import BlockRun
from kvpool.transport.data_port import GREETING_BYTES, REPLY_BYTES, Header, Kind, Reply, Status
from kvpool.v1 import pool_pb2 as pb
from kvpool.v1.pool_pb2_grpc import PoolStub
from kvpool_server.rpc.inbox import MAX_STREAM_S
from tests.conftest import Connect, StartServer
from tests.support.calls import SERVICE
from tests.support.data_client import receive_exactly
from tests.support.processes import ServerProcess, own_bytes, wait_for
from tests.support.values import block_hash, group_spec, namespace_spec
from tests.support.workers import workers_of

MIB = 1 << 20
SLOT_BYTES = 128 << 10
PREFIX_BLOCKS = 128
"""16 MiB, more than the sockets' buffers hold: who does not read them keeps the data worker waiting."""
BLOCKS_AT_ONCE = 8
LEAST_SHARE = 0.25
"""Of 64 readers, the one that gets least gets at least this part of the mean."""
MEAN_PAYLOADS = 40
"""What each reader has got in the mean when shares are compared."""

READER_BYTES = 1 * MIB
"""What a reader of the data port costs at most in a data worker's own memory."""
CALL_BYTES = 16 * MIB
"""What a call whose client does not read costs at most in the server's own memory, as in docs/how-to/operations.md."""
MAX_SENT = 1_000
"""Lookups of 128 KiB that a client sends without reading the answers, if the server lets it."""
SLOW_LEASE_MS = 4_000
WAIT_S = 60.0


@dataclass
class Prefix:
    """A prefix in a server's arena, and a lease on it."""

    server: ServerProcess
    client: Client
    namespace: Namespace
    run: BlockRun

    @property
    def nbytes(self) -> int:
        return len(self.run) * SLOT_BYTES

    def reader(self, lease_ttl_ms: int = 60_000) -> Reader:
        """A connection of the data port with a permit to read the whole prefix."""
        request = self.lookup_request(lease_ttl_ms)
        with grpc.insecure_channel(self.server.endpoint) as channel:
            found = PoolStub(channel).Lookup(request, timeout=WAIT_S)  # type: ignore[no-untyped-call]
        assert found.hits[0].num_leading == len(self.run)
        port = self.client.rpc.ping().data_port
        return Reader(port.port, found.lease_id, found.hits[0].permit, found.hits[0].offsets)

    def lookup_request(self, lease_ttl_ms: int = 60_000) -> pb.LookupRequest:
        return pb.LookupRequest(
            namespace=self.namespace.fingerprint,
            runs=wire.encode_runs([self.run]),
            prefix_only=True,
            lease_ttl_ms=lease_ttl_ms,
            locate=True,
        )


class Reader:
    """A connection of the data port that may read all of a prefix."""

    def __init__(self, port: int, lease_id: int, permit: bytes, offsets: bytes):
        self.num_blocks = len(offsets) // 8
        self.num_read = 0
        self.connection = socket.create_connection(("127.0.0.1", port), WAIT_S)
        self._scratch = bytearray(256 << 10)
        receive_exactly(self.connection, GREETING_BYTES)
        header = Header(Kind.READ, 0, self.num_blocks, SLOT_BYTES, 0, lease_id, permit)
        self.connection.sendall(header.encode() + offsets)

    def request(self, num_blocks: int) -> None:
        self.connection.sendall(Header(Kind.MOVE, 0, num_blocks, SLOT_BYTES).encode())

    def receive(self, num_blocks: int) -> None:
        """The answer to a request."""
        status, _, nbytes = Reply.decode(receive_exactly(self.connection, REPLY_BYTES))
        assert (status, nbytes) == (Status.OK, num_blocks * SLOT_BYTES)
        with memoryview(self._scratch) as scratch:
            while nbytes:
                received = self.connection.recv_into(scratch[:nbytes])
                assert received, "the data port has hung up"
                nbytes -= received
        self.num_read += 1

    def read(self, num_blocks: int = BLOCKS_AT_ONCE) -> None:
        self.request(num_blocks)
        self.receive(num_blocks)

    def receive_to_the_end(self) -> int:
        """Receives until the data port hangs up; returns how many bytes there were."""
        total = 0
        while received := self.connection.recv_into(self._scratch):
            total += received
        return total


@pytest.fixture
def prefix(pool_server: StartServer, connect: Connect) -> Prefix:
    """A prefix of 16 MiB in a server with one data worker: all connections share its interpreter."""
    server = pool_server("--memory", "64MiB", "--data-workers", "1", "--max-ttl-ms", "600000")
    return _stored(server, connect(server), [block_hash(nth) for nth in range(PREFIX_BLOCKS)], SLOT_BYTES)


def _stored(
    server: ServerProcess, client: Client, hashes: Sequence[bytes], chunk_bytes: int, num_shards: int = 1
) -> Prefix:
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=chunk_bytes, num_shards=num_shards)))
    run = BlockRun(0, hashes)

    def fill(indices: Sequence[int], buffers: Sequence[Any]) -> None:
        for buffer in buffers:
            buffer[:] = 1

    client.put(namespace, [run], fill)
    return Prefix(server, client, namespace, run)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("num_readers", [8, pytest.param(60, marks=pytest.mark.more)])
def test_readers_of_one_prefix_get_about_as_much_each(prefix: Prefix, opened: ExitStack, num_readers: int) -> None:
    """They read until the shares are fair, after a number of payloads: a busy machine may stop one thread for long."""
    readers = [prefix.reader() for _ in range(num_readers)]
    for reader in readers:
        opened.enter_context(reader.connection)
    together, has_ended = threading.Barrier(num_readers), threading.Event()

    def read(reader: Reader) -> None:
        together.wait(WAIT_S)
        while not has_ended.is_set():
            reader.read()

    def is_fair() -> bool:
        counts = [reader.num_read for reader in readers]
        mean = sum(counts) / num_readers
        return mean >= MEAN_PAYLOADS and min(counts) >= LEAST_SHARE * mean

    with ThreadPoolExecutor(num_readers) as threads:
        reading = [threads.submit(read, reader) for reader in readers]
        try:
            wait_for(is_fair, "fair shares", WAIT_S)
        finally:
            has_ended.set()
        for each in reading:
            each.result()


def test_a_reader_that_stops_delays_no_other(prefix: Prefix, opened: ExitStack) -> None:
    stopped, *others = [prefix.reader() for _ in range(5)]
    for reader in (stopped, *others):
        opened.enter_context(reader.connection)
    stopped.request(PREFIX_BLOCKS)
    with ThreadPoolExecutor(len(others)) as threads:
        list(threads.map(lambda reader: [reader.read() for _ in range(50)], others))
    assert [reader.num_read for reader in others] == [50] * len(others)
    stopped.receive(PREFIX_BLOCKS)  # It was served all the time.


def test_a_reader_that_stops_is_disconnected_when_its_lease_ends(prefix: Prefix, opened: ExitStack) -> None:
    (worker,) = workers_of(prefix.server)
    before = _num_sockets(worker)
    asked_at = time.monotonic()
    stopped = prefix.reader(SLOW_LEASE_MS)
    opened.enter_context(stopped.connection)
    stopped.request(PREFIX_BLOCKS)
    assert _num_sockets(worker) == before + 1
    wait_for(lambda: _num_sockets(worker) == before, "the end of the connection", WAIT_S)
    assert time.monotonic() - asked_at >= 0.9 * SLOW_LEASE_MS / 1000, "disconnected before its lease ended"
    assert stopped.receive_to_the_end() < prefix.nbytes


def test_readers_that_stop_cost_a_data_worker_little_memory(prefix: Prefix, opened: ExitStack) -> None:
    (worker,) = workers_of(prefix.server)
    before = own_bytes(worker)
    readers = [prefix.reader() for _ in range(64)]
    for reader in readers:
        opened.enter_context(reader.connection)
        reader.request(PREFIX_BLOCKS)
    last = prefix.reader()
    opened.enter_context(last.connection)
    last.read(PREFIX_BLOCKS)
    used = own_bytes(worker) - before
    print(f"64 readers that stopped: {used / MIB:.1f} MiB")
    assert used < 64 * READER_BYTES


FEW_OR_MANY = pytest.mark.parametrize("num_clients", [8, pytest.param(60, marks=pytest.mark.more)])


@FEW_OR_MANY
def test_clients_that_read_no_answers_to_lookups_are_read_no_further(
    pool_server: StartServer, connect: Connect, opened: ExitStack, num_clients: int
) -> None:
    server = pool_server("--memory", "64MiB", "--max-ttl-ms", "600000")
    client = connect(server)
    # Many shards have long answers to lookups of few blocks: the leases of all clients together have a bound.
    long = _stored(server, client, [block_hash(nth) for nth in range(512)], 16, num_shards=64)
    before = server.own_bytes
    request = long.lookup_request()
    sent = [0] * num_clients
    done = threading.Event()

    def requests(nth: int) -> Iterator[pb.LookupRequest]:
        for _ in range(MAX_SENT):
            sent[nth] += 1
            yield request
        done.wait(60)

    opened.callback(done.set)
    for nth in range(num_clients):
        call = PoolStub(_channel(server, opened)).LookupStream(requests(nth), timeout=60)  # type: ignore[no-untyped-call]
        opened.callback(call.cancel)
    _wait_until_still(lambda: sum(sent))
    assert not client.admin.stats().counters["refused_leases"], "answers without leases are short"
    assert max(sent) < MAX_SENT, "the server reads on while its answers wait"
    for _ in range(50):
        assert client.lookup(long.namespace, [long.run], lease=False).hits[0].num_leading == len(long.run)
    used = server.own_bytes - before
    print(f"{num_clients} clients that read no answers: {used / MIB / num_clients:.1f} MiB each, {max(sent)} sent")
    assert used < num_clients * CALL_BYTES


@FEW_OR_MANY
def test_clients_that_do_not_read_what_they_asked_for_cost_a_few_pieces(
    prefix: Prefix, connect: Connect, opened: ExitStack, num_clients: int
) -> None:
    server = prefix.server
    before = server.own_bytes
    found = prefix.client.lookup(prefix.namespace, [prefix.run], locate=True)
    offsets = np.frombuffer(found.slots[0].offsets, "<u8").tolist()
    request = pb.GetChunksRequest(lease_id=found.lease_id, offsets=offsets, region_bytes=SLOT_BYTES)
    for _ in range(num_clients):
        call = PoolStub(_channel(server, opened)).GetChunks(request, timeout=60)  # type: ignore[no-untyped-call]
        opened.callback(call.cancel)
    reader = connect(server, transport="grpc")
    namespace = reader.open_namespace(prefix.namespace.spec)
    lookup = reader.lookup(namespace, [prefix.run])
    read: list[int] = []
    reader.get(namespace, lookup.lease_id, [prefix.run], lambda indices, buffers: read.extend(indices))
    assert len(read) == PREFIX_BLOCKS
    used = server.own_bytes - before
    print(f"{num_clients} clients that do not read: {used / MIB / num_clients:.1f} MiB each")
    assert used < num_clients * CALL_BYTES


@pytest.mark.parametrize("deadline_s", [None, 2 * MAX_STREAM_S], ids=["none", "too-late"])
def test_every_call_with_a_stream_needs_a_deadline(stub: PoolStub, deadline_s: float | None) -> None:
    def ask(method: Any) -> object:
        request, call = GetMessageClass(method.input_type)(), getattr(stub, method.name)
        reply = call(iter([request]) if method.client_streaming else request, timeout=deadline_s)
        return next(reply) if method.server_streaming else reply

    for method in SERVICE.methods:
        if method.client_streaming or method.server_streaming:
            with pytest.raises(grpc.RpcError, match="give it one within 600 s") as raised:
                ask(method)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT, method.name


def _channel(server: ServerProcess, opened: ExitStack) -> grpc.Channel:
    """A connection of its own: channels to one endpoint share one otherwise."""
    return opened.enter_context(grpc.insecure_channel(server.endpoint, [("grpc.use_local_subchannel_pool", 1)]))


def _num_sockets(pid: int) -> int:
    """TCP and Unix sockets that a process has open."""
    return sum(map(_is_socket, Path(f"/proc/{pid}/fd").iterdir()))


def _is_socket(descriptor: Path) -> bool:
    try:
        return os.readlink(descriptor).startswith("socket:")
    except FileNotFoundError:  # Closed since the listing.
        return False


def _wait_until_still(count: Callable[[], int]) -> None:
    """Until a count has stayed the same for half a second."""
    last, since = -1, time.monotonic()

    def is_still() -> bool:
        nonlocal last, since
        if (now := count()) != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since > 0.5

    wait_for(is_still, "the clients to be held up")
