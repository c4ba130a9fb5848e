"""Threads for calls that may never return.

`concurrent.futures` joins its threads when the process ends: a thread that hangs in a dead file system would keep the
server from ending. These are daemon threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class DaemonThreadPool:
    """Daemon threads and a queue of calls. Belongs to one event loop, whose thread alone uses `call`."""

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
