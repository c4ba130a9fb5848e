"""Lookups of blocks on their way up from a tier, and ahead of vLLM's question: real leases, and time that tests set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import Request

from kvpool.protocol.errors import PoolTimeoutError
from tests.support.clock import FakeClock
from tests.support.held import held_by
from tests.support.processes import wait_for
from tests.support.toy.fixtures import BLOCK_TOKENS
from tests.support.vllm_objects import make_request, tokens
from tests.vllm_plugin.core import Core, MakeCore, blocks, stored, wait_for_leases
from tests.vllm_plugin.tier import Tier
from vllm_plugin.scheduler import admission, lookups
from vllm_plugin.scheduler.admission import STUCK_S
from vllm_plugin.scheduler.lookups import StepBudget

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


def test_an_answer_that_is_too_old_for_its_lease_is_asked_for_anew(core: MakeCore, clock: FakeClock) -> None:
    one = core(load_timeout_ms=1_000).connected()  # Leases of 2 s, good to begin a load for 1 s.
    request = stored(one)
    assert [look(one, request) for _ in range(3)] == [blocks(6)] * 3
    assert one.counted()["lookups"] == 1
    clock.advance(1.1)
    assert look(one, request) == blocks(6)
    assert one.counted()["lookups"] == 1


def test_where_too_many_wait_a_request_takes_what_is_up(
    alone: Core, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, tier = stored(alone), Tier(alone.side.stages.sessions[0], up=2, coming=4)
    assert look(alone, request) is None
    with monkeypatch.context() as patch:
        patch.setattr(StepBudget, "may_wait", lambda *_, **__: False)
        assert alone.side.matched_tokens(request, 0) == (blocks(2), True)
    tier.brought(4)
    again = stored(alone, "again")
    with monkeypatch.context() as patch:
        patch.setattr(StepBudget, "may_begin", property(lambda _: False))
        # As before: no lookup is sent, however often vLLM asks.
        assert {alone.side.matched_tokens(again, 0) for _ in range(3)} == {(None, False)}
    assert look(alone, again) == blocks(6)
    for each in (request, again):
        alone.finish(each)
    assert not any(held_by(alone.side).values())


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


def test_what_the_engine_has_itself_is_looked_up_once_it_has_less(
    alone: Core, asked_for: list[tuple[str, int]]
) -> None:
    part, whole, reads_nothing = stored(alone, "part"), make_request("whole", tokens(100, 1)), stored(alone, "other")
    cache(alone, part, 4)
    cache(alone, whole, 6)  # All but the last token's block, which is not full.
    reads_nothing.skip_reading_prefix_cache = True
    for request in (part, whole, reads_nothing):
        alone.side.arrived(request)
    alone.step()
    assert asked_for == [("part", blocks(4))]
    assert alone.pool.reset_prefix_cache()
    assert alone.ask(part, blocks(1)) == blocks(5)
    assert asked_for == [("part", blocks(4)), ("part", blocks(1))]
    for request in (part, whole, reads_nothing):
        alone.finish(request)
    assert not any(held_by(alone.side).values())


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
