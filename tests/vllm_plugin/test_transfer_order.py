"""KV is stored after the computation that writes it, and loaded after the zeroing of its blocks.

Each scenario passes, and fails where a bug that KV connectors are known for is put back in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from tests.support.toy.engine import ToyEngine
from tests.support.toy.fleet import assert_nothing_is_left
from tests.support.toy.model import answer
from tests.support.toy.shapes import SHAPES
from tests.support.toy.slow_device import SlowDevice, unmarked
from tests.support.vllm_objects import tokens
from tests.vllm_plugin.bugs import (
    MODES,
    WRONG_KV,
    FreshFleet,
    assert_caught,
    at_once,
    blocks_of,
    replaced,
    step_until_loading,
    submitted,
)
from vllm_plugin.connector import KVPoolConnector
from vllm_plugin.metadata import LoadJob, StoreJob
from vllm_plugin.scheduler.stores import Stores, TrackedRequest
from vllm_plugin.worker.transfer import ReceiveThread, SendThread


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


def test_kv_is_read_after_its_computation(fresh_fleet: FreshFleet) -> None:
    prompt = tokens(100)

    def scenario(deadline_s: float) -> None:
        device, fleet = SlowDevice(), fresh_fleet()
        with device.copies():
            first = fleet.start()
            device.attach(first)
            first.generate(prompt)
        second = fleet.start()
        assert second.generate(prompt) == [answer(prompt, 8)]
        assert second.cached_tokens["prompt-0"] == 96

    @contextmanager
    def at_once_and_unmarked() -> Iterator[None]:
        with at_once(SendThread):
            submit = SendThread.submit

            def submit_unmarked(self: SendThread, job: StoreJob) -> None:
                with unmarked():
                    submit(self, job)

            with patch.object(SendThread, "submit", submit_unmarked):
                yield

    assert_caught(scenario, at_once_and_unmarked, WRONG_KV)


@MODES
def test_the_slot_of_the_last_sampled_token_is_not_stored(steps_ahead: int, fresh_fleet: FreshFleet) -> None:
    prompt = tokens(50)
    turn = [*prompt, *answer(prompt, 30), *tokens(5, "next")]  # Five blocks; nobody computed the 80th token's KV.

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        fleet.start(steps_ahead=steps_ahead).generate(prompt, max_tokens=30)
        second = fleet.start(steps_ahead=steps_ahead)
        assert second.generate(turn) == [answer(turn, 8)]
        assert second.cached_tokens["prompt-0"] == 64

    @contextmanager
    def stored_at_the_end() -> Iterator[None]:
        finished = KVPoolConnector.request_finished_all_groups

        def store_all_tokens(self: Any, request: Any, block_ids: Any) -> Any:
            self.scheduler_side.stores.tracked[request.request_id].written = request.num_tokens
            return finished(self, request, block_ids)

        with patch.object(KVPoolConnector, "request_finished_all_groups", store_all_tokens):
            yield

    assert_caught(scenario, stored_at_the_end, WRONG_KV)


def test_a_block_is_stored_after_its_last_chunk_is_computed(fresh_fleet: FreshFleet) -> None:
    prompt = tokens(200)

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        first = fleet.start(options={"max_num_batched_tokens": 47, "max_num_seqs": 4})
        with at_once(SendThread):
            first.generate(prompt)
        second = fleet.start()
        assert second.generate(prompt) == [answer(prompt, 8)]
        assert second.cached_tokens["prompt-0"] == 192

    store_job = Stores._store_job

    def whole_prompt(self: Stores, tracked: TrackedRequest, num_tokens: int, *rest: Any) -> Any:
        return store_job(self, tracked, num_tokens + 1_000, *rest)

    assert_caught(scenario, replaced(Stores, "_store_job", whole_prompt), WRONG_KV)
