"""Workers of the data port that die while nothing new can be started."""

import asyncio
from typing import Any

import pytest

from kvpool.segment import Segment
from kvpool_server.data_plane import workers as module
from kvpool_server.data_plane.workers import DataWorkers
from tests.support.processes import wait_for


def test_a_worker_that_cannot_be_replaced_is_replaced_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPLACE_S", (0.01, 0.05))
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.01)
    segment = Segment.create("/dev/shm", 1 << 20)
    workers = DataWorkers("127.0.0.1", 0, "", 1, segment.info())
    spawn, refused = workers._spawn, []

    def refuse_twice(row: int) -> Any:
        if len(refused) < 2:
            refused.append(row)
            raise OSError(12, "Cannot allocate memory")
        return spawn(row)

    monkeypatch.setattr(workers, "_spawn", refuse_twice)

    async def watch() -> None:
        first = workers.pids[0]
        workers._seats[0].process.kill()
        task = asyncio.create_task(workers.watch())
        await asyncio.to_thread(wait_for, lambda: workers.pids[0] != first, "the next worker")
        assert not task.done()
        task.cancel()

    try:
        asyncio.run(watch())
        assert refused == [0, 0]
    finally:
        workers.stop()
        segment.close()
