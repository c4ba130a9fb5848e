"""Blocks of the engine stay allocated while a thread may touch them, whatever becomes of their request.

Each scenario passes, and fails where a bug that KV connectors are known for is put back in.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput

from tests.support.toy.fleet import assert_nothing_is_left
from tests.support.toy.model import answer
from tests.support.toy.shapes import SHAPES
from tests.support.vllm_objects import tokens
from tests.vllm_plugin.bugs import (
    HANGS,
    MODES,
    WRONG_KV,
    FreshFleet,
    assert_caught,
    blocks_of,
    held,
    replaced,
    step_until_loading,
    submitted,
)
from vllm_plugin.connector import KVPoolConnector
from vllm_plugin.metadata import ConnectorMetadata, GroupBlocks, StoreJob
from vllm_plugin.scheduler import stores
from vllm_plugin.scheduler.loads import Loads
from vllm_plugin.scheduler.scheduler import KVPoolScheduler
from vllm_plugin.scheduler.store_jobs import StoreJobs
from vllm_plugin.scheduler.stores import Stores
from vllm_plugin.worker.transfer import ReceiveThread, SendThread
from vllm_plugin.worker.worker import KVPoolWorker


@pytest.mark.usefixtures("keeps_stores", "answered_at_once")
def test_preemption_frees_no_block_under_a_running_send(fresh_fleet: FreshFleet) -> None:
    prompts = [tokens(100, nth) for nth in range(2)]

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        first = fleet.start(num_blocks=16, extra={"max_pinned_fraction": 1.0})
        preempted = first.preempted
        with held(SendThread) as go:
            for nth, prompt in enumerate(prompts):
                first.add(f"r{nth}", prompt, max_tokens=60)
            for _ in range(100):
                first.step()
            assert preempted, "the scenario wants preemption"
            go.set()
            first.run(deadline_s)
        assert_nothing_is_left(first)
        second = fleet.start()
        assert second.generate(*prompts) == [answer(prompt, 8) for prompt in prompts]
        assert second.cached_tokens == {"prompt-0": 96, "prompt-1": 96}

    assert_caught(scenario, replaced(StoreJobs, "blocks", lambda self, storing: []), WRONG_KV)


def test_an_aborted_request_is_reported_once(fresh_fleet: FreshFleet) -> None:
    prompt = tokens(100)

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        fleet.start().generate(prompt)
        engine = fleet.start()
        with held(ReceiveThread) as go:
            step_until_loading(engine, engine.add("r", prompt))
            engine.abort("r")
            for _ in range(3):
                engine.step()
            assert engine.num_used_blocks() == 6, "a thread may still be writing to them"
            go.set()
            engine.run(deadline_s)
        assert_nothing_is_left(engine)

    results = KVPoolConnector.get_transfer_results

    def report_what_was_aborted(self: KVPoolConnector, finished_req_ids: set[str]) -> Any:
        reported = results(self, finished_req_ids)
        reported.finished_recving.update(finished_req_ids)
        return reported

    assert_caught(
        scenario,
        replaced(KVPoolConnector, "get_transfer_results", report_what_was_aborted),
        "_update_from_kv_xfer_finished",
    )


def test_a_request_id_may_come_back_while_its_old_stores_live(fresh_fleet: FreshFleet) -> None:
    prompts = [tokens(70, nth) for nth in range(3)]

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        first = fleet.start()
        with held(SendThread) as go:
            for prompt in prompts:  # Each under the same name, while what was stored of the one before is on its way.
                first.add("r", prompt, max_tokens=4)
                first.step_until(lambda: first.answers["r"], "a token")
                first.abort("r")
            go.set()
            first.run(deadline_s)
        assert_nothing_is_left(first)
        second = fleet.start()
        assert second.generate(*prompts) == [answer(prompt, 8) for prompt in prompts]
        assert set(second.cached_tokens.values()) == {64}

    @contextmanager
    def by_request() -> Iterator[None]:
        add, reported = StoreJobs.add, StoreJobs.reported

        def named_by_request(self: StoreJobs, request: Any, *args: Any) -> Any:
            self._job_ids = itertools.repeat(hash(request.request_id))  # type: ignore[assignment]
            return add(self, request, *args)

        def reported_if_known(self: StoreJobs, job_id: int, ranks: int, has_failed: bool) -> None:
            if job_id in self._storing:
                reported(self, job_id, 1, has_failed)

        with (
            patch.object(StoreJobs, "add", named_by_request),
            patch.object(StoreJobs, "reported", reported_if_known),
        ):
            yield

    assert_caught(scenario, by_request, "'pinned blocks': 8")


def test_an_abort_may_leave_more_hashes_than_blocks(fresh_fleet: FreshFleet) -> None:
    prompt = tokens(100)

    def scenario(deadline_s: float) -> None:
        engine = fresh_fleet().start()
        request = engine.add("r", prompt)
        side = engine.connector
        engine.step_until(lambda: engine.answers["r"], "a token")
        side.stores.tracked["r"].stored = [0]
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = {"r": 1}
        (table,) = engine.scheduler.kv_cache_manager.get_block_ids("r")
        output.kv_connector_block_state = KVConnectorBlockState({"r"}, lambda _: (table[:2],), {})
        (job,) = side.build_metadata(output).stores
        assert len(request.block_hashes) == 6 and job.groups[0].block_ids == [table[:2]]
        engine.ranks[0].worker._submit([job])
        engine.run(deadline_s)
        assert_nothing_is_left(engine)

    blocks = Stores._blocks

    class Endless(list[int]):
        def __len__(self) -> int:
            return 1 << 30

        def __getitem__(self, key: Any) -> Any:
            blocks = super().__getitem__
            return [blocks(nth) for nth in range(key.start, key.stop)] if isinstance(key, slice) else blocks(key)

    def unbounded(self: Any, tracked: Any, idx: int, tables: Any, room: int) -> Any:
        return blocks(self, tracked, idx, [Endless(table) for table in tables], room)

    assert_caught(scenario, replaced(Stores, "_blocks", unbounded), "list index out of range", IndexError)


class NotNull(int):
    """A block id that does not look like the null block's."""

    def __bool__(self) -> bool:
        return True


class Solid(list[int]):
    """A block table that looks as if it had no null block."""

    def __getitem__(self, idx: Any) -> Any:
        taken: Any = super().__getitem__(idx)
        return [NotNull(each) for each in taken] if isinstance(idx, slice) else NotNull(taken)


def test_the_null_block_is_never_moved(fresh_fleet: FreshFleet) -> None:
    prompt = tokens(200)
    specs = SHAPES["gemma3"]

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        first = fleet.start(specs=specs, options={"max_num_batched_tokens": 64})
        second = fleet.start(specs=specs)
        with submitted(SendThread) as sent, submitted(ReceiveThread) as received:
            first.generate(prompt, max_tokens=60)
            first.connector.contents.forget_all()
            first.connector.stores.proven = lambda *_: None  # type: ignore[method-assign]
            first.generate([*prompt, *tokens(40, "next")])  # Its own blocks, and none before their window.
            assert 0 not in blocks_of(sent), "the null block is stored"
            second.generate(prompt)
            assert received and 0 not in blocks_of(received), "the null block is loaded"

    load_parts = Loads.parts

    def with_null_blocks(
        self: Any, request: Any, lookup: Any, tables: Any, start_tokens: int, stop_tokens: int
    ) -> list[GroupBlocks]:
        parts: list[GroupBlocks] = load_parts(self, request, lookup, tables, start_tokens, stop_tokens) or []
        for part in parts:
            group, first = self._geometry.groups[part.group_idx], max(0, part.firsts[0] - 1)
            stop = stop_tokens // group.kind.block_tokens
            part.runs = [self._geometry.names.run(request, part.group_idx, group.kind, first, stop)]
            part.block_ids = [list(tables[member][first:stop]) for member in group.members]
        return parts

    blocks = Stores._blocks

    def store_null_blocks(self: Any, tracked: Any, idx: int, tables: Any, room: int) -> Any:
        with patch.object(stores.Retention, "blocks", lambda _, kind, start, stop: list(range(start, stop))):
            return blocks(self, tracked, idx, [Solid(table) for table in tables], room)

    assert_caught(scenario, replaced(Loads, "parts", with_null_blocks), "the null block is loaded")
    assert_caught(scenario, replaced(Stores, "_blocks", store_null_blocks), "the null block is stored")


@pytest.mark.parametrize(("shape", "tp_size"), [("deepseek", 2), ("gemma3", 8)])
def test_a_rank_that_writes_nothing_reports_its_stores(shape: str, tp_size: int, fresh_fleet: FreshFleet) -> None:
    prompt = tokens(100)

    def scenario(deadline_s: float) -> None:
        engine = fresh_fleet().start(specs=SHAPES[shape], tp_size=tp_size)
        engine.add("r", prompt)
        engine.run(deadline_s)
        assert_nothing_is_left(engine)

    submit = KVPoolWorker._submit

    def submit_what_is_written(self: Any, jobs: list[StoreJob]) -> None:
        submit(self, [job for job in jobs if any(self._mine[part.group_idx].writes for part in job.groups)])

    assert_caught(scenario, replaced(KVPoolWorker, "_submit", submit_what_is_written), HANGS)


@MODES
@pytest.mark.usefixtures("keeps_stores", "answered_at_once")
def test_blocks_of_a_resumed_request_replace_the_old_ones(
    steps_ahead: int, fresh_fleet: FreshFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "DECODED_BLOCKS", 1)  # What is left at the end is stored by the newest table.
    prompts = [tokens(40, nth) for nth in range(3)]
    turns = [[*prompt, *answer(prompt, 60), 3] for prompt in prompts]

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        first = fleet.start(num_blocks=16, steps_ahead=steps_ahead, extra={"max_pinned_fraction": 1.0})
        preempted = first.preempted
        assert first.generate(*prompts, max_tokens=60) == [answer(prompt, 60) for prompt in prompts]
        assert preempted, "the scenario wants preemption"
        second = fleet.start(num_blocks=128)
        assert second.generate(*turns) == [answer(turn, 8) for turn in turns]
        assert set(second.cached_tokens.values()) == {96}

    @contextmanager
    def remembered() -> Iterator[None]:
        build = KVPoolScheduler.build_metadata
        tables: dict[str, list[int]] = {}

        def build_from_memory(self: KVPoolScheduler, output: SchedulerOutput) -> ConnectorMetadata:
            for new in output.scheduled_new_reqs:
                tables[new.req_id] = list(new.block_ids[0])
            cached = output.scheduled_cached_reqs
            for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
                tables[request_id] += new_ids[0] if new_ids else []
            output.kv_connector_block_state = KVConnectorBlockState(
                set(output.num_scheduled_tokens), lambda request_id: (tables[request_id],), {}
            )
            return build(self, output)

        with patch.object(KVPoolScheduler, "build_metadata", build_from_memory):
            yield

    assert_caught(scenario, remembered, WRONG_KV)
