"""Calls to tiers, which may fail, or never return: whether they are sent, and the threads that make them."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, TypeVarTuple

import structlog

log = structlog.get_logger()

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

AWAY_S = (1.0, 30.0)
"""How long no calls are sent after a failure: the first in a row, and the longest. Each failure doubles it."""

ANSWER_S = 10.0
"""Deadline of a call for those that wait for it. The call may go on; until it ends, the tier is unavailable."""


class Health:
    """Whether calls are sent to one tier: none are for a while after a failure, longer each time, or without an answer.

    Belongs to the event loop.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic):
        self._name = name
        self._clock = clock
        self._calls: dict[object, float] = {}
        """When each call under way began."""
        self._away_s = 0.0
        """How long no calls are sent after the last failure; 0 once a call has succeeded."""
        self._back_at = 0.0

    @property
    def is_available(self) -> bool:
        """True if calls may be sent to the tier now."""
        now = self._clock()
        return now >= self._back_at and not any(now - began_at > ANSWER_S for began_at in self._calls.values())

    @property
    def is_working(self) -> bool:
        """True if the tier is available and its last call succeeded."""
        return self.is_available and not self._away_s

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around a call to the tier: an exception is a failure, and propagates."""
        call = object()
        self._calls[call] = self._clock()
        late = asyncio.get_running_loop().call_later(ANSWER_S, self._report_late, call)
        try:
            yield
        except Exception as error:
            tell = log.debug if self._away_s else log.error  # Of failures in a row, the first is news.
            if self._clock() >= self._back_at:  # Else it failed with another one.
                self._away_s = min(max(2 * self._away_s, AWAY_S[0]), AWAY_S[1])
                self._back_at = self._clock() + self._away_s
            problem = "a tier has failed and gets no calls for a while"
            tell(problem, tier=self._name, error=str(error), seconds=self._away_s)
            raise
        else:
            if self._away_s:
                log.info("a tier works again", tier=self._name)
            self._away_s = 0.0
        finally:
            late.cancel()
            del self._calls[call]

    def _report_late(self, call: object) -> None:
        if call is next(iter(self._calls)):  # Calls that began later hang with the first, and are not reported.
            log.error("a tier does not answer and gets no calls until it does", tier=self._name, seconds=ANSWER_S)


class DaemonThreadPool:
    """Threads for calls that may never return, with a queue. Belongs to one event loop, whose thread alone uses `call`.

    `concurrent.futures` joins its threads when the process ends: a thread that hangs in a dead file system would keep
    the server from ending. These are daemon threads.
    """

    def __init__(self, num_threads: int, name: str):
        self.num_threads = num_threads
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{nth}", daemon=True) for nth in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    async def call(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Returns or raises what the function does. The function runs to its end even if the caller is cancelled."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put((lambda: function(*args), future))
        return await future

    def close(self, timeout_s: float) -> bool:
        """Ends the threads once the queue is empty; True if all have ended. Blocks `timeout_s` at most."""
        for _ in self._threads:
            self._queue.put(None)
        ends_at = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, ends_at - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            function, future = item
            try:
                outcome, resolve = function(), future.set_result
            except BaseException as error:  # The caller gets the error; this thread continues.
                outcome, resolve = error, future.set_exception
            with contextlib.suppress(RuntimeError):  # The loop has ended, and the caller with it.
                future.get_loop().call_soon_threadsafe(_resolve, future, resolve, outcome)


def _resolve(future: asyncio.Future[Any], resolve: Callable[[Any], None], outcome: object) -> None:
    if not future.done():  # Its caller may have been cancelled.
        resolve(outcome)
