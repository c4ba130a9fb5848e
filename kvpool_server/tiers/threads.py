"""Threads for calls that may never return.

`concurrent.futures` waits for its threads when the process ends, and a thread that stands in a dead file system would
keep a server from ending for ever. These do not.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """A few daemon threads and what they are to do. Belongs to one event loop; `call` is for its thread alone."""

    def __init__(self, count: int, name: str):
        self.count = count
        self._todo: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{nth}", daemon=True) for nth in range(count)]
        for thread in self._threads:
            thread.start()

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the function returns, or raises. It goes on even if the caller is cancelled."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._todo.put((lambda: function(*args, **kwargs), future))
        return await future

    def close(self, timeout_s: float) -> bool:
        """Ends the threads once they have done what there is to do; whether they have. Blocks `timeout_s` at most."""
        for _ in self._threads:
            self._todo.put(None)
        ends_at = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, ends_at - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (item := self._todo.get()) is not None:
            function, future = item
            try:
                _tell(future, future.set_result, function())
            except BaseException as error:  # Whoever asked shall hear of it; this thread goes on.
                _tell(future, future.set_exception, error)


def _tell(future: asyncio.Future[Any], say: Callable[[Any], None], what: Any) -> None:
    def settle() -> None:
        if not future.done():  # Its caller may have been cancelled.
            say(what)

    try:
        future.get_loop().call_soon_threadsafe(settle)
    except RuntimeError:
        pass  # The loop has ended: nobody asks any more.
