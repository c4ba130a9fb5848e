"""Workers of the data port that die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from kvpool.transport.child_process import ChildProcess
from kvpool.transport.data_port import Kind, pack_offsets
from kvpool.transport.segment import Segment
from kvpool_server.data_plane import workers as module
from kvpool_server.data_plane.admission import MAX_SEATS
from kvpool_server.data_plane.permits import PermitTable
from kvpool_server.data_plane.workers import DataWorkers
from tests.support.data_client import DataClient
from tests.support.processes import wait_for


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(1 << 20)
    yield made
    made.close()


@pytest.fixture
def permits() -> Iterator[PermitTable]:
    with closing(PermitTable(b"k" * 32, 10, 1, MAX_SEATS)) as permits:
        yield permits


@pytest.fixture
def workers(segment: Segment, permits: PermitTable, monkeypatch: pytest.MonkeyPatch) -> Iterator[DataWorkers]:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.01)
    made = DataWorkers("127.0.0.1", 0, "", segment, permits)
    yield made
    made.stop()


def _watch(workers: DataWorkers, until: Callable[[], object], what: str) -> None:
    async def watch() -> None:
        task = asyncio.create_task(workers.watch())
        await asyncio.to_thread(wait_for, until, what)
        assert not task.done()
        task.cancel()

    asyncio.run(watch())


def test_a_worker_that_cannot_be_replaced_is_replaced_later(
    workers: DataWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPLACE_S", (0.01, 0.05))
    refused = []

    def refuse_twice(*arguments: Any, **options: Any) -> ChildProcess:
        if len(refused) < 2:
            refused.append(arguments)
            raise OSError(12, "Cannot allocate memory")
        return ChildProcess(*arguments, **options)

    monkeypatch.setattr(module, "ChildProcess", refuse_twice)
    (first,) = workers.pids
    os.kill(first, signal.SIGKILL)
    _watch(workers, lambda: workers.pids != [first], "the next worker")
    assert len(refused) == 2


def test_a_worker_that_dies_leaves_the_slots_that_it_was_moving(workers: DataWorkers, permits: PermitTable) -> None:
    permit = permits.permit(Kind.WRITE, 7, 1 << 62, 1 << 20, pack_offsets([0]))
    with DataClient(workers.port, workers.nonce) as client:
        client.show(Kind.WRITE, 7, [0], 1 << 20, permit)
        client.move(0, 1, 1 << 20, b"the first bytes")
        wait_for(lambda: 7 in permits.active(), "the worker to begin")
        os.kill(workers.pids[0], signal.SIGKILL)
        assert not permits.end(7)
        _watch(workers, lambda: 7 not in permits.active(), "the dead worker's word to be cleared")
