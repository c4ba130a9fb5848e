"""Resets: what an engine may read after one, how its weights are named, how a reset ends that found blocks in use."""

from __future__ import annotations

import pytest

from tests.support.processes import wait_for
from tests.support.toy.engine import ToyEngine
from tests.support.toy.fixtures import BLOCK_TOKENS
from tests.support.toy.fleet import Fleet, assert_nothing_is_left
from tests.support.toy.model import answer
from tests.support.vllm_objects import make_request, tokens
from tests.vllm_plugin.core import Core, MakeCore, blocks, fill, stored
from vllm_plugin.model.weights import Weights
from vllm_plugin.scheduler import provenance


def generate(engine: ToyEngine, prompt: list[int]) -> int:
    """Answers a prompt right; returns how many tokens were not computed."""
    engine.wait_until_connected()
    assert engine.generate(prompt) == [answer(prompt, 8, engine.weights)]
    return engine.cached_tokens.pop("prompt-0")


@pytest.mark.parametrize("asked", ["connector", "own cache"])
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_reset_means_new_weights_where_the_weights_in_memory_are_new(
    steps_ahead: int, asked: str, fleet: Fleet
) -> None:
    """As RL frameworks do it: update the weights, then `reset_prefix_cache()`, which leaves the connector out."""
    engine, other, alike = fleet.start(steps_ahead=steps_ahead), fleet.start(), fleet.start()
    prompt = tokens(100)
    assert generate(engine, prompt) == 0
    for weights, own, others in ((1, 96, 96), (2, 0, 96), (2, 96, 96), (1, 96, 96)):
        assert engine.scheduler.reset_prefix_cache(reset_connector=asked == "connector")
        engine.weights = weights
        assert tell(engine, prompt) == own
        # What was stored with the old weights is right for engines with the old weights; nothing has been added to it.
        assert other.scheduler.reset_prefix_cache()
        assert generate(other, prompt) == others
    alike.weights = 2
    assert alike.scheduler.reset_prefix_cache(reset_connector=True)
    assert tell(alike, prompt) == 96
    assert_nothing_is_left(engine)


def tell(engine: ToyEngine, prompt: list[int]) -> int:
    """Answers a prompt after the ranks have told their weights, and the sessions are open again."""
    generate(engine, tokens(10, "ranks tell their weights with the steps of some request"))
    return generate(engine, prompt)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_weights_that_no_file_names_are_named_by_what_is_in_memory(
    tp_size: int, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in a bucket, or random ones (`load_format="dummy"`)."""
    nameless = Weights("m", "", "")
    monkeypatch.setattr("vllm_plugin.model.identity.describe_weights", lambda *_: nameless)
    first, second, third = (fleet.start(tp_size=tp_size) for _ in range(3))
    prompt, third.weights = tokens(100), 2
    assert [tell(engine, prompt) for engine in (first, second)] == [0, 96]
    # Its first report was made with weights 1: only a reset tells of others.
    assert third.scheduler.reset_prefix_cache()
    assert tell(third, prompt) == 0


def test_weights_that_cannot_be_read_are_nobody_elses(core: MakeCore) -> None:
    one, other = (core(salt="unreadable").connected() for _ in range(2))
    request = stored(one)
    for each in (one, other):
        each.weights = b""
        assert each.side.reset() and each.side.matched_tokens(request, 0) == (None, False)
        each.step()
        assert each.connected().ask(request) == 0
    assert one.side.stages.weights_epoch != other.side.stages.weights_epoch


def test_a_request_does_not_wait_for_ever_for_ranks_that_tell_nothing(
    one: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "CHECK_WITHIN_S", 0.1)
    request = stored(one)
    assert one.side.reset()
    wait_for(lambda: one.side.matched_tokens(request, 0) == (0, False), "the request to be computed")


def test_an_engine_that_computes_nothing_is_not_asked_for_its_weights(one: Core) -> None:
    """While it sleeps its weights are not there: reading them would end the process."""
    assert one.side.reset()
    assert one.step().weights_check == 0
    assert one.side.matched_tokens(make_request("r", tokens(100)), 0) == (None, False)
    assert one.step().weights_check == 1


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's core runs in the caller's process: there, stores under way stop a reset (`let_resets_pass`)."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("asked", ["connector", "own cache"])
def test_a_reset_that_finds_a_store_under_way_ends_when_the_store_does(asked: str, one: Core) -> None:
    request, other = make_request("r", tokens(100)), make_request("s", tokens(100))
    one.allocate(request, 0)
    one.pool.cache_full_blocks(request, one.tables["r"][0], 0, 6, BLOCK_TOKENS, 0)
    jobs = one.step((request, 100)).stores
    one.finish(request)
    assert one.pool.reset_prefix_cache() is False
    if asked == "connector":
        assert one.side.reset() is False
    assert one.counted().get("sharing_off") == 1
    one.connected()
    fill(one, request.block_hashes)
    assert one.side.matched_tokens(other, 0) == (0, False), "shared while blocks of the old weights are in use"
    assert len(one.pool.cached_block_hash_to_block) == 6
    one.report(*(job.job_id for job in jobs))
    assert len(one.pool.cached_block_hash_to_block) == 0, "the own cache holds blocks from before the reset"
    assert one.counted().get("sharing_off") == 0
    assert one.ask(other) == blocks(6)


def test_a_reset_of_the_own_cache_that_vllm_refuses_for_running_requests_changes_nothing(one: Core) -> None:
    request, other = make_request("r", tokens(100)), make_request("s", tokens(50, "s"))
    fill(one, other.block_hashes)
    one.allocate(request, 0)
    assert one.pool.reset_prefix_cache() is False
    assert one.counted().get("sharing_off") != 1
    assert one.ask(other) == blocks(3)


def test_two_kvpools_under_one_multi_connector_share_one_block_pool(core: MakeCore) -> None:
    """Each of them observes resets, and lets them pass though blocks are pinned."""
    one, other = core(salt="one").connected(), core(salt="other").connected()
    other.side.bind_block_pool(one.pool)
    request = make_request("r", tokens(100))
    one.compute(request)
    one.finish(request)
    for _ in range(2):
        assert one.pool.reset_prefix_cache()
    assert not one.side._resets.is_checked and not other.side._resets.is_checked


def test_what_is_computed_after_a_reset_is_stored_once_the_weights_are_named(one: Core) -> None:
    request = make_request("r", tokens(100))
    assert one.side.reset()
    one.weights = b"2"
    one.allocate(request, 0)
    first = one.step((request, 48))
    assert first.stores == [], "stored before the ranks have told their weights"
    one.connected()
    later = one.step((request, 52))
    assert [job.num_blocks for job in later.stores] == [6]
    assert later.stores[0].weights_epoch == later.weights_epoch != first.weights_epoch
