"""Runs work in steps on the event loop, so that other calls get their turn between two of them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from kvpool_server.access.caller import CALLER
from kvpool_server.cache.fair_slots import FairSlots
from kvpool_server.cache.steps import Steps, Value

TURN_S = 0.001
"""How long the steps of one turn may last. A turn ends with the step that exceeds it."""


class Turns:
    """All work in steps of one server, whose callers take turns: between two turns the loop runs whatever is ready."""

    def __init__(self) -> None:
        self._slots = FairSlots(1, 1)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, steps: Steps[Value]) -> Value:
        """The result of the work; raises what it raises. The first step is done at once.

        The work goes on to its end, even if the caller is cancelled.
        """
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        task = asyncio.create_task(self._finish(steps))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _finish(self, steps: Steps[Value]) -> Value:
        caller = str(CALLER.get() or "")
        while True:
            async with self._slots.slot(caller):
                await asyncio.sleep(0)
                ends_at = time.monotonic() + TURN_S
                while time.monotonic() < ends_at:
                    try:
                        next(steps)
                    except StopIteration as end:
                        return end.value  # type: ignore[no-any-return]
