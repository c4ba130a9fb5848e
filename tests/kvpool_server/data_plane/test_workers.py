"""Workers of the data port that die while nothing new can be started."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from kvpool.segment import Segment
from kvpool_server.child_process import ChildProcess
from kvpool_server.data_plane import workers as module
from kvpool_server.data_plane.workers import DataWorkers
from tests.support.processes import wait_for


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(1 << 20)
    yield made
    made.close()


def test_a_worker_that_cannot_be_replaced_is_replaced_later(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPLACE_S", (0.01, 0.05))
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.01)
    workers = DataWorkers("127.0.0.1", 0, "", 1, segment)
    refused = []

    def refuse_twice(*arguments: Any, **options: Any) -> ChildProcess:
        if len(refused) < 2:
            refused.append(arguments)
            raise OSError(12, "Cannot allocate memory")
        return ChildProcess(*arguments, **options)

    monkeypatch.setattr(module, "ChildProcess", refuse_twice)

    async def watch() -> None:
        (first,) = workers.pids
        os.kill(first, signal.SIGKILL)
        task = asyncio.create_task(workers.watch())
        await asyncio.to_thread(wait_for, lambda: workers.pids != [first], "the next worker")
        assert not task.done()
        task.cancel()

    try:
        asyncio.run(watch())
        assert len(refused) == 2
    finally:
        workers.stop()
