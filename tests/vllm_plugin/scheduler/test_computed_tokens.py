"""Why tokens are computed, and when they are counted; real engines: tests/e2e/test_causes.py, test_rare_causes.py."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from vllm.v1.request import Request

from kvpool.protocol.errors import PoolTimeoutError
from kvpool.protocol.reports import Cause
from kvpool.protocol.types import BlockRun, MissCause
from tests.support.toy.fixtures import BLOCK_TOKENS
from tests.support.vllm_objects import full_attention, make_request, tokens
from tests.vllm_plugin.core import Core, MakeCore, blocks, fill, lose_pool
from tests.vllm_plugin.kinds import kv_cache, window
from vllm_plugin.scheduler.load_policy import Verdict
from vllm_plugin.scheduler.step_budget import StepBudget

LENGTH = 100
HIT = blocks(6)
LAST = LENGTH - HIT


def named(name: str = "r") -> Request:
    return make_request(name, tokens(LENGTH, name))


def admit(core: Core, request: Request, local: int = 0, taken: int = 0) -> None:
    """vLLM gives a request blocks, and takes `taken` tokens of the answer."""
    assert request.prefill_stats is not None
    request.prefill_stats.set(request.num_prompt_tokens, local, taken)
    core.allocate(request, taken)


def counted(core: Core) -> dict[Cause, int]:
    data = core.counted()
    return {cause: data[name] for cause in Cause if (name := f"computed_tokens:{cause.label}") in data}


def compute(core: Core, request: Request, local: int = 0, taken: int = 0) -> dict[Cause, int]:
    """Causes of what a request computes in one step, once it is admitted."""
    admit(core, request, local, taken)
    request.num_computed_tokens = local + taken
    core.step((request, request.num_prompt_tokens - local - taken))
    return counted(core)


def test_a_prompt_is_counted_with_the_step_that_ends_it(core: MakeCore) -> None:
    one, request = core().connected(), named()
    one.ask(request)
    admit(one, request)
    one.step((request, 60))
    assert counted(one) == {}
    one.step((request, 40))
    assert counted(one) == {Cause.NEVER_STORED: HIT, Cause.LAST_BLOCK: LAST}
    one.step((request, 1))
    assert counted(one) == {}
    assert one.side.held()["prompts that are counted"] == 0


def test_a_request_that_gives_no_output_is_not_counted(core: MakeCore) -> None:
    one, request = core().connected(), named()
    one.ask(request)
    admit(one, request)
    one.step((request, 60))
    one.finish(request)
    one.step()
    assert counted(one) == {} and one.side.held()["prompts that are counted"] == 0


def test_what_comes_after_a_preemption_is_not_counted_again(core: MakeCore) -> None:
    one, request = core().connected(), named()
    one.ask(request)
    assert compute(one, request) == {Cause.NEVER_STORED: HIT, Cause.LAST_BLOCK: LAST}
    one.free(request)
    request.num_preemptions = 1
    one.ask(request)
    one.allocate(request, 0)
    one.step((request, LENGTH))
    assert counted(one) == {}


def test_what_the_engine_has_itself_has_no_cause(core: MakeCore) -> None:
    one, request = core().connected(), named()
    one.ask(request, blocks(2))
    assert compute(one, request, local=blocks(2)) == {Cause.NEVER_STORED: HIT - blocks(2), Cause.LAST_BLOCK: LAST}


def test_a_hit_that_loading_would_make_slower(core: MakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    one, request = core().connected(), named()
    fill(one, request.block_hashes[:4])
    monkeypatch.setattr(one.side.loads, "verdict", lambda request_id, start, stop: Verdict(0))
    assert one.ask(request) == 0
    assert compute(one, request) == {Cause.DECLINED: blocks(4), Cause.NEVER_STORED: blocks(2), Cause.LAST_BLOCK: LAST}


def test_a_load_that_failed(core: MakeCore) -> None:
    one, request = core().connected(), named()
    fill(one, request.block_hashes)
    assert one.ask(request) == HIT
    admit(one, request, taken=HIT)
    one.step()
    one.report(finished_recving={"r"}, failed_recving={"r"})
    one.free(request)
    assert one.ask(request) == 0
    assert compute(one, request) == {Cause.LOAD_FAILED: HIT, Cause.LAST_BLOCK: LAST}


def test_a_load_that_ended_is_counted_by_what_it_left(core: MakeCore) -> None:
    one, request = core().connected(), named()
    fill(one, request.block_hashes)
    assert one.ask(request) == HIT
    admit(one, request, taken=HIT)
    one.step()
    one.report(finished_recving={"r"})
    request.num_computed_tokens = HIT
    one.allocate(request, 0)
    one.step((request, LAST))
    assert counted(one) == {Cause.LAST_BLOCK: LAST}


def test_a_pool_that_was_lost_and_a_lookup_that_failed(core: MakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    one = core().connected()

    def late(_: float) -> None:
        raise PoolTimeoutError("no answer in time")

    with monkeypatch.context() as patch:
        rpc = one.side.stages.sessions[0].client.rpc
        pending = SimpleNamespace(done=lambda: True, result=late, on_done=lambda _: None)
        patch.setattr(rpc, "lookup_async", lambda *_, **__: pending)
        request = named("late")
        assert one.ask(request) == 0
        assert compute(one, request) == {Cause.LOOKUP_FAILED: HIT, Cause.LAST_BLOCK: LAST}
    lose_pool(one)
    request = named("away")
    assert one.ask(request) == 0
    assert compute(one, request) == {Cause.POOL_AWAY: HIT, Cause.LAST_BLOCK: LAST}


def test_too_many_others_wait(core: MakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    one, request = core().connected(), named()
    monkeypatch.setattr(StepBudget, "may_begin", property(lambda _: False))
    monkeypatch.setattr(StepBudget, "may_wait", lambda *_, **__: False)
    assert one.side.matched_tokens(request, 0) == (0, False)
    assert compute(one, request) == {Cause.WAITING: HIT, Cause.LAST_BLOCK: LAST}


def test_a_reset_and_an_engine_that_only_stores(core: MakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    one, request = core().connected(), named()
    with monkeypatch.context() as patch:
        patch.setattr(one.side.stages, "disagree", True)
        assert one.ask(request) == 0
        assert compute(one, request) == {Cause.SHARING_OFF: HIT, Cause.LAST_BLOCK: LAST}
    monkeypatch.setattr(one.side, "_reads", False)
    request = named("s")
    assert one.ask(request) == 0
    assert compute(one, request) == {Cause.NOT_ASKED: HIT, Cause.LAST_BLOCK: LAST}


def test_a_window_that_is_missing(core: MakeCore) -> None:
    one, request = core(cache=kv_cache(full_attention(), window(64))).connected(), named()
    fill(one, request.block_hashes[:4], group=0)
    assert one.ask(request) == 0
    assert compute(one, request) == {
        Cause.WINDOW_OR_STATE: blocks(4),
        Cause.NEVER_STORED: blocks(2),
        Cause.LAST_BLOCK: LAST,
    }


def test_every_cause_of_the_server_is_one_of_the_engines() -> None:
    assert {cause.name for cause in MissCause} <= {cause.name for cause in Cause}


LONG = 131_072
STEP = 2_048
CHEAP_S = 0.001
"""CPU time of the scheduler's thread, for one request and for one step of many."""


@pytest.mark.parametrize("taken", [0, blocks(5), blocks(16)])
def test_a_prompt_of_131072_tokens_is_accounted_for_to_the_token_and_at_no_cost(core: MakeCore, taken: int) -> None:
    one = core(decline_slow_loads=False).connected()
    request = make_request("long", [nth % 251 for nth in range(LONG)])
    fill(one, request.block_hashes[:64])
    session = one.side.stages.sessions[0]
    assert session.namespace is not None
    session.client.admin.remove(session.namespace, [BlockRun(0, request.block_hashes[16:24])])
    assert one.ask(request) == blocks(16)
    lookup = one.side.admission.candidates["long"].lookup
    others = {f"other {nth}": 1 for nth in range(256)}
    assert request.prefill_stats is not None
    request.prefill_stats.set(LONG, 0, taken)

    computed, costs = one.side.computed, []
    for _ in range(5):
        started = time.thread_time()
        computed.admitted(request, lookup)
        costs.append(time.thread_time() - started)
    assert min(costs) < CHEAP_S

    costs = []
    for at in range(taken, LONG, STEP):
        assert counted(one) == {}, "the prompt has not ended"
        request.num_computed_tokens = at
        started = time.thread_time()
        computed.step({**others, "long": min(STEP, LONG - at)})
        costs.append(time.thread_time() - started)
    assert sorted(costs)[len(costs) // 2] < CHEAP_S
    causes = counted(one)
    assert sum(causes.values()) == LONG - taken
    whole = (LONG - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert causes == {
        **({Cause.WINDOW_OR_STATE: blocks(16) - taken} if taken < blocks(16) else {}),
        Cause.REMOVED: blocks(48),  # With what is stored behind the removed blocks, and cannot be loaded without them.
        Cause.NEVER_STORED: whole - blocks(64),
        Cause.LAST_BLOCK: LONG - whole,
    }
    assert len(computed) == 0
