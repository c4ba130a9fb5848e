"""Bugs that KV connectors are known for, beside those of `tests/simulation/broken.py`: each scenario passes, and fails
where its bug is put back in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from kvpool.protocol.errors import UnavailableError
from tests.support.held import held_by
from tests.support.toy.engine import ToyEngine
from tests.support.toy.fleet import assert_nothing_is_left
from tests.support.toy.model import answer
from tests.support.toy.shapes import SHAPES
from tests.support.toy.slow_device import SlowDevice, unmarked
from tests.support.vllm_objects import tokens
from tests.vllm_plugin.bugs import (
    HANGS,
    MODES,
    WRONG_KV,
    FreshFleet,
    assert_caught,
    at_once,
    blocks_of,
    failing,
    held,
    replaced,
    step_until_loading,
    submitted,
)
from vllm_plugin import session
from vllm_plugin.connector import KVPoolConnector
from vllm_plugin.metadata import LoadJob
from vllm_plugin.scheduler.loads import Loads
from vllm_plugin.session import FAILURES_TO_OPEN
from vllm_plugin.worker.transfer import ReceiveThread

# KV is loaded after the zeroing of its blocks


def zero_new_blocks(engine: ToyEngine, launch: Callable[..., None] = lambda work, *args: work(*args)) -> set[int]:
    """Blocks are zeroed as vLLM's model runner does it, before the forward pass; returns those that have been."""
    zeroed: set[int] = set()
    run_rank = engine.run_rank

    def zero_and_run(rank: Any, scheduled: SchedulerOutput, metadata: Any, *args: Any) -> Any:
        bind = rank.connector.bind_connector_metadata

        def zero_and_bind(metadata: Any) -> None:
            fresh = scheduled.new_block_ids_to_zero or []
            loading = blocks_of(metadata.loads)
            assert loading.isdisjoint(fresh), f"blocks {loading & set(fresh)} are zeroed while they are loaded"
            zeroed.update(fresh)
            for kv in rank.cache.layers.values() if fresh else ():
                launch(kv.index_fill_, 0, torch.tensor(fresh, dtype=torch.int64), 0)
            bind(metadata)

        with patch.object(rank.connector, "bind_connector_metadata", zero_and_bind):
            return run_rank(rank, scheduled, metadata, *args)

    engine.run_rank = zero_and_run  # type: ignore[method-assign]
    return zeroed


@MODES
def test_zeroing_does_not_race_an_asynchronous_load(steps_ahead: int, fresh_fleet: FreshFleet) -> None:
    prompts = [tokens(100, nth) for nth in range(4)]

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        fleet.start(specs=SHAPES["qwen3-next"]).generate(*prompts[:3])
        engine = fleet.start(specs=SHAPES["qwen3-next"], num_blocks=48, steps_ahead=steps_ahead)
        zeroed = zero_new_blocks(engine)
        assert engine.generate(*prompts, max_tokens=40) == [answer(prompt, 40) for prompt in prompts]
        assert zeroed and engine.counted("loaded_blocks"), "the scenario wants zeroing and loads"
        assert_nothing_is_left(engine)

    assert_caught(
        scenario, replaced(KVPoolConnector, "get_loaded_kv_cache_group_ids", lambda *_: ()), "zeroed while they are"
    )


def test_a_load_waits_for_zeroing_and_computation_that_were_launched(fresh_fleet: FreshFleet) -> None:
    prompt, other = tokens(100), tokens(100, "other")
    specs = SHAPES["qwen3-next"]

    def scenario(deadline_s: float) -> None:
        device, fleet = SlowDevice(), fresh_fleet()
        fleet.start(specs=specs).generate(prompt)
        with device.copies():
            engine = fleet.start("kv_consumer", specs=specs, num_blocks=14)  # Nothing is stored, so nothing pinned.
            device.attach(engine)
            zeroed = zero_new_blocks(engine, device.launch)
            device.go.clear()
            engine.add("other", other)
            engine.step_until(lambda: zeroed, "a first step")
            engine.abort("other")  # Its blocks are free, and yet to be zeroed and written by the device.
            with submitted(ReceiveThread) as jobs:
                step_until_loading(engine, engine.add("r", prompt))
            assert zeroed & blocks_of(jobs), "the scenario wants the same blocks again"
            device.go.set()
            engine.run(deadline_s)
        assert engine.answers["r"] == answer(prompt, 8)
        assert engine.cached_tokens["r"] == 96

    @contextmanager
    def at_once_and_unmarked() -> Iterator[None]:
        with at_once(ReceiveThread):
            submit = ReceiveThread.submit

            def submit_unmarked(self: ReceiveThread, job: LoadJob) -> None:
                with unmarked():
                    submit(self, job)

            with patch.object(ReceiveThread, "submit", submit_unmarked):
                yield

    assert_caught(scenario, at_once_and_unmarked, WRONG_KV)


# A load that fails ends, also where few blocks are left


def test_hits_that_one_rank_cannot_load_are_soon_computed_at_once(fresh_fleet: FreshFleet) -> None:
    prompts = [tokens(100, nth) for nth in range(FAILURES_TO_OPEN + 3)]
    fleet = fresh_fleet()
    fleet.start(tp_size=2).generate(*prompts)
    engine = fleet.start(tp_size=2)
    with patch.object(session, "FIRST_WAIT_S", 600.0):
        engine.ranks[1].worker.session.report(UnavailableError("the test took the pool away"), "load")
        for prompt in prompts:
            assert engine.generate(prompt) == [answer(prompt, 8)]
            engine.scheduler.reset_prefix_cache()
            engine.step_until(lambda: not held_by(engine.connector)["pinned blocks"], "no pins")
    assert engine.counted("load_failures") == FAILURES_TO_OPEN


@pytest.mark.usefixtures("answered_at_once")  # The loads are to be under way at once.
def test_several_failed_loads_do_not_deadlock_the_block_pool(fresh_fleet: FreshFleet) -> None:
    prompts = [tokens(145, nth) for nth in range(3)]  # 15 blocks to load, 30 to compute.

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        fleet.start(specs=SHAPES["gemma3"], num_blocks=128).generate(*prompts)
        second = fleet.start(specs=SHAPES["gemma3"], num_blocks=36)
        second.scheduler.scheduler_reserve_full_isl = False
        for nth, prompt in enumerate(prompts):
            second.add(f"r{nth}", prompt)
        with failing(ReceiveThread), held(ReceiveThread) as go:
            for _ in range(100):
                second.step()
            go.set()
            second.run(deadline_s)
        assert [second.answers[f"r{nth}"] for nth in range(3)] == [answer(prompt, 8) for prompt in prompts]
        assert_nothing_is_left(second)

    assert_caught(scenario, replaced(Loads, "has_room", lambda *_: True), HANGS)


# A hit that is taken in part


@pytest.mark.parametrize("cut", [16, 40])
def test_vllm_may_take_less_than_was_found(cut: int, fresh_fleet: FreshFleet) -> None:
    prompt = tokens(100)
    matched = KVPoolConnector.get_num_new_matched_tokens

    def cut_short(self: KVPoolConnector, *args: Any) -> tuple[int | None, bool]:
        count, is_async = matched(self, *args)
        return (count - cut if count else count), is_async

    fleet = fresh_fleet()
    fleet.start().generate(prompt)
    engine = fleet.start()
    with patch.object(KVPoolConnector, "get_num_new_matched_tokens", cut_short):
        assert engine.generate(prompt) == [answer(prompt, 8)]
    assert engine.cached_tokens["prompt-0"] == 96 - cut
    assert engine.counted("loaded_blocks") == math.ceil((96 - cut) / 16)
    assert_nothing_is_left(engine)
