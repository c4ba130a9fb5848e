"""What a step offers to the pool, and what is dropped where the engine lacks blocks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from vllm.v1.request import Request

from tests.support.clock import FakeClock
from tests.support.held import held_by
from tests.support.processes import wait_for
from tests.support.toy.fleet import Fleet, assert_nothing_is_left
from tests.support.toy.model import answer
from tests.support.vllm_objects import make_request, tokens
from tests.vllm_plugin.bugs import held
from tests.vllm_plugin.core import Core, MakeCore, blocks, fill, lose_pool
from vllm_plugin.metadata import ConnectorMetadata
from vllm_plugin.scheduler import store_jobs
from vllm_plugin.scheduler.store_jobs import RELIEF_S, RELIEF_STEPS
from vllm_plugin.worker.transfer import SendThread

FreshFleet = Callable[[], Fleet]


def offered(metadata: ConnectorMetadata) -> list[bytes]:
    return [name for job in metadata.stores for part in job.groups for run in part.runs for name in run.block_hashes]


# How much a step offers


@pytest.fixture
def four_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_jobs, "step_blocks", lambda _: 4)


@pytest.mark.usefixtures("four_a_step")
def test_a_step_offers_a_bounded_number_of_blocks_and_the_next_steps_the_others(core: MakeCore) -> None:
    one = core(max_pinned_fraction=1.0).connected()
    first, second = (make_request(name, tokens(160, name)) for name in "ab")
    for request in (first, second):
        one.allocate(request, 0)
    steps = [one.step((first, 160), (second, 160)), *(one.step((first, 0), (second, 0)) for _ in range(5))]
    assert [len(offered(step)) for step in steps] == [4, 4, 4, 4, 4, 0]
    assert sorted(name for step in steps for name in offered(step)) == sorted(
        [*first.block_hashes, *second.block_hashes]
    )
    assert "deferred_stores" not in one.counted()


@pytest.mark.usefixtures("four_a_step")
def test_what_a_finished_request_has_left_is_offered_by_later_steps(one: Core) -> None:
    request = make_request("r", tokens(160))
    one.allocate(request, 0)
    ids = one.ids(request)
    steps = [one.step((request, 160))]
    one.finish(request)
    assert one.num_used_blocks() == 10, "all of its blocks are pinned"
    steps += [one.step(), one.step(), one.step()]
    assert [name for step in steps for name in offered(step)] == request.block_hashes
    assert [each for step in steps for job in step.stores for each in job.groups[0].block_ids[0]] == ids
    one.report(*(job.job_id for step in steps for job in step.stores))
    for _ in range(3):
        one.step()  # Takes reports of four blocks.
    assert one.num_used_blocks() == 0 and not any(held_by(one.side).values())


# What a lookup proves


def taken(core: Core, request: Request, local: int) -> list[bytes]:
    """What is offered of a request of which the engine has `local` tokens itself."""
    matched = core.ask(request, local)
    core.allocate(request, matched)
    request.num_computed_tokens = local + matched
    core.step()  # The load begins.
    return offered(core.step((request, request.num_tokens - request.num_computed_tokens)))


@pytest.mark.parametrize(
    ("num_there", "num_own", "first"),
    [(6, 6, 6), (5, 6, 0), (8, 3, 8)],
    ids=["the pool has the last own block", "the pool has lost it", "a hit beyond the own blocks"],
)
def test_what_the_pool_has_is_not_offered_again(num_there: int, num_own: int, first: int, one: Core) -> None:
    request = make_request("r", tokens(160))
    fill(one, request.block_hashes[:num_there])
    assert taken(one, request, blocks(num_own)) == request.block_hashes[first:]


# Blocks that the engine lacks


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(store_jobs, "time", SimpleNamespace(monotonic=clock))
    return clock


def test_a_dropped_store_that_does_not_end_is_not_waited_for(one: Core, clock: FakeClock) -> None:
    request = make_request("r", tokens(100))
    (job,) = one.compute(request)
    one.free(request)
    for _ in range(RELIEF_STEPS):
        assert one.side.has_pending_block_frees()
        one.step()
    assert one.side.has_pending_block_frees(), "it may take a moment"
    clock.advance(2 * RELIEF_S)
    assert not one.side.has_pending_block_frees()
    one.report(job.job_id)
    assert one.num_used_blocks() == 0


def test_stores_that_stand_still_preempt_nobody(fresh_fleet: FreshFleet) -> None:
    """What is queued behind a store that does not end gives its blocks back before a request is preempted for them."""
    engine = fresh_fleet().start(num_blocks=40)
    preempted = engine.preempted
    with held(SendThread) as go:
        for nth in range(4):
            engine.add(f"r{nth}", tokens(96, nth), max_tokens=2)
        engine.step_until(lambda: all(len(engine.answers[f"r{nth}"]) == 2 for nth in range(4)), "four answers")
        assert engine.num_used_blocks() == 24, "all of it is being stored"
        long = tokens(100, "long")
        engine.add("long", long, max_tokens=300)  # 25 blocks; 15 are free, and 33 without the queued stores.
        engine.step_until(lambda: len(engine.answers["long"]) == 300, "the long answer")
        assert engine.answers["long"] == answer(long, 300)
        assert preempted == []
        go.set()
        engine.run()
    assert_nothing_is_left(engine)


@pytest.mark.usefixtures("four_a_step")
@pytest.mark.parametrize("why", ["the pool is away", "the engine was reset"])
def test_what_was_not_offered_yet_is_dropped_where_it_is_of_no_use(why: str, one: Core) -> None:
    request = make_request("r", tokens(160))
    (job,) = one.compute(request)
    one.finish(request)
    if why == "the pool is away":
        lose_pool(one)
    else:
        assert one.side.reset() is True
    assert offered(one.step()) == []
    assert one.num_used_blocks() == 4, "what the ranks were told of"
    one.report(job.job_id)
    assert not any(held_by(one.side).values())


def test_a_request_that_waits_for_admission_gets_the_blocks_of_queued_stores(core: MakeCore) -> None:
    one = core(max_pinned_fraction=1.0).connected()
    first, second = make_request("a", tokens(800, "a")), make_request("b", tokens(300, "b"))
    one.allocate(first, 0)
    (job,) = one.step((first, 800)).stores
    one.finish(first)
    wait_for(lambda: one.side.matched_tokens(second, 0) == (0, False), "an answer")
    # vLLM has no blocks for it: the step ends without `after_alloc`.
    assert one.step().dropped_stores == [job.job_id]


def test_of_a_request_that_is_not_tracked_every_free_block_may_be_unwritten(one: Core) -> None:
    free = one.pool.free_block_queue.get_all_free_blocks()
    assert one.side.stores.unwritten({"nobody's"}, free) == {block.block_id for block in free}


@pytest.mark.usefixtures("four_a_step")
def test_blocks_that_nobody_has_written_are_not_offered_when_a_request_ends(one: Core) -> None:
    """It was preempted, came back with other blocks, and is aborted before it is computed."""
    request = make_request("r", tokens(160))
    (job,) = one.compute(request)
    one.free(request)
    one.allocate(request, 0)
    one.finish(request)
    assert offered(one.step()) == []
    one.report(job.job_id)
    assert not any(held_by(one.side).values())


def test_stores_that_alone_hold_blocks_are_dropped_where_some_are_lacking(one: Core, clock: FakeClock) -> None:
    first, second = (make_request(name, tokens(100, name)) for name in "ab")
    for request in (first, second):
        one.allocate(request, 0)
    gone, kept = one.step((first, 100), (second, 100)).stores
    one.free(first)
    assert one.side.has_pending_block_frees()
    assert one.num_used_blocks() == 13, "a rank may be reading them"
    assert one.step().dropped_stores == [gone.job_id]
    assert one.side.has_pending_block_frees()
    assert one.step().dropped_stores == [], "once"
    one.report(gone.job_id, failed=True)
    assert one.num_used_blocks() == 7
    assert not one.side.has_pending_block_frees()
    assert one.counted()["store_dropped_blocks"] == 6
    assert not one.side.contents.was_stored(first.block_hashes[0], 0)
    one.report(kept.job_id)
    assert one.side.contents.was_stored(second.block_hashes[0], 0)
