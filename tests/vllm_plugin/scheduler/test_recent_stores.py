from __future__ import annotations

from tests.support.values import block_hash, run_of
from vllm_plugin.metadata import GroupBlocks, StoreJob
from vllm_plugin.scheduler.pool_contents import FORGET_S, MAX_BLOCKS, RecentStores


def job_of(*names: object) -> StoreJob:
    return StoreJob(1, [GroupBlocks(0, [run_of(*names)], [[1] * len(names)])])


def test_what_was_stored_is_known_for_a_while() -> None:
    now = [1000.0]
    known = RecentStores(lambda: now[0])
    known.stored(job_of("a", "b"))
    assert known.has(block_hash("b"), 0) and not known.has(block_hash("b"), 1)
    assert not known.has(block_hash("c"), 0)
    now[0] += FORGET_S
    assert not known.has(block_hash("b"), 0)


def test_what_is_found_missing_is_not_known_any_more() -> None:
    known = RecentStores()
    known.stored(job_of("a", "b", "c"))
    known.missing(0, [block_hash("b"), block_hash("another")])
    known.missing(1, [block_hash("c")])
    assert [known.has(block_hash(name), 0) for name in "abc"] == [True, False, True]
    known.forget_all()
    assert not known.has(block_hash("a"), 0)


def test_of_very_many_the_oldest_are_forgotten() -> None:
    known = RecentStores(lambda: 1000.0)
    for first in range(0, 2 * MAX_BLOCKS + 1, MAX_BLOCKS // 2):
        known.stored(job_of(*range(first, first + MAX_BLOCKS // 2)))
    assert not known.has(block_hash(0), 0)
    assert known.has(block_hash(MAX_BLOCKS), 0) and known.has(block_hash(2 * MAX_BLOCKS), 0)
    known.missing(0, [block_hash(MAX_BLOCKS), block_hash(2 * MAX_BLOCKS)])
    assert not known.has(block_hash(MAX_BLOCKS), 0) and not known.has(block_hash(2 * MAX_BLOCKS), 0)
