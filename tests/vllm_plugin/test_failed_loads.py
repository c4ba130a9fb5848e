"""A load that fails ends: its request is computed, once, and nothing waits for ever, also where few blocks are left.

Each scenario passes, and fails where a bug that KV connectors are known for is put back in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from kvpool.protocol.errors import UnavailableError
from tests.support.held import held_by
from tests.support.toy.fleet import assert_nothing_is_left
from tests.support.toy.model import answer
from tests.support.toy.shapes import SHAPES
from tests.support.vllm_objects import tokens
from tests.vllm_plugin.bugs import HANGS, FreshFleet, assert_caught, failing, held, replaced
from vllm_plugin import breaker
from vllm_plugin.breaker import FAILURES_TO_OPEN
from vllm_plugin.connector import KVPoolConnector
from vllm_plugin.scheduler.loads import Loads
from vllm_plugin.scheduler.scheduler import KVPoolScheduler
from vllm_plugin.worker.copy.cpu import CpuCopier
from vllm_plugin.worker.transfer import ReceiveThread, TransferThread
from vllm_plugin.worker.worker import KVPoolWorker


def test_an_exception_in_a_thread_does_not_leave_the_engine_waiting(fresh_fleet: FreshFleet) -> None:
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


def test_a_failed_load_of_several_groups_names_the_request(fresh_fleet: FreshFleet) -> None:
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


def test_a_request_whose_load_failed_does_not_look_up_again(fresh_fleet: FreshFleet) -> None:
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


def test_hits_that_one_rank_cannot_load_are_soon_computed_at_once(fresh_fleet: FreshFleet) -> None:
    prompts = [tokens(100, nth) for nth in range(FAILURES_TO_OPEN + 3)]
    fleet = fresh_fleet()
    fleet.start(tp_size=2).generate(*prompts)
    engine = fleet.start(tp_size=2)
    with patch.object(breaker, "FIRST_WAIT_S", 600.0):
        engine.ranks[1].worker.session.report(UnavailableError("the test took the pool away"), "load")
        for prompt in prompts:
            assert engine.generate(prompt) == [answer(prompt, 8)]
            engine.scheduler.reset_prefix_cache()
            engine.step_until(lambda: not held_by(engine.connector)["pinned blocks"], "no pins")
    assert engine.counted("load_failures") == FAILURES_TO_OPEN


@pytest.mark.usefixtures("answered_at_once")  # The loads are to be under way at once.
def test_several_loads_do_not_deadlock_the_block_pool(fresh_fleet: FreshFleet) -> None:
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
