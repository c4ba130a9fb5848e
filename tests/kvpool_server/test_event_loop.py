"""Callers take turns on the loop, and gRPC's events reach it together, however many have come since its last pass."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import socket
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kvpool_server.process.event_loop import FLOW, MAX_DIRECT, PASS_S, EventLoop, begun


def _context(flow: str) -> contextvars.Context:
    context = contextvars.copy_context()
    context.run(FLOW.set, flow)
    return context


def _log_of(schedule: Callable[[asyncio.AbstractEventLoop, list[str]], None]) -> list[str]:
    """What the callbacks have logged once there are none left."""
    log: list[str] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        schedule(loop, log)
        while len(log) < 300:
            await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(asyncio.wait_for(run(), 30))
    return log


def test_callers_take_turns_and_each_ones_callbacks_keep_their_order() -> None:
    def schedule(loop: asyncio.AbstractEventLoop, log: list[str]) -> None:
        busy = _context("busy")
        for nth in range(299):
            loop.call_soon(log.append, f"busy {nth}", context=busy)
        loop.call_soon(log.append, "other", context=_context("other"))

    log = _log_of(schedule)
    assert log.index("other") <= MAX_DIRECT + 1, "the other waits for all that the busy one has"
    log.remove("other")
    assert log == [f"busy {nth}" for nth in range(299)]


def test_callbacks_keep_their_order_beyond_those_that_go_directly() -> None:
    def schedule(loop: asyncio.AbstractEventLoop, log: list[str]) -> None:
        busy = _context("busy")

        def more() -> None:
            loop._num_direct = 0  # type: ignore[attr-defined]  # As when gRPC has events.
            for nth in range(300):
                loop.call_soon(log.append, f"{nth}", context=busy)

        for _ in range(MAX_DIRECT):
            loop.call_soon(int, context=busy)
        loop.call_soon(more, context=busy)

    assert _log_of(schedule) == [f"{nth}" for nth in range(300)]


def test_a_pass_is_short_whatever_is_ready() -> None:
    passes = []

    def schedule(loop: asyncio.AbstractEventLoop, log: list[str]) -> None:
        busy = _context("busy")
        for _ in range(50 + MAX_DIRECT):
            loop.call_soon(time.sleep, 2 * PASS_S, context=busy)

        def count() -> None:
            log.append("pass")
            loop.call_soon(count)

        loop.call_soon(count)
        loop.call_soon(lambda: passes.append(len(log)), context=busy)

    _log_of(schedule)
    assert passes[0] >= 45, "callbacks of nobody wait for those of a caller"


@pytest.mark.parametrize("is_busy", [False, True])
def test_work_that_is_begun_takes_no_turn_where_others_wait_for_theirs(is_busy: bool) -> None:
    def schedule(loop: asyncio.AbstractEventLoop, log: list[str]) -> None:
        async def work() -> None:
            log.append("works")
            await asyncio.sleep(0)
            log.append("worked")

        async def stream() -> None:
            sending = await begun(work())
            log.append("reads on")
            if sending is not None:
                await sending

        for nth in range(300 if is_busy else 0):
            loop.call_soon(log.append, f"busy {nth}", context=_context("busy"))
        tasks.append(loop.create_task(stream(), context=_context("stream")))
        loop.call_later(0.05, log.extend, ["end"] * 300)

    tasks: list[asyncio.Task[None]] = []
    log = [each for each in _log_of(schedule) if each in ("works", "worked", "reads on")]
    assert log == (["reads on", "works", "worked"] if is_busy else ["works", "worked", "reads on"])


def test_a_callback_that_fails_is_told_of_and_one_that_is_cancelled_does_not_run() -> None:
    told: list[str] = []

    def fail() -> None:
        raise ValueError("it fails")

    def schedule(loop: asyncio.AbstractEventLoop, log: list[str]) -> None:
        loop.set_exception_handler(lambda _, context: told.append(str(context["exception"])))
        busy = _context("busy")
        for _ in range(MAX_DIRECT):
            loop.call_soon(log.append, "direct", context=busy)
        loop.call_soon(fail, context=busy)
        loop.call_soon(log.append, "cancelled", context=busy).cancel()
        loop.call_soon(log.extend, ["after"] * 300, context=busy)

    assert set(_log_of(schedule)) == {"direct", "after"}
    assert told == ["it fails"]


def test_the_socket_is_empty_when_the_events_have_been_handled() -> None:
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    handled: list[int] = []

    def handle() -> None:
        reader.recv(1)
        handled.append(1)
        if len(handled) == 1:
            writer.send(b"1")  # Of an event that comes meanwhile.

    with reader, writer, contextlib.closing(EventLoop()) as loop:
        writer.send(bytes(500))
        loop._new_batch(reader, handle)
        assert reader.recv(10, socket.MSG_PEEK) == b"1", "the loop is woken for the late event"
        loop._new_batch(reader, handle)
        with pytest.raises(BlockingIOError):
            reader.recv(1)


def test_grpc_is_recognized_and_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Callable[..., Any]] = []
    mend = EventLoop._new_batch
    monkeypatch.setattr(EventLoop, "_new_batch", lambda *args: (calls.append(args[2]), mend(*args)))

    async def run() -> None:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary("/nobody/knows")(b"")
        assert calls, "gRPC reads its events in another way: is the mend still needed?"
        before = len(calls)
        reader, writer = socket.socketpair()
        with reader, writer:
            loop, came = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(reader, came.set)
            writer.send(b"1")
            await came.wait()
            loop.remove_reader(reader)
        await server.stop(None)
        assert all(call.func.__self__.__class__.__module__.startswith("grpc.") for call in calls[before:])  # type: ignore[attr-defined]

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(run())
