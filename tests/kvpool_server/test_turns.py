"""Work in steps leaves the loop to others, and the probe sees who does not."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any
from unittest.mock import patch

import pytest
from prometheus_client import CollectorRegistry

from kvpool_server.app import monitoring
from kvpool_server.app.monitoring import PROBE_EVERY_S, WINDOW_S, LoopLag
from kvpool_server.cache.steps import Steps
from kvpool_server.process.event_loop import FLOW, PASS_S, EventLoop
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
async def test_work_of_one_step_is_done_at_once() -> None:
    log: list[str] = []
    running = Turns().run(_work(log, "a", 0))
    with pytest.raises(StopIteration) as ended:
        running.send(None)
    assert ended.value.value == "a"


@_on_a_loop
async def test_work_goes_on_though_its_caller_is_cancelled() -> None:
    log: list[str] = []
    caller = asyncio.create_task(Turns().run(_work(log, "a", 10)))
    await asyncio.sleep(0)
    caller.cancel()
    async with asyncio.timeout(10):
        while len(log) < 10:
            await asyncio.sleep(0)
    assert caller.cancelled()


@_on_a_loop
async def test_work_that_fails_raises() -> None:
    def fails() -> Steps[None]:
        yield
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Turns().run(fails())


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
async def test_endless_calls_do_not_keep_work_from_its_turn() -> None:
    log: list[str] = []
    calls = asyncio.create_task(_accepted(log, 1_000_000))
    await Turns().run(_work(log, "work", 8))
    calls.cancel()
    assert log.count("work") == 8


@_on_a_loop
async def test_whoever_has_the_turn_waits_behind_no_queue() -> None:
    log: list[str] = []
    turns, loop, ended = Turns(), asyncio.get_running_loop(), dict[str, int]()

    async def large(flow: str) -> None:
        FLOW.set(flow)
        await turns.run(_work([], flow, 20))
        ended[flow] = len(log)

    tasks = [asyncio.create_task(large("busy"))]
    while not turns._slots.num_taken:
        await asyncio.sleep(0)
    busy = contextvars.copy_context()
    busy.run(FLOW.set, "busy")
    for _ in range(2_000):
        loop.call_soon(log.append, "small", context=busy)
        loop.call_soon(time.sleep, PASS_S / 5, context=busy)
    tasks.append(asyncio.create_task(large("other")))
    await asyncio.gather(*tasks)
    assert ended["other"] < 1_000, "the turn of one waits for all its small calls, and the other for its turn"


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
        with contextlib.suppress(ZeroDivisionError):
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


def test_a_loop_that_is_always_late_has_a_99th_percentile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late loop makes fewer probes per minute than one that is not."""
    now = 1_000.0
    monkeypatch.setattr(monitoring.time, "monotonic", lambda: now)
    lag = LoopLag(CollectorRegistry())
    for _ in range(200):
        now += 0.2 + PROBE_EVERY_S
        lag._observe(0.2, now)
    assert lag.last_minute() == pytest.approx((0.2, 0.2, 0.2))
