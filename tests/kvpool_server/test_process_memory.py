"""The collector of a server: what it looks at, and what it finds all the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvpool.v1 import pool_pb2 as pb
from kvpool_server.process.process_memory import THRESHOLDS, freeze_survivors, keep_collections_short
from tests.support.in_process_server import InProcessServer
from tests.support.processes import wait_for


class Node:
    def __init__(self) -> None:
        self.itself: Node | None = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.callbacks.remove(freeze_survivors)
    gc.set_threshold(*before)
    gc.unfreeze()


def test_what_came_through_a_full_collection_is_looked_at_by_no_other() -> None:
    keep_collections_short()
    keep_collections_short()
    assert gc.get_threshold() == THRESHOLDS and gc.callbacks.count(freeze_survivors) == 1
    kept = [[] for _ in range(1_000)]
    before = gc.get_freeze_count()
    gc.collect()
    assert gc.get_freeze_count() >= before + len(kept)
    assert not any(tracked is kept for tracked in gc.get_objects())


def test_what_is_frozen_is_freed_by_its_reference_count() -> None:
    keep_collections_short()
    held = [Node()]
    held[0].itself = None
    node = weakref.ref(held[0])
    gc.collect()
    held.clear()
    assert node() is None


def test_new_cycles_are_found() -> None:
    keep_collections_short()
    node = weakref.ref(Node())
    assert node() is not None
    gc.collect()
    assert node() is None


def test_calls_leave_no_cycles() -> None:
    """A call that is in one, and under way during a full collection, would stay for ever."""
    keep_collections_short()

    def num_calls() -> int:
        return sum(type(each).__name__ == "_ServicerContext" for each in gc.get_objects())

    with closing(InProcessServer(1 << 20, 1 << 18)) as server:
        server.stub.Ping(pb.PingRequest(), timeout=10)
        gc.collect()
        gc.disable()
        try:
            for _ in range(50):
                server.stub.Ping(pb.PingRequest(), timeout=10)
            wait_for(lambda: server.on_loop(num_calls) <= 1, "the end of all calls", 10)
        finally:
            gc.enable()
