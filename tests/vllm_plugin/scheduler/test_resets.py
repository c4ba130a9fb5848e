"""Resets: what an engine may read after one, how its weights are named, how a reset ends that found blocks in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.toy.engine import ToyEngine
from tests.support.toy.fleet import Fleet, assert_nothing_is_left
from tests.support.toy.model import answer
from tests.support.vllm_objects import make_request, tokens
from tests.vllm_plugin.core import Core, MakeCore, blocks, fill
from vllm_plugin.metrics import KVPoolStats


def gauge(core: Core) -> float | None:
    stats = core.side.stats() or KVPoolStats({})
    value: float | None = stats.data.get("sharing_off")
    return value


def generate(engine: ToyEngine, prompt: list[int]) -> int:
    """Answers a prompt right; returns how many tokens were not computed."""
    engine.wait_until_connected()
    assert engine.generate(prompt) == [answer(prompt, 8, engine.weights)]
    return engine.cached_tokens.pop("prompt-0")


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_reset_of_the_own_cache_alone_may_mean_new_weights(steps_ahead: int, fleet: Fleet) -> None:
    """As RL frameworks do it: update the weights, then `reset_prefix_cache()`, which leaves the connector out."""
    engine, other = fleet.start(extra={"on_reset": "leave"}, steps_ahead=steps_ahead), fleet.start()
    prompt = tokens(100)
    assert generate(engine, prompt) == 0
    assert engine.scheduler.reset_prefix_cache()
    engine.weights = 2
    assert generate(engine, prompt) == 0
    assert engine.scheduler.reset_prefix_cache()
    assert generate(engine, prompt) == 0
    # What was stored with the old weights is right for whoever has them, and nothing has been added to it.
    assert generate(other, prompt) == 96
    assert other.counted("hit_tokens") == 96
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("on_reset", ["connector", "keep"])
def test_an_engine_may_say_that_a_reset_of_its_own_cache_is_no_more_than_that(on_reset: str, fleet: Fleet) -> None:
    engine, prompt = fleet.start(extra={"on_reset": on_reset}), tokens(100)
    assert generate(engine, prompt) == 0
    assert engine.scheduler.reset_prefix_cache()
    assert generate(engine, prompt) == 96
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert generate(engine, prompt) == (96 if on_reset == "keep" else 0)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's core runs in the caller's process: there, stores under way stop a reset (`block_pool.py`)."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("asked", ["connector", "own cache"])
def test_a_reset_that_finds_a_store_under_way_ends_when_the_store_does(asked: str, core: MakeCore) -> None:
    one = core().connected()
    request, other = make_request("r", tokens(100)), make_request("s", tokens(100))
    one.allocate(request, 0)
    jobs = one.step((request, 100)).stores
    one.finish(request)
    assert one.pool.reset_prefix_cache() is False
    if asked == "connector":
        assert one.side.reset() is False
    assert gauge(one) == 1
    one.connected()
    fill(one, request.block_hashes)
    assert one.side.matched_tokens(other, 0) == (0, False), "shared while blocks of the old weights are in use"
    one.report(*(job.job_id for job in jobs))
    assert gauge(one) == 0
    assert one.ask(other) == blocks(6)


@pytest.mark.usefixtures("in_process")
def test_what_the_own_cache_holds_from_before_a_reset_goes_when_the_reset_ends(core: MakeCore) -> None:
    one = core().connected()
    request = make_request("r", tokens(100))
    one.allocate(request, 0)
    (table,) = ([one.pool.blocks[block_id] for block_id in one.ids(request)],)
    one.pool.cache_full_blocks(request, table, 0, 6, 16, 0)
    jobs = one.step((request, 100)).stores
    one.finish(request)
    assert one.pool.reset_prefix_cache() is False
    assert one.side.reset() is False
    assert len(one.pool.cached_block_hash_to_block) == 6
    one.report(*(job.job_id for job in jobs))
    assert len(one.pool.cached_block_hash_to_block) == 0


def test_a_reset_of_the_own_cache_that_vllm_refuses_for_running_requests_changes_nothing(core: MakeCore) -> None:
    one = core().connected()
    request, other = make_request("r", tokens(100)), make_request("s", tokens(50, "s"))
    fill(one, other.block_hashes)
    one.allocate(request, 0)
    assert one.pool.reset_prefix_cache() is False
    assert gauge(one) != 1
    assert one.ask(other) == blocks(3)


def test_engines_whose_weights_have_one_name_share_again(fleet: Fleet, tmp_path: Path) -> None:
    files = [tmp_path / name for name in "ab"]
    first, second = (fleet.start(extra={"on_reset": "leave", "weights_epoch_file": str(file)}) for file in files)
    prompt = tokens(100)
    assert generate(first, prompt) == 0 and generate(second, prompt) == 96

    def load(weights: int, *names: str | None) -> None:
        for engine, file, name in zip((first, second), files, names, strict=True):
            file.unlink(missing_ok=True)
            if name is not None:
                file.write_text(f"{name}\n")
            engine.weights = weights
            assert engine.scheduler.reset_prefix_cache(reset_connector=True)
            generate(engine, tokens(10))  # Workers learn of it with a step.

    load(2, "step 2", "step 2")
    assert generate(first, prompt) == 0 and generate(second, prompt) == 96
    load(3, "step 3", None)  # Without a name nobody knows what the second one has.
    assert generate(first, prompt) == generate(second, prompt) == 0
    load(1, "", "")  # The weights that they were started with.
    assert generate(first, prompt) == generate(second, prompt) == 96
    load(1, "", "")  # Nothing has changed: as after sleeping.
    assert generate(first, prompt) == generate(second, prompt) == 96


@pytest.mark.parametrize("content", [b"a\nb", b"x" * 201, b"\xff\xfe", b"a#b"])
def test_a_name_that_is_none_is_worth_no_sharing(content: bytes, core: MakeCore, tmp_path: Path, caplog: Any) -> None:
    file = tmp_path / "name"
    file.write_bytes(content)
    one, other = (core(weights_epoch_file=str(file), salt="one").connected() for _ in range(2))
    assert one.side.reset() and other.side.reset()
    assert one.side.stages.weights_epoch != other.side.stages.weights_epoch
    assert "weights_epoch_file" in caplog.text


def test_sharing_is_off_while_a_reset_waits_also_where_the_name_is_known(core: MakeCore, tmp_path: Path) -> None:
    file = tmp_path / "name"
    file.write_text("new")
    one = core(weights_epoch_file=str(file), weights_epoch="run").connected()
    request = make_request("r", tokens(100))
    one.allocate(request, 0)
    one.step((request, 16))
    assert one.side.reset() is False and one.side.reset() is False
    assert one.side.stages.weights_epoch == "run@new"
    one.connected()
    assert one.step((request, 64)).stores == []


def test_two_kvpools_under_one_multi_connector_share_one_block_pool(core: MakeCore) -> None:
    """Each of them observes resets, and lets them pass though blocks are pinned."""
    one, other = core(salt="one").connected(), core(salt="other").connected()
    other.side.bind_block_pool(one.pool)
    request = make_request("r", tokens(100))
    one.allocate(request, 0)
    one.step((request, 100))
    one.finish(request)
    epochs = one.side.stages.weights_epoch, other.side.stages.weights_epoch
    for _ in range(2):
        assert one.pool.reset_prefix_cache()
    assert one.side.stages.weights_epoch != epochs[0] and other.side.stages.weights_epoch != epochs[1]
