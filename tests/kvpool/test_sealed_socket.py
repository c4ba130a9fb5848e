"""Sealed connections: what is sent arrives, and nothing else does."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.protocol.errors import TransferError
from kvpool.transport.data_port import receive_some, time_out
from kvpool.transport.sealed_socket import RANDOM_BYTES, RECORD_BYTES, SealedSocket
from tests.support.data_client import receive_exactly

SECRET = bytes(range(32))
OVERHEAD_BYTES = 20
"""Of a record, beside its plaintext."""


class Pair:
    """Two ends that share a secret, and the raw connection of each."""

    def __init__(self, client_secret: bytes = SECRET, server_secret: bytes = SECRET):
        self.raw_client, self.raw_server = socket.socketpair()
        randoms = os.urandom(RANDOM_BYTES), os.urandom(RANDOM_BYTES)
        self.client = SealedSocket(self.raw_client, client_secret, *randoms, is_client=True)
        self.server = SealedSocket(self.raw_server, server_secret, *randoms, is_client=False)
        for each in (self.client, self.server):
            time_out(each, 10.0)

    def close(self) -> None:
        self.client.close()
        self.server.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def _in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def _records_of(pair: Pair, *texts: bytes) -> list[bytes]:
    """What the client puts on the wire for some plaintexts, a record each."""
    found = []
    for text in texts:
        pair.client.sendall(text)
        found.append(receive_exactly(pair.raw_server, len(text) + OVERHEAD_BYTES))
    return found


@settings(deadline=None, max_examples=25)
@given(
    sent=st.lists(st.integers(1, 3 << 20), min_size=1, max_size=6),
    received=st.lists(st.integers(1, 3 << 20), min_size=1, max_size=6),
    is_client=st.booleans(),
)
def test_buffers_of_any_sizes_arrive_in_order(sent: list[int], received: list[int], is_client: bool) -> None:
    pair = Pair()
    sender, receiver = (pair.client, pair.server) if is_client else (pair.server, pair.client)
    data = random.Random(sum(sent)).randbytes(sum(sent))
    views, start = [], 0
    for size in sent:
        views.append(memoryview(data)[start : start + size])
        start += size

    def send() -> None:
        left = views
        while left:
            left = sender.send_some(left)
        sender.shutdown(socket.SHUT_WR)

    sending = _in_background(send)
    found, left = [], len(data)
    while left:
        buffers = []
        for size in received:
            buffers.append(bytearray(min(size, left)))
            left -= len(buffers[-1])
        found += buffers
        to_fill = [memoryview(buffer) for buffer in buffers if buffer]
        while to_fill:
            to_fill = receive_some(receiver, to_fill)
    with pytest.raises(EOFError):  # Nothing is behind the last record.
        receive_exactly(receiver, 1)
    sending.join(10)
    pair.close()
    assert b"".join(found) == data


def test_two_connections_of_one_secret_share_no_key_and_no_id() -> None:
    one, other = Pair(), Pair()
    (first,), (second,) = _records_of(one, b"text" * 9), _records_of(other, b"text" * 9)
    assert first != second and b"text" not in first
    assert one.client.channel_id == one.server.channel_id != other.client.channel_id
    other.raw_client.sendall(first)
    with pytest.raises(TransferError, match="does not share"):
        receive_exactly(other.server, 36)
    one.close()
    other.close()


@pytest.mark.parametrize("what", ["flipped", "replayed", "reordered", "reflected", "cut short", "length", "dropped"])
def test_what_is_changed_on_the_way_is_never_received(pair: Pair, what: str) -> None:
    first, second = _records_of(pair, b"first " * 50, b"second" * 50)
    if what == "flipped":
        dice = random.Random(7)
        for _ in range(100):
            one = Pair()
            (record,) = _records_of(one, b"x" * 100)
            bit = dice.randrange(32, 8 * len(record))
            changed = bytearray(record)
            changed[bit // 8] ^= 1 << bit % 8
            one.raw_client.sendall(changed)
            with pytest.raises(TransferError):
                receive_exactly(one.server, 100)
            one.close()
        return
    target, raw, sent = pair.server, pair.raw_client, b""
    if what == "replayed":
        sent = first + first
    elif what == "reordered":
        sent = second + first
    elif what == "dropped":
        sent = second
    elif what == "cut short":
        sent = (10).to_bytes(4, "little") + first[4:]
    elif what == "length":
        sent = (RECORD_BYTES + 1).to_bytes(4, "little") + first[4:]
    else:
        target, raw, sent = pair.client, pair.raw_server, first
    raw.sendall(sent)
    with pytest.raises(TransferError, match="does not share"):
        receive_exactly(target, 600)


def test_who_has_another_secret_is_not_heard() -> None:
    pair = Pair(client_secret=bytes(32))
    pair.client.sendall(b"let me in")
    with pytest.raises(TransferError, match="does not share"):
        receive_exactly(pair.server, 9)
    pair.close()


def test_a_connection_that_ends_inside_a_record_is_an_error(pair: Pair) -> None:
    (record,) = _records_of(pair, b"x" * 100)
    pair.raw_client.sendall(record[:-1])
    pair.raw_client.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError, match="closed the connection"):
        receive_exactly(pair.server, 100)


@pytest.mark.parametrize("direction", ["receives", "sends"])
def test_a_peer_that_trickles_does_not_stretch_a_timeout(pair: Pair, direction: str) -> None:
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.02):
            try:
                if direction == "receives":
                    pair.raw_client.send(b"x")
                else:
                    pair.raw_client.recv(1)
            except OSError:
                return

    if direction == "receives":
        (record,) = _records_of(pair, b"x" * 1000)
        pair.raw_client.sendall(record[:10])
    time_out(pair.server, 0.3)
    trickling = _in_background(trickle)
    left = [memoryview(bytearray(4 << 20))]
    move_some = pair.server.receive_some if direction == "receives" else pair.server.send_some
    for _ in range(3):
        began = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            assert move_some(left) == left, "a record moves as a whole"
        assert time.monotonic() - began < 10.0  # All of what trickles takes 20 s, or for ever.
    stop.set()
    trickling.join(5)


def test_a_call_that_has_timed_out_goes_on_where_it_was(pair: Pair) -> None:
    data = random.Random(1).randbytes(3 << 20)
    left = [memoryview(data)]
    time_out(pair.client, 0.01)
    time_out(pair.server, 0.01)
    found = memoryview(bytearray(len(data)))
    to_fill, num_unfinished = [found], 0
    while to_fill:  # One thread: a record is larger than what lies between the two.
        with contextlib.suppress(BlockingIOError):
            if left:
                before, left = left, pair.client.send_some(left)
                num_unfinished += left == before
        with contextlib.suppress(BlockingIOError):
            to_fill = pair.server.receive_some(to_fill)
    assert bytes(found) == data
    assert num_unfinished
