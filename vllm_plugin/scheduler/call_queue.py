"""Calls of the pool that the engine does not wait for, and that may be lost: hints.

The scheduler's thread queues them, and a thread of their own makes them in their order. Nothing that a call raises
reaches the engine.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from kvpool.errors import KVPoolError
from vllm_plugin.guard import Guard

END_S = 1.0
"""How long `close` lets the thread make the calls that wait."""

Call = Callable[[], object]


class CallQueue:
    """See the module. The first call starts the thread.

    Args:
        name: of the thread.
        what: names a call in the log: "a hint to the pool".
        max_calls: that wait for the thread; further ones are refused.
        guard: counts unexpected errors, which end one call alone.
        failed: told on the thread of a call that has failed as calls do, for example while the pool is away.
    """

    def __init__(self, name: str, what: str, max_calls: int, guard: Guard, failed: Callable[[KVPoolError], None]):
        self._name = name
        self._what = what
        self._guard = guard
        self._failed = failed
        self._waiting: queue.Queue[Call | None] = queue.Queue(max_calls)
        self._thread: threading.Thread | None = None
        self._is_closed = self._is_over = False

    def put(self, call: Call) -> bool:
        """Queues a call; False if it is lost, since too many wait or the queue is closed. Never waits."""
        if self._is_closed:
            return False
        try:
            self._waiting.put_nowait(call)
        except queue.Full:
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return True

    def close(self) -> None:
        """Makes the calls that wait, within `END_S`; the rest is lost, and at once if the queue is full. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread is None:
            return
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            self._is_over = True
        self._thread.join(END_S)
        self._is_over = True  # The thread is a daemon, and ends with its present call.

    def _run(self) -> None:
        while (call := self._waiting.get()) is not None and not self._is_over:
            with self._guard.part(self._what):
                try:
                    call()
                except KVPoolError as error:
                    self._failed(error)
