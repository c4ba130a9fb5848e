from __future__ import annotations

from collections.abc import Callable

from tests.support.values import block_hash, run_of
from tests.support.vllm_objects import make_request
from vllm_plugin.metadata import GroupBlocks, StoreJob
from vllm_plugin.scheduler.pool_contents import FORGET_S, MAX_BLOCKS, Events, PoolContents


class Known(PoolContents):
    def __init__(self, clock: Callable[[], float] = lambda: 1000.0):
        super().__init__(Events([], enabled=False), clock)

    def store(self, *names: object) -> None:
        parts = [GroupBlocks(0, [run_of(*names)], [[1] * len(names)])]
        self.stored(make_request("r", [1]), StoreJob(1, parts))


def test_what_was_stored_is_known_for_a_while() -> None:
    now = [1000.0]
    known = Known(lambda: now[0])
    known.store("a", "b")
    assert known.was_stored(block_hash("b"), 0) and not known.was_stored(block_hash("b"), 1)
    assert not known.was_stored(block_hash("c"), 0)
    now[0] += FORGET_S
    assert not known.was_stored(block_hash("b"), 0)


def test_what_is_found_missing_is_not_known_any_more() -> None:
    known = Known()
    known.store("a", "b", "c")
    known.missing(0, [block_hash("b"), block_hash("another")])
    known.missing(1, [block_hash("c")])
    assert [known.was_stored(block_hash(name), 0) for name in "abc"] == [True, False, True]
    known.forget_all()
    assert not known.was_stored(block_hash("a"), 0)


def test_of_very_many_the_oldest_are_forgotten() -> None:
    known = Known()
    for first in range(0, 2 * MAX_BLOCKS + 1, MAX_BLOCKS // 2):
        known.store(*range(first, first + MAX_BLOCKS // 2))
    assert not known.was_stored(block_hash(0), 0)
    newest = [block_hash(MAX_BLOCKS), block_hash(2 * MAX_BLOCKS)]
    assert all(known.was_stored(name, 0) for name in newest)
    known.missing(0, newest)
    assert not any(known.was_stored(name, 0) for name in newest)
