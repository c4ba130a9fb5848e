"""Many clients at once: none starves, and one that does not read delays nobody and costs a bounded amount of memory.

The clients of the data port are raw sockets, on threads: the kernel fills their buffers without Python's lock.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message_factory import GetMessageClass

from kvpool.transport.data_port import Kind, Status
from kvpool.v1.pool_pb2_grpc import PoolStub
from kvpool_server.rpc.buffers import MAX_STREAM_S
from tests.conftest import Connect, StartServer
from tests.support.calls import SERVICE
from tests.support.data_client import DataClient
from tests.support.processes import own_bytes, wait_for
from tests.support.values import group_spec, namespace_spec, run_of
from tests.support.workers import workers_of

MIB = 1 << 20
SLOT_BYTES = 128 << 10
PREFIX_BLOCKS = 128
"""16 MiB, more than the sockets' buffers hold: who does not read them keeps the data worker waiting."""
BLOCKS_AT_ONCE = 8
READER_BYTES = 1 * MIB
"""What a reader of the data port costs at most in a data worker's own memory."""
SLOW_LEASE_MS = 4_000
WAIT_S = 60.0


class Reader(DataClient):
    """A connection of the data port that may read all of a prefix."""

    num_read = 0

    def request(self, num_blocks: int) -> None:
        self.move(0, num_blocks, SLOT_BYTES)

    def receive_blocks(self, num_blocks: int) -> None:
        """The answer to a request."""
        assert self.reply() is Status.OK
        left, scratch = num_blocks * SLOT_BYTES, bytearray(256 << 10)
        while left:
            received = self.socket.recv_into(memoryview(scratch)[:left])
            assert received, "the data port has hung up"
            left -= received
        self.num_read += 1

    def read(self) -> None:
        self.request(BLOCKS_AT_ONCE)
        self.receive_blocks(BLOCKS_AT_ONCE)


MakeReader = Callable[..., Reader]


@pytest.fixture
def worker_and_reader(pool_server: StartServer, connect: Connect) -> Iterator[tuple[int, MakeReader]]:
    """The one data worker of a server with a prefix of 16 MiB, and what makes readers of the prefix."""
    server = pool_server("--memory", "64MiB", "--data-workers", "1", "--max-ttl-ms", "600000")
    client, run = connect(server), run_of(*range(PREFIX_BLOCKS))
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=SLOT_BYTES)))

    def fill(indices: Sequence[int], buffers: Sequence[Any]) -> None:
        for buffer in buffers:
            buffer[:] = 1

    client.put(namespace, [run], fill)
    port = client.rpc.ping().data_port
    with ExitStack() as stack:

        def reader(lease_ttl_ms: int = 60_000) -> Reader:
            leasing = connect(server, lease_ttl_ms=lease_ttl_ms)
            lookup = leasing.lookup(namespace, [run], locate=True)
            slots = lookup.slots[0]
            made = stack.enter_context(Reader(port.port, port.nonce))
            made.socket.settimeout(WAIT_S)
            offsets = np.frombuffer(slots.offsets, "<u8").tolist()
            made.show(Kind.READ, lookup.lease_id, offsets, SLOT_BYTES, slots.permit)
            return made

        (worker,) = workers_of(server)
        yield worker, reader


def test_readers_of_one_prefix_get_about_as_much_each(worker_and_reader: tuple[int, MakeReader]) -> None:
    """They read until the shares are fair, after a number of payloads: a busy machine may stop one thread for long."""
    _, reader = worker_and_reader
    num_readers, mean_payloads, least_share = 60, 40, 0.25
    readers = [reader() for _ in range(num_readers)]
    together, has_ended = threading.Barrier(num_readers), threading.Event()

    def read(reader: Reader) -> None:
        together.wait(WAIT_S)
        while not has_ended.is_set():
            reader.read()

    def is_fair() -> bool:
        counts = [reader.num_read for reader in readers]
        mean = sum(counts) / num_readers
        return mean >= mean_payloads and min(counts) >= least_share * mean

    with ThreadPoolExecutor(num_readers) as threads:
        reading = [threads.submit(read, reader) for reader in readers]
        try:
            wait_for(is_fair, "fair shares", WAIT_S)
        finally:
            has_ended.set()
        for each in reading:
            each.result()


def test_readers_that_stop_cost_little_memory_delay_nobody_and_end_with_their_leases(
    worker_and_reader: tuple[int, MakeReader],
) -> None:
    worker, reader = worker_and_reader
    before = own_bytes(worker)
    *stopped, last = [reader() for _ in range(64)]
    others = [reader() for _ in range(4)]
    asked_at = time.monotonic()
    brief = reader(SLOW_LEASE_MS)
    for each in (*stopped, last, brief):
        each.request(PREFIX_BLOCKS)
    with ThreadPoolExecutor(len(others)) as threads:
        list(threads.map(lambda reader: [reader.read() for _ in range(50)], others))
    assert [reader.num_read for reader in others] == [50] * len(others)
    last.receive_blocks(PREFIX_BLOCKS)  # It was served all the time.
    used = own_bytes(worker) - before
    print(f"64 readers that stopped: {used / MIB:.1f} MiB")
    assert used < 64 * READER_BYTES

    connected = _num_sockets(worker)
    wait_for(lambda: _num_sockets(worker) < connected, "the end of the connection", WAIT_S)
    assert time.monotonic() - asked_at >= 0.9 * SLOW_LEASE_MS / 1000, "disconnected before its lease ended"
    received = 0
    while nbytes := len(brief.socket.recv(256 << 10)):
        received += nbytes
    assert received < PREFIX_BLOCKS * SLOT_BYTES, "a lease that has ended is still served"


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


def _num_sockets(pid: int) -> int:
    """TCP and Unix sockets that a process has open."""
    return sum(map(_is_socket, Path(f"/proc/{pid}/fd").iterdir()))


def _is_socket(descriptor: Path) -> bool:
    try:
        return os.readlink(descriptor).startswith("socket:")
    except FileNotFoundError:  # Closed since the listing.
        return False
