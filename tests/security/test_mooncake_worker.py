"""Mooncake's client process parses what comes from the network: what it can do to the server once it is taken over."""

from __future__ import annotations

import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool_server.tiers.mooncake import store_process, worker
from kvpool_server.tiers.mooncake.store_process import StoreError, StoreProcess
from kvpool_server.tiers.mooncake.worker import (
    CODES,
    REQUEST,
    TEXT,
    MessageError,
    MessageSocket,
    Request,
    StoreConfig,
    socket_pair,
)
from tests.support.effort import effort
from tests.support.hostile_store import MISDEEDS

DEADLINE_S = 1.5
MIB = 1 << 20


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Runs the hostile process with short deadlines; the directory that a message makes if it is executed."""
    monkeypatch.setattr(store_process, "WORKER_MODULE", "tests.support.hostile_store")
    monkeypatch.setattr(store_process, "STAGING_BYTES", MIB)
    monkeypatch.setattr(store_process, "ANSWER_S", DEADLINE_S)
    monkeypatch.setattr(store_process, "LOOK_S", 0.2)
    monkeypatch.setenv("HOSTILE_MARK", str(tmp_path / "executed"))
    return tmp_path / "executed"


def _start(when: str, misdeed: str) -> StoreProcess:
    return StoreProcess(StoreConfig(f"{when}:{misdeed}", "", "", 0, "tcp", ""), 1)


@pytest.mark.parametrize("misdeed", sorted(MISDEEDS))
def test_an_answer_that_is_none_costs_the_process_and_nothing_else(misdeed: str, mark: Path) -> None:
    process = _start("ready", misdeed)
    try:
        channel = process.transfers.get()
        channel.memory[:] = 1  # A memory that was cut would end this process here.
        tracemalloc.start()
        began_at = time.monotonic()
        with pytest.raises(StoreError):
            channel.call("get", ["key"], 10)
        taken_s = time.monotonic() - began_at
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert channel.memory.min() == 1
        assert not process.is_alive and not mark.exists()
        assert peak < 4 * MIB and taken_s < DEADLINE_S + 20  # The process would take a minute.
    finally:
        process.end()


@pytest.mark.parametrize("misdeed", ["a pickle", "another type", "a long text", "a flood", "nothing", "the end"])
def test_a_start_that_is_none_is_an_error_in_time(misdeed: str, mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_process, "START_S", DEADLINE_S if misdeed == "nothing" else 5.0)
    with pytest.raises(StoreError, match=r"has sent an? |died at its start|no mooncake_master answers"):
        _start("start", misdeed)
    assert not mark.exists()


def test_what_the_process_says_at_its_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    process = StoreProcess.__new__(StoreProcess)
    ours, theirs = socket_pair()
    MessageSocket(theirs).send("fails\n2026-01-01 [info] forged\x1b[2J")
    process._channels = [store_process.StoreChannel(process, ours, np.zeros(0, np.uint8), 0)]
    with pytest.raises(StoreError) as caught:
        process._wait_until_ready("host:1")
    assert str(caught.value).isprintable()


# Messages


def test_the_longest_request_of_a_tier_fits_into_the_sockets_buffer_and_arrives_whole() -> None:
    """A send that waits for its reader would hold a thread of the tier."""
    ours, theirs = socket_pair()
    keys = [f"kvpool/{'a' * 64}/63/{nth:064x}" for nth in range(worker.MAX_KEYS)]
    request = Request("get", keys, 1 << 40, 1 << 26)
    MessageSocket(ours).send(request)
    receiver = MessageSocket(theirs)
    assert receiver.receive(REQUEST, 5) == request
    assert receiver.receive(REQUEST, 0.001) is None


def test_a_peer_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "SEND_S", 0.05)
    ours, theirs = socket_pair()
    sender = MessageSocket(ours)

    def send_all() -> None:
        for _ in range(1000):
            sender.send(["x" * 1000] * 100)

    with pytest.raises(OSError, match="timed out"):
        send_all()
    theirs.close()


@settings(max_examples=effort(500))
@given(st.binary(max_size=200), st.sampled_from([CODES, REQUEST, TEXT]))
def test_no_bytes_break_a_receiver(data: bytes, decoder: msgspec.msgpack.Decoder[Any]) -> None:
    ours, theirs = socket_pair()
    with ours, theirs:
        theirs.send(data)
        theirs.close()
        receiver = MessageSocket(ours)

        def receive_all() -> None:
            while receiver.receive(decoder, 5) is not None:
                pass

        with pytest.raises((MessageError, EOFError)):
            receive_all()


# The other direction

MEMORY_BYTES = 4096


class _Store:
    """In the place of Mooncake's client: which addresses it was given."""

    def __init__(self) -> None:
        self.got: list[tuple[list[str], list[int], list[int]]] = []

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self.got.append((keys, addresses, sizes))
        return sizes


def _serve(send: Callable[[socket.socket], None]) -> tuple[_Store, np.ndarray[Any, Any], socket.socket]:
    """The worker's side of a channel, which gets what `send` sends until it ends by itself."""
    ours, theirs = socket_pair()
    store, memory = _Store(), np.zeros(MEMORY_BYTES, np.uint8)
    serving = threading.Thread(target=worker.serve, args=(store, MessageSocket(theirs), memory, threading.Lock()))
    serving.start()
    send(ours)
    serving.join(10)
    assert not serving.is_alive()
    return store, memory, ours


BAD_CALLS: dict[str, list[Any]] = {
    "behind the memory": ["get", ["a"], MEMORY_BYTES - 1, 2],
    "the last of several behind the memory": ["put", ["a", "b"], 0, MEMORY_BYTES // 2 + 1],
    "far behind the memory": ["get", ["a"], 1 << 61, 1 << 61],
    "before the memory": ["put", ["a"], -1, 1],
    "of less than no bytes": ["get", ["a"], 1, -1],
    "another call": ["eval", ["a"]],
    "a key of another type": ["get", [1], 0, 1],
    "too many keys": ["exist", ["a"] * (worker.MAX_KEYS + 1)],
    "a long key": ["exist", ["a" * (worker.MAX_KEY_CHARS + 1)]],
    "a map": [{"what": "exist"}],
}


@pytest.mark.parametrize("what", sorted(BAD_CALLS))
def test_a_call_that_is_none_ends_the_channel_and_reaches_no_store(what: str) -> None:
    store, _, ours = _serve(lambda end: MessageSocket(end).send(BAD_CALLS[what]))
    assert not store.got
    with pytest.raises((EOFError, ConnectionResetError)):
        MessageSocket(ours).receive(CODES, 5)


def test_a_call_within_the_memory_reaches_the_store() -> None:
    def send(end: socket.socket) -> None:
        channel = MessageSocket(end)
        channel.send(Request("get", ["a", "b"], 96, 2000))
        assert channel.receive(CODES, 5) == [2000, 2000]
        end.shutdown(socket.SHUT_RDWR)

    store, memory, _ = _serve(send)
    first = memory.ctypes.data + 96
    assert store.got == [(["a", "b"], [first, first + 2000], [2000, 2000])]


def test_no_module_of_the_server_unpickles() -> None:
    root = Path(store_process.__file__).parents[2]
    for path in root.rglob("*.py"):
        text = path.read_text()
        assert "pickle" not in text and "multiprocessing.connection" not in text, os.fspath(path)
