"""Loads, also loads that fail, leave every request the blocks that it needs.

Each scenario passes, and fails where a bug that KV connectors are known for is put back in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.toy.fleet import assert_nothing_is_left
from tests.support.toy.model import answer
from tests.support.toy.shapes import SHAPES
from tests.support.vllm_objects import tokens
from tests.vllm_plugin.bugs import HANGS, FreshFleet, assert_caught, failing, held, replaced
from vllm_plugin.scheduler.loads import Loads
from vllm_plugin.worker.transfer import ReceiveThread

pytestmark = pytest.mark.usefixtures("answered_at_once")  # The loads are to be under way at once.


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
