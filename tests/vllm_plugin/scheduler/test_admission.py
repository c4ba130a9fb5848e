"""Lookups of blocks on their way up from a tier, and ahead of vLLM's question: real leases, and time that tests set."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import Request

from kvpool.client.handles import KeptRuns, Namespace, PendingLookup
from kvpool.protocol.errors import PoolTimeoutError
from kvpool.protocol.replies import LookupQuestion
from kvpool.protocol.types import Lookup
from kvpool.security.name_key import NameKey
from tests.support.clock import FakeClock
from tests.support.held import held_by
from tests.support.processes import wait_for
from tests.support.toy.fixtures import BLOCK_TOKENS
from tests.support.vllm_objects import full_attention, make_request, tokens
from tests.vllm_plugin.core import NUM_BLOCKS, Core, MakeCore, blocks, fill, stored, wait_for_leases
from tests.vllm_plugin.kinds import kv_cache, window
from tests.vllm_plugin.tier import Tier
from vllm_plugin.scheduler import admission, lookups, step_budget
from vllm_plugin.scheduler.lookups import STUCK_S

RETRY_S = 0.02


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Of lookups and of wait; all else keeps its own."""
    clock = FakeClock()
    for module in (admission, lookups):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    return clock


def look(core: Core, request: Request, computed: int = 0) -> int | None:
    """Asks until no lookup is under way: what is found, or None where it is waited for."""

    def settled() -> tuple[int | None] | None:
        matched, _ = core.side.matched_tokens(request, computed)
        core.step()
        candidate = core.side.admission.candidates.get(request.request_id)
        return None if candidate is not None and candidate.lookup.calls else (matched,)

    return wait_for(settled, "an answer")[0]


def test_what_is_on_its_way_is_waited_for(alone: Core, clock: FakeClock) -> None:
    request, tier = stored(alone), Tier(alone.side.stages.sessions[0], up=2, coming=4)
    assert look(alone, request) is None
    clock.advance(RETRY_S - 0.001)
    assert look(alone, request) is None and tier.num_lookups == 2
    tier.brought(2)
    clock.advance(0.001)
    assert look(alone, request) is None and tier.num_lookups == 3
    tier.brought(2)
    clock.advance(RETRY_S)
    assert look(alone, request) == blocks(6)
    assert {look(alone, request) for _ in range(5)} == {blocks(6)} and tier.num_lookups == 4
    assert tier.waits_ms == [0, 200, 200, 200], "the first answer is wanted at once"
    wait_for_leases(alone, 1)  # Of the last answer.
    data = alone.counted()
    assert (data["lookups"], data["promotion_waits"]) == (4, 1)
    assert data["promotion_wait_seconds"] == pytest.approx([2 * RETRY_S])
    assert data["lookup_seconds"] == [0], "waiting for a tier is no latency of lookups"
    assert "promotion_missed_tokens" not in data
    alone.allocate(request, blocks(6))
    (job,) = alone.step().loads
    assert all(job.lease_ids)
    alone.report(finished_recving={"r"})
    wait_for_leases(alone, 0)


def test_the_names_of_a_requests_blocks_are_computed_once(core: MakeCore, clock: FakeClock, tmp_path: Path) -> None:
    """A lookup that waits for a tier is encoded on the scheduler's thread."""
    NameKey.create(tmp_path / "name.key")
    one = core(name_key_file=str(tmp_path / "name.key")).connected()
    request, tier = stored(one), Tier(one.side.stages.sessions[0], up=2, coming=4)
    rpc, asked = one.side.stages.sessions[0].client.rpc, []
    through_tier = rpc.lookup_async

    def look_up(namespace: Namespace, runs: KeptRuns, **options: Any) -> PendingLookup:
        asked.append(rpc.encode_runs(runs))
        return through_tier(namespace, runs, **options)

    rpc.lookup_async = look_up  # type: ignore[assignment, method-assign]
    assert look(one, request) is None
    tier.brought(4)
    clock.advance(RETRY_S)
    assert look(one, request) == blocks(6)
    assert len(asked) > 1 and all(each is asked[0] for each in asked)


def test_without_anything_on_its_way_nothing_is_waited_for(alone: Core, clock: FakeClock) -> None:
    request, tier = stored(alone), Tier(alone.side.stages.sessions[0], up=2, coming=0)
    assert look(alone, request) == blocks(2)
    assert tier.num_lookups == 1
    assert not any(name.startswith("promotion") for name in alone.counted())


def test_what_never_comes_is_computed(alone: Core, clock: FakeClock) -> None:
    request, tier = stored(alone), Tier(alone.side.stages.sessions[0], up=2, coming=4)
    began = clock()
    while (found := look(alone, request)) is None:
        clock.advance(RETRY_S)
    assert found == blocks(2)
    assert STUCK_S <= clock() - began <= STUCK_S + 2 * RETRY_S
    assert tier.num_lookups > 5
    data = alone.counted()
    assert (data["promotion_waits"], data["promotion_missed_tokens"]) == (1, blocks(4))
    wait_for_leases(alone, 1)
    alone.finish(request)
    wait_for_leases(alone, 0)


@pytest.mark.parametrize("compute_s", [0.0, 0.05])
def test_a_wait_is_no_longer_than_computing_what_is_on_its_way(
    compute_s: float, alone: Core, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, _ = stored(alone), Tier(alone.side.stages.sessions[0], up=2, coming=4)
    monkeypatch.setattr(alone.side.loads, "compute_seconds", lambda num_tokens: compute_s)
    began = clock()
    while look(alone, request) is None:
        clock.advance(RETRY_S)
    assert clock() - began <= compute_s


def test_a_slow_tier_has_two_more_answers_to_bring_something(core: MakeCore, clock: FakeClock) -> None:
    one = core(promotion_wait_ms=60_000).connected()
    request, _ = stored(one), Tier(one.side.stages.sessions[0], up=2, coming=4, retry_ms=1_000)
    began = clock()
    while look(one, request) is None:
        clock.advance(1.0)
    assert clock() - began == 2.0


def test_a_tier_that_goes_on_after_a_pause_is_waited_for(alone: Core, clock: FakeClock) -> None:
    request, tier = stored(alone), Tier(alone.side.stages.sessions[0], up=2, coming=4)
    for _ in range(3):
        assert look(alone, request) is None
        clock.advance(0.9 * STUCK_S)
        tier.brought(1)


def test_patience_ends_while_an_answer_is_under_way(alone: Core, clock: FakeClock) -> None:
    request, tier = stored(alone), Tier(alone.side.stages.sessions[0], up=2, coming=4)
    assert look(alone, request) is None
    tier.is_slow = True
    clock.advance(RETRY_S)
    assert alone.side.matched_tokens(request, 0) == (None, False) and tier.num_lookups == 3
    clock.advance(1.0)
    assert alone.side.matched_tokens(request, 0) == (blocks(2), True)
    wait_for_leases(alone, 1)  # What the late answer has leased is given back.
    alone.allocate(request, blocks(2))
    (job,) = alone.step().loads
    alone.report(finished_recving={"r"})
    wait_for_leases(alone, 0)
    assert all(job.lease_ids)


def test_blocks_that_come_up_while_the_engine_is_busy_are_found_by_its_next_step(alone: Core, clock: FakeClock) -> None:
    """The pool is asked before the tier has brought anything, and answers when it has: no step asks in between."""
    request, tier = stored(alone), Tier(alone.side.stages.sessions[0], up=2, coming=4)
    tier.waits = True
    wait_for(lambda: alone.side.matched_tokens(request, 0) == (None, False) and tier.num_lookups == 2, "a wait")
    clock.advance(0.5)
    assert alone.side.matched_tokens(request, 0) == (None, False) and tier.num_lookups == 2
    tier.brought(4)
    clock.advance(0.4)
    assert look(alone, request) == blocks(6) and tier.num_lookups == 2
    alone.finish(request)
    wait_for_leases(alone, 0)


def test_a_step_without_time_left_sends_no_lookup_again(
    alone: Core, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, tier = stored(alone), Tier(alone.side.stages.sessions[0], up=2, coming=4)
    assert look(alone, request) is None and tier.num_lookups == 2
    clock.advance(RETRY_S)
    with monkeypatch.context() as patch:
        patch.setattr(step_budget, "MAX_BEGIN_S", 0.0)
        assert look(alone, request) is None and tier.num_lookups == 2
    assert look(alone, request) is None and tier.num_lookups == 3


def test_a_repeated_question_is_answered_as_before_while_the_step_has_no_time_left(
    alone: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = stored(alone)
    looked_at: list[int] = []
    boundary = admission.Admission.boundary

    def watched(self: admission.Admission, request: Request, local: int) -> int | None:
        looked_at.append(local)
        return boundary(self, request, local)

    monkeypatch.setattr(admission.Admission, "boundary", watched)
    with monkeypatch.context() as patch:
        patch.setattr(step_budget, "MAX_BEGIN_S", 0.0)
        assert {alone.side.matched_tokens(request, 0) for _ in range(3)} == {(None, False)}
        assert looked_at == [0]
        assert alone.side.matched_tokens(request, blocks(1)) == (None, False)
        assert looked_at == [0, blocks(1)], "the engine has another prefix than before"
        alone.side.reset()
        assert held_by(alone.side)["requests that wait for a lookup"] == 0
        alone.tell_weights(1)
    assert look(alone, request) == blocks(6)
    alone.finish(request)
    assert not any(held_by(alone.side).values())


@pytest.mark.parametrize("waits", [False, True])
def test_an_answer_is_decoded_on_the_thread_that_receives_it(
    alone: Core, monkeypatch: pytest.MonkeyPatch, answered_at_once: None, waits: bool
) -> None:
    request = stored(alone)
    threads: list[threading.Thread] = []
    answer = LookupQuestion.answer

    def watched(self: LookupQuestion, reply: Any) -> Lookup:
        threads.append(threading.current_thread())
        return answer(self, reply)

    monkeypatch.setattr(LookupQuestion, "answer", watched)
    alone.side.arrived(request)
    if not waits:
        wait_for(lambda: threads, "the answer")
    assert alone.side.matched_tokens(request, 0) == (blocks(6), True)
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


def test_a_late_answer_leaves_what_was_ready(alone: Core, clock: FakeClock) -> None:
    request, tier = stored(alone), Tier(alone.side.stages.sessions[0], up=2, coming=4)
    assert look(alone, request) is None
    clock.advance(RETRY_S)
    tier.error = PoolTimeoutError("late")
    assert look(alone, request) == blocks(2)
    tier.error = None
    assert {look(alone, request) for _ in range(5)} == {blocks(2)} and tier.num_lookups == 3
    data = alone.counted()
    assert (data["lookups"], data["lookup_failures"]) == (2, 1)
    alone.finish(request)
    wait_for_leases(alone, 0)


def test_patience_is_one_for_all_lookups_of_a_request(core: MakeCore, clock: FakeClock) -> None:
    one = core(load_timeout_ms=100, promotion_wait_ms=400).connected()  # Good to begin a load for 100 ms.
    request, tier = stored(one), Tier(one.side.stages.sessions[0], up=2, coming=4, retry_ms=150)
    began = clock()
    while look(one, request) is None:
        tier.brought(1)
        clock.advance(0.15)
    assert clock() - began == pytest.approx(0.3)
    assert tier.waits_ms == [0, 200, 0, 125, 0], "what expires is looked up anew, and then waited for"


def test_an_own_hit_that_grows_meanwhile_is_not_waited_for_again(alone: Core, clock: FakeClock) -> None:
    request, tier = stored(alone), Tier(alone.side.stages.sessions[0], up=2, coming=2)
    assert look(alone, request) is None
    clock.advance(RETRY_S)
    assert look(alone, request, computed=blocks(4)) == 0 and tier.num_lookups == 3


def test_what_is_on_its_way_is_not_missing(one: Core, clock: FakeClock) -> None:
    request, tier = stored(one), Tier(one.side.stages.sessions[0], up=2, coming=3)
    taken_back: list[bytes] = []
    one.side.contents.missing = lambda _, names: taken_back.extend(names)
    assert look(one, request) is None
    tier.coming = 2
    while look(one, request) is None:
        assert taken_back == []
        clock.advance(RETRY_S)
    assert taken_back == request.block_hashes[4:6]


def test_one_stage_that_lags_is_waited_for(staged: Core, clock: FakeClock) -> None:
    request, tier = stored(staged), Tier(staged.side.stages.sessions[1], up=0, coming=6)
    assert look(staged, request) is None
    clock.advance(RETRY_S)
    assert look(staged, request) is None and tier.num_lookups == 3
    wait_for_leases(staged, 1)  # Of the other stage.
    tier.brought(6)
    clock.advance(RETRY_S)
    assert look(staged, request) == blocks(6)
    wait_for_leases(staged, 2)
    staged.allocate(request, blocks(6))
    (job,) = staged.step().loads
    assert len(set(job.lease_ids)) == 2 and all(job.lease_ids)
    staged.report(finished_recving={"r"})
    wait_for_leases(staged, 0)


def test_what_another_stage_lacks_is_not_waited_for(staged: Core, clock: FakeClock) -> None:
    request = make_request("r", tokens(100))
    fill(staged, request.block_hashes, stage=0)
    fill(staged, request.block_hashes[:1], stage=1)
    tier = Tier(staged.side.stages.sessions[0], up=2, coming=4)
    assert look(staged, request) == blocks(1) and tier.num_lookups == 1


def test_a_window_on_its_way_is_waited_for(core: MakeCore, clock: FakeClock) -> None:
    one = core(cache=kv_cache(full_attention(), window(40), num_blocks=NUM_BLOCKS)).connected()
    request = stored(one)
    fill(one, request.block_hashes[3:6], group=1)
    tier = Tier(one.side.stages.sessions[0], up=4, coming=2)
    assert look(one, request) is None
    tier.brought(2)
    clock.advance(RETRY_S)
    assert look(one, request) == blocks(6)
    assert tier.waits_ms == [0, 20, 20], "the pool waits for the next batch alone: the hit may need no more"


# Ahead of vLLM's question


@pytest.fixture
def asked_for(alone: Core, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(request, tokens that the engine has) of each lookup that is sent."""
    sent = []
    send = alone.side.lookups.send

    def note_and_send(request: Any, local: int, limit: int) -> Any:
        sent.append((request.request_id, local))
        return send(request, local, limit)

    monkeypatch.setattr(alone.side.lookups, "send", note_and_send)
    return sent


def cache(core: Core, request: Any, count: int) -> None:
    """The engine has computed the first blocks of a prompt before."""
    computed = core.pool.get_new_blocks(count)
    core.pool.cache_full_blocks(request, computed, 0, count, BLOCK_TOKENS, 0)
    core.pool.free_blocks(computed)


def test_the_answer_is_there_when_vllm_asks_first(alone: Core, asked_for: list[tuple[str, int]]) -> None:
    request = make_request("r", tokens(100))
    fill(alone, request.block_hashes[:3])
    alone.side.arrived(request)
    wait_for(lambda: alone.side.admission.candidates["r"].lookup.calls[0].done(), "the answer")
    assert alone.side.matched_tokens(request, 0) == (blocks(3), True)
    assert asked_for == [("r", 0)]
    alone.finish(request)
    assert not any(held_by(alone.side).values())


def test_what_the_engine_has_itself_is_not_looked_up(alone: Core, asked_for: list[tuple[str, int]]) -> None:
    part, whole = make_request("part", tokens(100)), make_request("whole", tokens(100, 1))
    cache(alone, part, 4)
    cache(alone, whole, 6)  # All but the last token's block, which is not full.
    for request in (part, whole):
        alone.side.arrived(request)
    alone.step()
    assert asked_for == [("part", blocks(4))]
    for request in (part, whole):
        alone.finish(request)


def test_a_request_is_looked_up_again_if_the_engine_has_less_than_was_thought(
    alone: Core, asked_for: list[tuple[str, int]]
) -> None:
    request = stored(alone)
    cache(alone, request, 4)
    alone.side.arrived(request)
    assert alone.pool.reset_prefix_cache()
    assert alone.ask(request, blocks(1)) == blocks(5)
    assert asked_for == [("r", blocks(4)), ("r", blocks(1))]
    alone.finish(request)


@pytest.mark.usefixtures("answered_at_once")
def test_few_hold_leases_while_many_wait(
    alone: Core, asked_for: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_STEPS_AHEAD", 2 * blocks(6) / alone.side.geometry.step_tokens)
    traced: list[str] = []
    spans = SimpleNamespace(asked=lambda request: traced.append(request.request_id))
    monkeypatch.setattr(alone.side.admission, "_spans", spans)
    requests = [make_request(name, tokens(100, ord(name))) for name in "abcd"]
    for request in requests:
        alone.side.arrived(request)
    alone.step()
    assert [name for name, _ in asked_for] == traced == ["a", "b"]
    alone.finish(requests[2])
    assert alone.side.matched_tokens(requests[0], 0) == (0, False)
    alone.allocate(requests[0], 0)
    alone.step((requests[0], 100))
    assert [name for name, _ in asked_for] == ["a", "b", "d"], "c has ended"
    for request in (requests[0], requests[1], requests[3]):
        alone.finish(request)
    assert not alone.side.admission.candidates


def test_one_that_must_not_read_is_not_looked_up(alone: Core, asked_for: list[tuple[str, int]]) -> None:
    request = make_request("r", tokens(100))
    request.skip_reading_prefix_cache = True
    alone.side.arrived(request)
    alone.step()
    assert asked_for == []
    alone.finish(request)
