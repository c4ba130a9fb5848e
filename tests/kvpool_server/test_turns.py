"""Work in steps leaves the loop to others, callers take turns on the loop, and the probe sees who holds it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import socket
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any
from unittest.mock import patch

import grpc
import pytest
from prometheus_client import CollectorRegistry

from kvpool_server.app import monitoring
from kvpool_server.app.monitoring import PROBE_EVERY_S, WINDOW_S, LoopLag
from kvpool_server.cache.steps import Steps
from kvpool_server.process.runtime import FLOW, MAX_DIRECT, PASS_S, EventLoop, begun
from kvpool_server.rpc import turns as server_turns
from kvpool_server.rpc.turns import TURN_S, Turns, call_with_its_work, when_ended

STEP_S = TURN_S / 2


def _on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        with asyncio.Runner(loop_factory=EventLoop) as runner:
            runner.run(asyncio.wait_for(test(), 30))

    return functools.wraps(test)(run)


def _work(log: list[str], name: str, num_steps: int) -> Steps[str]:
    for _ in range(num_steps):
        ends_at = time.monotonic() + STEP_S
        while time.monotonic() < ends_at:
            pass
        log.append(name)
        yield
    return name


@_on_a_loop
async def test_other_calls_run_between_two_turns() -> None:
    log: list[str] = []

    async def others() -> None:
        while True:
            log.append("other")
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    turns = Turns()
    assert await asyncio.gather(turns.run(_work(log, "a", 20)), turns.run(_work(log, "b", 20))) == ["a", "b"]
    other.cancel()
    longest = max(map(len, "".join("." if name == "other" else "x" for name in log).split(".")))
    assert longest <= 4, "both works had their turns without anybody else's between them"
    assert log.index("b") < 10, "the second work waits for the end of the first"


@_on_a_loop
async def test_work_of_one_step_is_done_at_once_and_longer_work_goes_on_though_its_caller_is_cancelled() -> None:
    log: list[str] = []
    with pytest.raises(StopIteration) as ended:
        Turns().run(_work(log, "a", 0)).send(None)
    assert ended.value.value == "a"
    caller = asyncio.create_task(Turns().run(_work(log, "a", 10)))
    await asyncio.sleep(0)
    caller.cancel()
    async with asyncio.timeout(10):
        while len(log) < 10:
            await asyncio.sleep(0)
    assert caller.cancelled()


@_on_a_loop
async def test_the_probe_sees_how_long_the_loop_was_held() -> None:
    registry = CollectorRegistry()
    lag = LoopLag(registry)
    probe = asyncio.create_task(lag.run())
    await asyncio.sleep(5 * PROBE_EVERY_S)
    time.sleep(0.2)
    await asyncio.sleep(2 * PROBE_EVERY_S)
    probe.cancel()
    longest = registry.get_sample_value("kvpool_loop_lag_max_seconds")
    assert longest is not None and 0.2 - 2 * PROBE_EVERY_S < longest < 5
    p50, _, last_longest = lag.last_minute()
    assert last_longest == longest and 0 <= p50 < longest / 2
    assert (registry.get_sample_value("kvpool_loop_lag_seconds_bucket", {"le": "0.1"}) or 0) < (
        registry.get_sample_value("kvpool_loop_lag_seconds_count") or 0
    )


async def _accepted(log: list[str], num_calls: int) -> None:
    """Calls that take no time, handed over as gRPC does: one a pass of the loop."""
    for _ in range(num_calls):
        await asyncio.sleep(0)
        with call_with_its_work(""):
            when_ended(lambda: log.append("call"))


@_on_a_loop
async def test_calls_that_are_handed_over_come_before_a_turn() -> None:
    log: list[str] = []
    turns = Turns()
    with patch.object(server_turns, "ACCEPT_S", 10.0):  # However busy the machine is.
        await asyncio.gather(turns.run(_work(log, "work", 8)), turns.run(_work(log, "work", 8)), _accepted(log, 20))
    first_turn = log.index("work", 2)  # The first step of each is done at once.
    assert log[:first_turn].count("call") == 20


@_on_a_loop
async def test_a_caller_finishes_what_it_began_first_and_callers_take_turns() -> None:
    log: list[str] = []
    turns = Turns()

    async def call(caller: str, name: str) -> None:
        with call_with_its_work(caller):
            await turns.wait()
            await turns.run(_work(log, name, 20))

    await asyncio.gather(*(call(name[0], name) for name in ("a1", "a2", "b1", "a3", "b2")))
    ends = {name: len(log) - log[::-1].index(name) for name in log}
    assert ends["a1"] < ends["a2"] < ends["a3"] and ends["a1"] < log.index("a3") and ends["b1"] < ends["b2"], log
    assert log.index("b1") < ends["a1"], log


@_on_a_loop
async def test_a_request_that_work_refuses_is_free_when_its_call_ends() -> None:
    class Request:
        pass

    def refuses(request: Request) -> Steps[None]:
        yield
        raise ZeroDivisionError(str(request))

    request = Request()
    kept = weakref.ref(request)
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError):
            await Turns().run(refuses(request))
        del request
        await asyncio.sleep(0)
        assert kept() is None, "it lies in a cycle until the collector runs"
    finally:
        gc.enable()


def test_quantiles_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr(monitoring.time, "monotonic", lambda: now)
    lag = LoopLag(CollectorRegistry())
    assert lag.last_minute() == (0.0, 0.0, 0.0)
    for nth in range(990):
        lag._observe(0.001 if nth < 20 else 0.0, now)
    assert lag.last_minute() == (0.0, 0.0, 0.001), "too few probes for a 99th percentile"
    for _ in range(10):
        lag._observe(0.0, now)
    assert lag.last_minute() == (0.0, 0.001, 0.001)
    now += WINDOW_S + 1
    lag._observe(0.002, now)
    assert lag.last_minute() == (0.002, 0.0, 0.002)
    for _ in range(10_000):
        lag._observe(0.003, now)
    assert lag.last_minute() == (0.003, 0.003, 0.003)
    late = LoopLag(CollectorRegistry())  # A late loop makes fewer probes per minute than one that is not.
    for _ in range(200):
        now += 0.2 + PROBE_EVERY_S
        late._observe(0.2, now)
    assert late.last_minute() == pytest.approx((0.2, 0.2, 0.2))


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
