from __future__ import annotations

from tests.support.values import block_hash, run_of
from vllm_plugin.known import FORGET_S, Known
from vllm_plugin.metadata import GroupBlocks, LoadJob, StoreJob


def stored(known: Known, job_id: int, *names: object, group_idx: int = 0, succeeded: bool = True) -> None:
    run = run_of(*names, group_idx=group_idx)
    known.storing(StoreJob(job_id, [GroupBlocks(group_idx, [run], [[1] * len(names)])]))
    known.ended(job_id, succeeded)


def test_what_was_stored_is_known_for_a_while() -> None:
    now = [1000.0]
    known = Known(lambda: now[0])
    stored(known, 1, "a", "b")
    stored(known, 2, "c", succeeded=False)
    assert known.has(block_hash("b"), 0) and not known.has(block_hash("b"), 1)
    assert not known.has(block_hash("c"), 0)
    now[0] += FORGET_S
    assert not known.has(block_hash("b"), 0)


def test_what_is_found_missing_is_not_known_any_more() -> None:
    known = Known()
    stored(known, 1, "a", "b", "c", "d")
    known.looked_up(run_of("a", "b", "c"), 0b101)
    assert [known.has(block_hash(name), 0) for name in "abcd"] == [True, False, True, True]
    known.lost(LoadJob("r", (1,), [GroupBlocks(0, [run_of("d")], [[1]])]))
    assert not known.has(block_hash("d"), 0)
    known.forget_all()
    assert not known.has(block_hash("a"), 0)
