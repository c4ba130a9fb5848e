"""Slots that callers share: in turn, none lost, and nothing else that callers wait for; and shares of a budget."""

from __future__ import annotations

import ast
import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool_server
from kvpool.protocol.errors import BusyError, PoolTimeoutError
from kvpool.protocol.wire import encode_runs
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.arena import Arena
from kvpool_server.process.runtime import FLOW
from kvpool_server.rpc import buffers, operators
from kvpool_server.rpc.chunks import MAX_WAITING
from kvpool_server.rpc.turns import Turns
from kvpool_server.sharing import LEAST, RESERVE, Shares, fair_slots
from kvpool_server.sharing.fair_slots import FairSlots, Pace
from kvpool_server.tiering.tiered_pool import TieredPool
from testbed.pool_at_once import PoolAtOnce
from tests.support.clock import FakeClock
from tests.support.memory_tier import MemoryTier, Rig, play, turns
from tests.support.pool_service import pool_service
from tests.support.service_loop import CallContext
from tests.support.values import run_of

OWN_WAITS = {
    "reports/usage_ledger.py",
    "tiering/demoter.py",
    "tiers/file/tier.py",
    "tiers/peers/directory.py",
    "tiers/peers/handover.py",
    "tiers/peers/leases.py",
}
"""Modules that wait for the server's own work, or of a caller that has its turn."""


class Calls:
    """Calls that hold a slot until `end`."""

    def __init__(self, slots: FairSlots):
        self.slots = slots
        self.running: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, *names: str) -> None:
        """Begins calls, whose callers are the names' first letters."""
        for name in names:
            self._tasks[name] = asyncio.create_task(self._call(name))
            await asyncio.sleep(0)

    async def _call(self, name: str) -> None:
        async with self.slots.slot(name[0].strip("-")):
            self.running.append(name)
            try:
                await asyncio.sleep(60)
            finally:
                self.running.remove(name)

    async def end(self, *names: str) -> None:
        for name in names:
            self._tasks[name].cancel()
        await asyncio.gather(*(self._tasks.pop(name) for name in names), return_exceptions=True)
        await asyncio.sleep(0)


def _run(most: int, most_own: int, test: Callable[[Calls], Coroutine[None, None, None]]) -> None:
    asyncio.run(test(Calls(FairSlots(most, most_own))))


def test_callers_take_turns_however_many_calls_each_has_waiting() -> None:
    async def run(calls: Calls) -> None:
        await calls.begin("a1", "a2", "a3", "b1", "b2", "c1")
        order = []
        while calls.running:
            order += calls.running
            await calls.end(*calls.running)
        assert order == ["a1", "a2", "b1", "c1", "a3", "b2"], "a2 came before the others"

    _run(1, 1, run)


def test_a_caller_leaves_as_many_slots_as_it_has_and_a_fourth_of_all_to_newcomers() -> None:
    async def run(calls: Calls) -> None:
        await calls.begin(*(f"{caller}{nth}" for caller in "abcd" for nth in range(8)))
        assert [sum(name[0] == caller for name in calls.running) for caller in "abcd"] == [3, 2, 1, 1]
        await calls.end("a0", "a1", "a2")
        assert [sum(name[0] == caller for name in calls.running) for caller in "abcd"] == [1, 2, 1, 1]
        await calls.begin("e1", "f1")
        assert {"e1", "f1"} <= set(calls.running)

    async def run_without_names(calls: Calls) -> None:
        await calls.begin(*(f"-{nth}" for nth in range(8)))
        assert len(calls.running) == 4, "callers that are not told apart have all slots"

    _run(8, 3, run)
    _run(4, 1, run_without_names)


def test_a_call_that_is_cancelled_or_waits_too_long_gives_its_slot_or_its_place_back() -> None:
    async def run(calls: Calls) -> None:
        await calls.begin("a1", "a2", "a3")
        calls._tasks["a1"].cancel()
        await calls.end("a2")  # Its turn has come, and is not taken.
        await calls.end("a1")
        assert calls.running == ["a3"]
        with pytest.raises(BusyError, match="try again later"):
            async with calls.slots.slot("b", 0.01):
                pass
        await calls.end("a3")
        await calls.begin("a1", "b1", "c1")
        await calls.end("b1")
        await calls.end("a1")
        assert calls.running == ["c1"]
        await calls.begin("a1", "b1")
        calls._tasks["c1"].cancel()
        calls._tasks["a1"].cancel()  # While its slot is on the way.
        await calls.end("c1", "a1")
        assert calls.running == ["b1"]
        await calls.end("b1")
        assert not calls.slots._taken.total and not calls.slots._waiting

    _run(1, 1, run)


@pytest.mark.parametrize("wait_s", [60, 0.02])
@pytest.mark.parametrize(("most", "waiting", "ended"), [(2, "c", "a"), (4, "b", "b")])
def test_the_call_furthest_behind_gives_way_to_a_caller_that_waits(
    most: int, waiting: str, ended: str, wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that has as many as it may takes the slot of its own call. So it is if a few bytes move now and then."""
    monkeypatch.setattr(fair_slots, "SPARED_S", 0.1)
    monkeypatch.setattr(fair_slots, "LOOK_EVERY_S", 0.05)

    async def run() -> None:
        slots, given_way = FairSlots(most, 1), list[str]()

        async def hold(caller: str, pace: Pace) -> None:
            async with slots.slot(caller, pace=pace):
                try:
                    if caller == "b":
                        await asyncio.sleep(0.1)  # The server works.
                    while True:
                        await pace.wait(asyncio.sleep(wait_s))
                        pace.moved(1)
                except PoolTimeoutError:
                    given_way.append(caller)

        tasks = [asyncio.create_task(hold(caller, Pace(60.0, 1))) for caller in "ba"]
        await asyncio.sleep(0.3)
        assert not given_way, "nobody waits"
        async with asyncio.timeout(10), slots.slot(waiting):
            assert given_way == [ended]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not slots.num_taken and not slots._paces

    asyncio.run(run())


def test_a_call_whose_time_is_over_already_can_be_told_to_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_slots, "SPARED_S", 0.01)

    async def run() -> None:
        loop, pace, errors = asyncio.get_running_loop(), Pace(0.05, 1), list[dict[str, Any]]()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        task = asyncio.create_task(pace.wait(asyncio.sleep(60)))
        await asyncio.sleep(0)
        loop.call_later(0.06, pace.give_way)
        time.sleep(0.1)  # Both timers are due then, and the task runs after them.
        with pytest.raises(PoolTimeoutError):
            await task
        assert not errors

    asyncio.run(run())


def test_a_stream_waits_for_its_client_as_long_as_bytes_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "PIECE_S", 0.2)

    async def wait(nbytes: int) -> None:
        pace = buffers.pace()
        for _ in range(30):
            await pace.wait(asyncio.sleep(0.02))
            pace.moved(nbytes)

    asyncio.run(wait(buffers.PACE_BYTES))
    with pytest.raises(PoolTimeoutError, match=r"moved less than 1048576 bytes in 0\.2 s"):
        asyncio.run(wait(1))


def test_a_callers_verifications_wait_for_each_other_and_have_a_bound() -> None:
    async def run() -> None:
        go_on, ended, turns = asyncio.Semaphore(0), list[str](), Turns()

        async def wait(_: object) -> None:
            await go_on.acquire()
            raise LookupError

        turns.run = wait  # type: ignore[method-assign]
        pool, memory = PoolAtOnce(Arena(1 << 20), FakeClock(), int), np.zeros(1 << 20, np.uint8)
        service = pool_service(TieredPool(pool, memory), memory, offer=pb.PingResponse(), turns=turns)
        request = pb.VerifyRequest(namespace=bytes(32), runs=encode_runs([run_of("a")]))

        async def verify(caller: str) -> None:
            with pytest.raises(LookupError):
                await service.Verify(request, CallContext(caller))
            ended.append(caller)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(MAX_WAITING + 1):
                tasks.create_task(verify("acme"))
            await asyncio.sleep(0)
            with pytest.raises(BusyError, match=f"{MAX_WAITING} requests of this caller wait"):
                await service.Verify(request, CallContext("acme"))
            tasks.create_task(verify("umbra"))
            await asyncio.sleep(0)
            for _ in range(MAX_WAITING + 2):
                go_on.release()
        assert "umbra" in ended[:3]

    asyncio.run(run())


@pytest.mark.parametrize("what", ["Remove", "Clear"])
@play()
async def test_a_caller_removes_blocks_from_tiers_in_one_call_at_a_time_and_has_a_bound(
    rig: Rig, tier: MemoryTier, what: str
) -> None:
    go_on, begun = asyncio.Event(), list[str]()

    async def wait(*_: object) -> None:
        begun.append(FLOW.get())
        await go_on.wait()

    tier.remove = tier.clear = wait  # type: ignore[method-assign]
    service = pool_service(rig.tiered, rig.memory, offer=pb.PingResponse())
    request = pb.RemoveRequest(namespace=rig.namespace.fingerprint, runs=encode_runs([run_of("a")]))
    if what == "Clear":
        request = pb.ClearRequest(namespace=rig.namespace.fingerprint)

    async def remove(caller: str) -> None:
        FLOW.set(caller)
        await getattr(service, what)(request, None)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(operators.MAX_WAITING + 1):
            tasks.create_task(remove("acme"))
        tasks.create_task(remove("umbra"))
        await turns()
        assert begun == ["acme", "umbra"], "a call that waits in the tier counts as the tier's time"
        with pytest.raises(BusyError, match=f"{operators.MAX_WAITING} requests of this caller wait"):
            await asyncio.create_task(remove("acme"))
        go_on.set()
    assert begun.count("acme") == operators.MAX_WAITING + 1


def test_callers_wait_for_nothing_but_fair_slots() -> None:
    root = Path(kvpool_server.__file__).parent
    waits = {"Lock", "Semaphore", "BoundedSemaphore", "Condition", "Queue"}
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in waits and ast.unparse(node.value) == "asyncio"
    }
    assert found == OWN_WAITS, "callers that wait for others: give each its turn, with FairSlots"


def taken(shares: Shares, client: str, most: int) -> int:
    """What a client gets that takes all that it may have, one by one."""
    while shares.has_room(client, 1, most):
        shares.add(client)
    return shares.of(client)


@pytest.mark.parametrize("most", [64, 1_024, 4_096])
def test_clients_that_come_late_find_something(most: int) -> None:
    shares, num_late = Shares(), min(128, most // RESERVE)
    first = taken(shares, "first", most)
    assert first == (most - most // RESERVE) // 2
    for nth in range(num_late):
        assert taken(shares, f"late {nth}", most) >= max(1, most // LEAST)
    assert shares.total <= most
    nameless, own = Shares(), Shares()
    assert taken(nameless, "", most) == most and not nameless.has_room("late", 1, most)
    own.add("a", 4)
    assert own.has_room("a", 1, most, 5) and not own.has_room("a", 2, most, 5), "a client's own limit holds besides"
