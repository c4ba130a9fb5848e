"""Runs work in steps on the event loop, so that other calls get their turn between two of them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import Any

from kvpool_server.cache.steps import Steps, Value
from kvpool_server.process.runtime import FLOW
from kvpool_server.sharing.fair_slots import FairSlots

TURN_S = 0.001
"""How long the steps of one turn may last. A turn ends with the step that exceeds it."""
ACCEPT_S, LULL_S = 0.008, 0.0002
"""How long a turn lets gRPC hand over calls, which it does one by one, at most, and after the last of them. Else each
would wait for a turn, and a call that takes no time for those of all calls that came before it."""


@dataclass(slots=True)
class _Call:
    """A call under way.

    Args:
        has_effects: whether its work goes on to its end although its caller has hung up; else it ends with a step.
        ends: what is called once the handler and its work have ended.
        place: of its work in the caller's queue, which is when it began to wait for its turn.
        unfinished: work in steps that the call has begun.
    """

    caller: str
    has_effects: bool = True
    ends: list[Callable[[], object]] = field(default_factory=list)
    place: float = field(default_factory=time.monotonic)
    unfinished: set[asyncio.Task[Any]] = field(default_factory=set)

    def after_work(self, end: Callable[[], object]) -> None:
        """Calls `end`, now that gRPC is done with the call, once its work has ended, too."""
        if self.unfinished:
            self.ends.append(end)
        else:
            end()

    def end(self, _: object = None) -> None:
        for end in self.ends:
            end()


_num_accepted = 0
_TASKS: set[asyncio.Task[Any]] = set()  # asyncio keeps no reference to them.
_CALL: ContextVar[_Call | None] = ContextVar("the running call", default=None)


@contextlib.contextmanager
def call_with_its_work(caller: str, *, has_effects: bool = True) -> Iterator[_Call]:
    """The body serves a call of a caller, which is an identity or a connection."""
    global _num_accepted
    _num_accepted += 1
    running = _Call(caller, has_effects)
    _CALL.set(running)
    FLOW.set(caller)
    try:
        yield running
    finally:
        if running.unfinished:  # The caller has hung up.
            asyncio.gather(*running.unfinished, return_exceptions=True).add_done_callback(running.end)
        else:
            running.end()


def when_ended(end: Callable[[], object]) -> None:
    """Calls `end` once the running call and its work have ended; at once outside of calls."""
    if (running := _CALL.get()) is not None:
        running.ends.append(end)
    else:
        end()


def _keep(task: asyncio.Task[Any]) -> _Call | None:
    """Keeps a task, among the work of the running call, too, until it has ended; returns the call."""
    running = _CALL.get()
    for kept in (_TASKS, *([] if running is None else [running.unfinished])):
        kept.add(task)
        task.add_done_callback(kept.discard)
    return running


def whole(behavior: Callable[..., Coroutine[Any, Any, Value]]) -> Callable[..., Coroutine[Any, Any, Value]]:
    """Has a handler go on to its end although its caller hangs up. It gets no context, which is gone then."""

    @functools.wraps(behavior)
    async def call(service: Any, request: Any, _: Any) -> Value:
        task = asyncio.create_task(behavior(service, request, None))
        _keep(task)
        return await asyncio.shield(task)

    return call


class Turns:
    """All work in steps of one server, whose callers take turns: each round of the loop's queues has one turn.

    Source: M. Shreedhar, G. Varghese, Efficient Fair Queuing Using Deficit Round-Robin, 1995. The quantum is `TURN_S`;
    no deficit is kept, because no step is much longer.
    """

    def __init__(self) -> None:
        self._slots = FairSlots(1, 1)
        self._num_accepted = 0  # Calls that had been accepted before the last turn.
        self._is_passing = False

    async def run(self, steps: Steps[Value]) -> Value:
        """The result of the work; raises what it raises. The first step is done at once.

        The work goes on to its end, even if the caller is cancelled, unless the call has no effects.
        """
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        task = asyncio.create_task(self._finish(steps))
        running = _keep(task)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if running is not None and not running.has_effects:
                task.cancel()
            raise
        finally:
            del task  # What it raises has this frame in its traceback, and the request: a cycle.

    async def wait(self) -> None:
        """Returns when it is the caller's turn: what the call does until it waits again is a turn.

        Work in steps that follows goes before what the caller has begun to wait for since: of a caller's large requests
        one at a time is in memory as objects.
        """
        if self._is_alone():
            return
        if (running := _CALL.get()) is not None:
            running.place = time.monotonic()
        async with self._turn():
            pass

    def _is_alone(self) -> bool:
        """Whether nobody waits, and nobody else has come; once in a pass of the loop."""
        if self._is_passing or self._slots.num_taken or self._num_accepted + 1 < _num_accepted:
            return False
        self._is_passing, self._num_accepted = True, _num_accepted
        asyncio.get_running_loop().call_soon(self._passed, context=Context())
        return True

    def _passed(self) -> None:
        self._is_passing = False

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        running = _CALL.get() or _Call("")
        flow = FLOW.set("")  # In no queue of the loop, each wait below ends with the next pass.
        try:
            async with self._slots.slot(running.caller, place=running.place):
                await self._calls_accepted()
                FLOW.set("turns")  # All turns have one queue, so that a round has one turn.
                await asyncio.sleep(0)
                yield
        finally:
            FLOW.reset(flow)

    async def _finish(self, steps: Steps[Value]) -> Value:
        while True:
            async with self._turn():
                ends_at = time.monotonic() + TURN_S
                while time.monotonic() < ends_at:
                    try:
                        next(steps)
                    except StopIteration as end:
                        return end.value  # type: ignore[no-any-return]

    async def _calls_accepted(self) -> None:
        """Returns when gRPC has no more calls to hand over."""
        now = time.monotonic()
        ends_at, lull_ends_at = now + ACCEPT_S, now
        while now < ends_at:
            await asyncio.sleep(0)
            now = time.monotonic()
            own = not self._slots.has_waiting  # The only call at work has been accepted itself.
            if self._num_accepted + own < _num_accepted:
                self._num_accepted, lull_ends_at = _num_accepted, now + LULL_S
            elif now >= lull_ends_at:
                break
        self._num_accepted = _num_accepted
