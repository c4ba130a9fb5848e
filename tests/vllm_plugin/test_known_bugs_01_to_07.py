"""Bugs that KV connectors are known for, 1 to 7: each scenario passes, and fails where the bug is put back in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput

from tests.support.toy.fleet import Fleet, assert_nothing_is_left
from tests.support.toy.model import answer
from tests.support.toy.shapes import SHAPES
from tests.support.vllm_objects import tokens
from tests.vllm_plugin.bugs import (
    HANGS,
    WRONG_KV,
    assert_caught,
    failing,
    held,
    replaced,
    step_until_loading,
)
from vllm_plugin.connector import KVPoolConnector
from vllm_plugin.metadata import WorkerMetadata
from vllm_plugin.scheduler.pins import Pins
from vllm_plugin.scheduler.scheduler import KVPoolScheduler
from vllm_plugin.scheduler.stores import Stores, Tracked
from vllm_plugin.worker.copy.cpu import CpuCopier
from vllm_plugin.worker.transfer import ReceiveThread, SendThread, TransferThread
from vllm_plugin.worker.worker import KVPoolWorker

FreshFleet = Callable[[], Fleet]


@pytest.mark.usefixtures("keeps_stores")
def test_bug_01_preemption_frees_blocks_under_a_running_send(fresh_fleet: FreshFleet) -> None:
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

    pin = Pins.pin
    assert_caught(scenario, replaced(Pins, "pin", lambda self, job_id, block_ids: pin(self, job_id, [])), WRONG_KV)


def test_bug_02_aborted_request_is_reported_twice(fresh_fleet: FreshFleet) -> None:
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


def test_bug_03_exception_in_a_thread_leaves_the_engine_waiting(fresh_fleet: FreshFleet) -> None:
    prompt = tokens(100)
    scatter = CpuCopier.scatter

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        fleet.start().generate(prompt)
        engine = fleet.start()
        broken = iter([True])

        def fail_once(*args: Any) -> None:
            if next(broken, False):
                raise RuntimeError("a copy that fails in a way nobody foresaw")
            scatter(*args)

        with patch.object(CpuCopier, "scatter", fail_once):
            engine.add("r", prompt)
            engine.run(deadline_s)
        assert engine.answers["r"] == answer(prompt, 8)
        assert engine.counted("loaded_blocks") == 0
        assert_nothing_is_left(engine)

    def run_to_the_first_error(self: TransferThread[Any]) -> None:
        while (turn := self._turns.get()) is not None and not self._stopping:
            job, mark = self._queued.pop(turn)
            try:
                succeeded = self._transfer(job, mark)
            except RuntimeError:
                return
            with self._lock:
                self._ended.append((job, succeeded))

    assert_caught(scenario, replaced(TransferThread, "run", run_to_the_first_error), HANGS)


def test_bug_04_invalid_block_ids_with_several_groups(fresh_fleet: FreshFleet) -> None:
    prompt = tokens(100)

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        fleet.start(specs=SHAPES["gemma3"]).generate(prompt)
        engine = fleet.start(specs=SHAPES["gemma3"])
        with failing(ReceiveThread):
            engine.add("r", prompt)
            engine.run(deadline_s)
        assert engine.counted("hit_tokens") == 96, "the scenario wants a load"
        assert engine.answers["r"] == answer(prompt, 8)
        assert_nothing_is_left(engine)

    @contextmanager
    def report_blocks() -> Iterator[None]:
        results, start_loads = KVPoolWorker.transfer_results, KVPoolWorker.start_loads
        block_ids: dict[str, set[int]] = {}
        invalid: set[int] = set()

        def note_blocks(self: KVPoolWorker, metadata: Any) -> None:
            for job in metadata.loads:
                block_ids[job.request_id] = {each for part in job.groups for row in part.block_ids for each in row}
            start_loads(self, metadata)

        def without_requests(self: KVPoolWorker) -> Any:
            reported = results(self)
            invalid.update(*(block_ids[request_id] for request_id in reported.failed_recving))
            reported.failed_recving = set()
            return reported

        with (
            patch.object(KVPoolWorker, "start_loads", note_blocks),
            patch.object(KVPoolWorker, "transfer_results", without_requests),
            patch.object(KVPoolConnector, "get_block_ids_with_load_errors", lambda self: set(invalid)),
        ):
            yield

    assert_caught(scenario, report_blocks, "multiple KV cache groups", RuntimeError)


def test_bug_05_bad_object_and_recompute_make_an_endless_loop(fresh_fleet: FreshFleet) -> None:
    prompt = tokens(100)

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        fleet.start().generate(prompt)
        engine = fleet.start()
        with failing(ReceiveThread):
            engine.add("r", prompt)
            engine.run(deadline_s)
        assert engine.answers["r"] == answer(prompt, 8)
        assert engine.counted("lookups") == 1
        assert_nothing_is_left(engine)

    update = KVPoolScheduler.update

    def update_and_forget_failures(self: KVPoolScheduler, output: Any) -> None:
        update(self, output)
        self._failed.clear()

    assert_caught(scenario, replaced(KVPoolScheduler, "update", update_and_forget_failures), HANGS)


def test_bug_06_readmission_while_old_transfers_live(fresh_fleet: FreshFleet) -> None:
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
        store_job, update = Stores._store_job, Stores.update

        def named_by_request(self: Stores, tracked: Tracked, *args: Any) -> Any:
            self._job_ids = itertools.repeat(hash(tracked.request.request_id))  # type: ignore[assignment]
            return store_job(self, tracked, *args)

        def update_if_known(self: Stores, metadata: WorkerMetadata) -> None:
            update(self, WorkerMetadata({job_id: 1 for job_id in metadata.ended_stores if job_id in self._storing}))

        with (
            patch.object(Stores, "_store_job", named_by_request),
            patch.object(Stores, "update", update_if_known),
        ):
            yield

    assert_caught(scenario, by_request, "'pinned blocks': 8")


def test_bug_07_abort_leaves_more_hashes_than_blocks(fresh_fleet: FreshFleet) -> None:
    prompt = tokens(100)

    def scenario(deadline_s: float) -> None:
        engine = fresh_fleet().start()
        request = engine.add("r", prompt)
        side = engine.connector
        engine.step_until(lambda: engine.answers["r"], "a token")
        side._stores._tracked["r"].stored = [0]
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
