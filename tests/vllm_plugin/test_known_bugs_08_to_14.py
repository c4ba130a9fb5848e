"""Bugs that KV connectors are known for, 8 to 14: each scenario passes, and fails where the bug is put back in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from kvpool.types import BlockRun
from tests.support.toy.engine import ToyEngine
from tests.support.toy.fixtures import BLOCK_TOKENS
from tests.support.toy.fleet import Fleet, assert_nothing_is_left
from tests.support.toy.model import answer
from tests.support.toy.shapes import SHAPES
from tests.support.toy.slow_device import SlowDevice, unmarked
from tests.support.vllm_objects import tokens
from tests.vllm_plugin.bugs import (
    HANGS,
    WRONG_KV,
    assert_caught,
    at_once,
    failing,
    held,
    replaced,
    step_until_loading,
    submitted,
)
from vllm_plugin.connector import KVPoolConnector
from vllm_plugin.metadata import GroupBlocks, LoadJob, StoreJob
from vllm_plugin.model.hit_rules import Found, Reach, Rule
from vllm_plugin.scheduler import lookups, stores
from vllm_plugin.scheduler.loads import Loads
from vllm_plugin.scheduler.lookups import Lookups
from vllm_plugin.scheduler.scheduler import KVPoolScheduler
from vllm_plugin.scheduler.stores import Stores, Tracked
from vllm_plugin.worker.transfer import ReceiveThread, SendThread

FreshFleet = Callable[[], Fleet]
MODES = pytest.mark.parametrize("steps_ahead", [0, 1], ids=["synchronous", "asynchronous"])


@pytest.mark.parametrize("shape", ["qwen3-next", "states alone"])
def test_bug_08_mamba_state_by_position(shape: str, fresh_fleet: FreshFleet) -> None:
    prompt = tokens(200)
    shorter = [*prompt[:90], *tokens(40, "other")]

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        first = fleet.start(specs=SHAPES[shape])
        first.generate(prompt)
        assert_nothing_is_left(first)
        second = fleet.start(specs=SHAPES[shape])
        assert second.generate(shorter, prompt) == [answer(shorter, 8), answer(prompt, 8)]
        assert second.cached_tokens == {"prompt-0": 0, "prompt-1": 192}

    store_job = Stores._store_job

    def by_position(self: Stores, tracked: Tracked, num_tokens: int, state: KVConnectorBlockState, budget: int) -> Any:
        request_id = tracked.request.request_id
        tables = state.get_block_ids(request_id)
        assert tables is not None
        offers = [
            (member, block_id, (nth + 1) * BLOCK_TOKENS)
            for member, table in enumerate(tables)
            for nth, block_id in enumerate(table)
        ]
        positional = KVConnectorBlockState({request_id}, state.get_block_ids, {request_id: offers})  # type: ignore
        return store_job(self, tracked, num_tokens, positional, budget)

    assert_caught(scenario, replaced(Stores, "_store_job", by_position), WRONG_KV)


class Everything(Found):
    """Whatever is asked for is there."""

    def __init__(self) -> None:
        super().__init__(0, 0, 0)

    def has(self, start: int, stop: int) -> bool:
        return True


@pytest.mark.parametrize(("shape", "right"), [("gemma3", 0), ("qwen3-next", 0), ("llama4", 48)])
def test_bug_09_hit_of_full_attention_alone_on_a_hybrid_model(shape: str, right: int, fresh_fleet: FreshFleet) -> None:
    prompt = tokens(200)
    shorter = [*prompt[:90], *tokens(40, "other")]

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        fleet.start(specs=SHAPES[shape], num_blocks=128).generate(prompt)
        second = fleet.start(specs=SHAPES[shape], num_blocks=128)
        assert second.generate(shorter, prompt) == [answer(shorter, 8), answer(prompt, 8)]
        assert second.cached_tokens == {"prompt-0": right, "prompt-1": 192}

    @contextmanager
    def attention_only() -> Iterator[None]:
        longest, load_parts = lookups.longest, KVPoolScheduler._load_parts

        def longest_of_attention(rules: Sequence[Any], found: Sequence[Found], *bounds: int) -> int:
            full = [pair for pair in zip(rules, found, strict=True) if pair[0].reach is Reach.ALL]
            return longest([rule for rule, _ in full], [blocks for _, blocks in full], *bounds)

        def parts_of_attention(self: Stores, request: Any, lookup: Any, *args: Any) -> list[GroupBlocks]:
            lookup.found = [Everything() for _ in lookup.found]
            parts = load_parts(self, request, lookup, *args) or []
            return [part for part in parts if self._groups[part.group_idx].rule.reach is Reach.ALL]

        with (
            patch.object(lookups, "longest", longest_of_attention),
            patch.object(KVPoolScheduler, "_load_parts", parts_of_attention),
        ):
            yield

    assert_caught(scenario, attention_only, WRONG_KV)


def blocks_of(jobs: list[Any]) -> set[int]:
    return {block_id for job in jobs for part in job.groups for row in part.block_ids for block_id in row}


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
def test_bug_10_zeroing_races_an_asynchronous_load(steps_ahead: int, fresh_fleet: FreshFleet) -> None:
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


def test_bug_10_load_overtakes_zeroing_and_computation_that_were_launched(fresh_fleet: FreshFleet) -> None:
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


def test_bug_11_kv_is_read_without_waiting_for_its_computation(fresh_fleet: FreshFleet) -> None:
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


class NotNull(int):
    """A block id that does not look like the null block's."""

    def __bool__(self) -> bool:
        return True


class Solid(list[int]):
    """A block table that looks as if it had no null block."""

    def __getitem__(self, idx: Any) -> Any:
        taken: Any = super().__getitem__(idx)
        return [NotNull(each) for each in taken] if isinstance(idx, slice) else NotNull(taken)


def test_bug_12_null_block_is_moved(fresh_fleet: FreshFleet) -> None:
    prompt = tokens(200)
    specs = SHAPES["gemma3"]

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        first = fleet.start(specs=specs, options={"max_num_batched_tokens": 64})
        second = fleet.start(specs=specs)
        with submitted(SendThread) as sent, submitted(ReceiveThread) as received:
            first.generate(prompt, max_tokens=60)
            first.connector._stores._recent.forget_all()
            first.connector._stores.proven = lambda *_: None  # type: ignore[method-assign]
            first.generate([*prompt, *tokens(40, "next")])  # Its own blocks, and none before their window.
            assert 0 not in blocks_of(sent), "the null block is stored"
            second.generate(prompt)
            assert received and 0 not in blocks_of(received), "the null block is loaded"

    load_parts = KVPoolScheduler._load_parts

    def with_null_blocks(self: Any, request: Any, lookup: Any, tables: Any, stop_tokens: int) -> list[GroupBlocks]:
        parts: list[GroupBlocks] = load_parts(self, request, lookup, tables, stop_tokens) or []
        for part in parts:
            group, first = self._groups[part.group_idx], max(0, part.firsts[0] - 1)
            stop = stop_tokens // group.rule.block_tokens
            part.runs = [self._names.run(request, part.group_idx, group.rule, first, stop)]
            part.block_ids = [list(tables[member][first:stop]) for member in group.members]
        return parts

    blocks = Stores._blocks

    def store_null_blocks(self: Any, tracked: Any, idx: int, tables: Any, room: int) -> Any:
        with patch.object(stores.Retention, "blocks", lambda _, rule, start, stop: list(range(start, stop))):
            return blocks(self, tracked, idx, [Solid(table) for table in tables], room)

    assert_caught(scenario, replaced(KVPoolScheduler, "_load_parts", with_null_blocks), "the null block is loaded")
    assert_caught(scenario, replaced(Stores, "_blocks", store_null_blocks), "the null block is stored")


@pytest.mark.parametrize("shape", ["gemma3", "gpt-oss", "windows alone", "block sizes"])
def test_bug_12_window_is_too_short(shape: str, fresh_fleet: FreshFleet) -> None:
    prompt = tokens(200)
    specs = SHAPES[shape]

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        fleet.start(specs=specs).generate(prompt)
        second = fleet.start(specs=specs)
        assert second.generate(prompt) == [answer(prompt, 8)]
        assert second.cached_tokens["prompt-0"] == 192

    @contextmanager
    def short_windows() -> Iterator[None]:
        first, load_parts = Rule.first, KVPoolScheduler._load_parts

        def too_late(self: Rule, boundary: int) -> int:
            return first(self, boundary) + (self.reach is Reach.WINDOW)

        def from_the_rule(self: Any, request: Any, lookup: Any, tables: Any, stop_tokens: int) -> list[GroupBlocks]:
            lookup.found = [Everything() for _ in lookup.found]
            parts: list[GroupBlocks] = load_parts(self, request, lookup, tables, stop_tokens) or []
            for part in parts:
                skip = max(0, self._groups[part.group_idx].rule.first(stop_tokens) - part.firsts[0])
                (run,) = part.runs
                part.runs = [BlockRun(run.group_idx, run.block_hashes[skip:], run.block_hashes[skip - 1])]
                part.block_ids = [row[skip:] for row in part.block_ids]
            return parts

        with patch.object(Rule, "first", too_late), patch.object(KVPoolScheduler, "_load_parts", from_the_rule):
            yield

    assert_caught(scenario, short_windows, WRONG_KV)


@pytest.mark.parametrize(("shape", "right"), [("qwen3-next", 80), ("states alone", 80)])
def test_bug_13_full_prompt_hit_is_not_cut(shape: str, right: int, fresh_fleet: FreshFleet) -> None:
    prompt = tokens(96)
    specs = SHAPES[shape]

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        fleet.start(specs=specs).generate(prompt, [*prompt, 3])
        second = fleet.start(specs=specs)
        assert second.generate(prompt) == [answer(prompt, 8)]
        assert second.cached_tokens["prompt-0"] == right

    boundary = Lookups.boundary

    class OneMore:
        """A request that seems to have one token more."""

        def __init__(self, request: Any):
            self._request = request
            self.num_tokens = request.num_tokens + 1

        def __getattr__(self, name: str) -> Any:
            return getattr(self._request, name)

    def of_all_tokens(self: Lookups, request: Any, local: int) -> int | None:
        return boundary(self, OneMore(request), local)  # type: ignore[arg-type]

    assert_caught(scenario, replaced(Lookups, "boundary", of_all_tokens), WRONG_KV)


def test_bug_14_several_asynchronous_loads_deadlock_the_block_pool(fresh_fleet: FreshFleet) -> None:
    prompts = [tokens(145, nth) for nth in range(4)]  # Nine blocks to load, and one to compute.

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        fleet.start(num_blocks=64).generate(*prompts)
        second = fleet.start(num_blocks=19)
        second.scheduler.scheduler_reserve_full_isl = False
        for nth, prompt in enumerate(prompts):
            second.add(f"r{nth}", prompt)
        second.run(deadline_s)
        assert [second.answers[f"r{nth}"] for nth in range(4)] == [answer(prompt, 8) for prompt in prompts]
        assert second.counted("loaded_blocks") >= 4 * 9 - 9
        assert_nothing_is_left(second)

    @contextmanager
    def nothing_kept_free() -> Iterator[None]:
        with (
            patch.object(Scheduler, "_inflight_prefill_reserved_blocks", lambda _: 0),
            patch.object(Loads, "has_room", lambda *_: True),
        ):
            yield

    assert_caught(scenario, nothing_kept_free, HANGS)


def test_bug_14_several_loads_that_fail_deadlock_the_block_pool(fresh_fleet: FreshFleet) -> None:
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
