"""What waits for the device, request by request, beside a plain count over all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.effort import effort
from tests.support.vllm_objects import make_request, tokens
from tests.vllm_plugin.core import Core, MakeCore, blocks, fill
from vllm_plugin.scheduler.load_policy import PrefillQueue, Stage

NAMES = st.sampled_from("abcdef")
NUM_TOKENS = 50


@dataclass
class Prompt:
    """What the queue reads of a request."""

    request_id: str
    num_computed_tokens: int
    num_tokens: int = NUM_TOKENS


class Machine(RuleBasedStateMachine):
    """Requests that come, load, run and end in any order, some of them unknown to the queue."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: Any = PrefillQueue()
        self.prompts = {name: Prompt(name, 0) for name in "abcdef"}
        self.left: dict[str, tuple[Stage, int]] = {}

    @rule(name=NAMES, stage=st.sampled_from(Stage), num_there=st.integers(0, NUM_TOKENS))
    def put(self, name: str, stage: Stage, num_there: int) -> None:
        self.prompts[name].num_computed_tokens = num_there
        self.queue.put(self.prompts[name], stage, num_there)
        self._now_left(name, stage, NUM_TOKENS - num_there)

    @rule(name=NAMES)
    def drop(self, name: str) -> None:
        self.queue.drop(name)
        self.left.pop(name, None)

    @rule(name=NAMES, num_tokens=st.integers(0, NUM_TOKENS))
    def there_is_more_or_less_than_was_known(self, name: str, num_tokens: int) -> None:
        """Another connector has loaded a part, or the request was preempted."""
        if name in self.left:
            self.prompts[name].num_computed_tokens = min(num_tokens, NUM_TOKENS - 1)

    @rule(scheduled=st.dictionaries(NAMES, st.integers(1, 20)))
    def step(self, scheduled: dict[str, int]) -> None:
        expected = 0
        for name, count in scheduled.items():
            if self.left.get(name, (Stage.WAITING, 0))[0] is Stage.RUNNING:
                left = NUM_TOKENS - self.prompts[name].num_computed_tokens
                expected += min(count, left)
                self._now_left(name, Stage.RUNNING, left - count)
        assert self.queue.step(scheduled) == expected
        for name, count in scheduled.items():
            self.prompts[name].num_computed_tokens += count

    @invariant()
    def counts(self) -> None:
        assert len(self.queue) == len(self.left)
        for stage in Stage:
            assert self.queue.tokens[stage] == sum(num for at, num in self.left.values() if at is stage)

    @rule(name=NAMES)
    def behind(self, name: str) -> None:
        waiting = [num for other, (at, num) in self.left.items() if at is Stage.WAITING and other != name]
        loading = [num for at, num in self.left.values() if at is Stage.LOADING]
        assert self.queue.behind(name) == (len(waiting) + len(loading), sum(waiting) + sum(loading))

    def _now_left(self, name: str, stage: Stage, num_tokens: int) -> None:
        self.left.pop(name, None)
        if num_tokens > 0:
            self.left[name] = stage, num_tokens


TestPrefillQueue = Machine.TestCase
TestPrefillQueue.settings = settings(max_examples=effort(50), stateful_step_count=30, deadline=None)


def test_waiting_tokens_count_by_the_share_of_prompts_that_was_computed_lately() -> None:
    queue: Any = PrefillQueue()
    queue.put(Prompt("a", 0, 1_000), Stage.WAITING)
    for _ in range(200):
        queue.admitted(Prompt("b", 0, 1_000), 500, 250)
        queue.drop("b")
    num_requests, num_tokens = queue.behind("b")
    assert num_requests == 1 and 250 <= num_tokens < 251


# As vLLM calls the connector


def queued(one: Core) -> dict[Stage, int]:
    """Tokens by stage, without the stages that have none."""
    return {stage: count for stage, count in one.side.queue.tokens.items() if count}


def test_a_request_is_counted_from_its_arrival_to_its_first_token(core: MakeCore) -> None:
    one, request = core(decline_slow_loads=False).connected(), make_request("r", tokens(100))
    fill(one, request.block_hashes[:4])
    one.side.arrived(request)
    assert queued(one) == {Stage.WAITING: 100}
    one.allocate(request, one.ask(request))
    assert queued(one) == {Stage.LOADING: 100 - blocks(4)}
    request.num_computed_tokens = blocks(4)
    one.report(finished_recving={"r"})
    one.allocate(request, 0)
    assert queued(one) == {Stage.RUNNING: 100 - blocks(4)}
    one.step((request, 30))
    assert queued(one) == {Stage.RUNNING: 70 - blocks(4)}
    one.step((request, 70 - blocks(4)))
    assert queued(one) == {}
    one.finish(request)


def test_a_preempted_request_is_counted_once_and_as_a_whole_again(core: MakeCore) -> None:
    one, request = core().connected(), make_request("r", tokens(100))
    one.side.arrived(request)
    one.allocate(request, one.ask(request))
    one.step((request, 60))
    one.free(request)
    one.allocate(request, one.ask(request))
    assert queued(one) == {Stage.RUNNING: 100}
    one.step((request, 100))
    assert queued(one) == {}
    one.finish(request)


def test_tokens_that_the_engine_or_another_connector_has_are_not_counted(core: MakeCore) -> None:
    one, request = core().connected(), make_request("r", tokens(100))
    one.side.arrived(request)
    assert one.ask(request, blocks(1)) == 0
    assert one.side.matched_tokens(request, blocks(1)) == (0, False)  # vLLM allocates in the step in which it asks.
    one.allocate(request, 0)
    assert queued(one) == {Stage.RUNNING: 100 - blocks(1)}
    request.num_computed_tokens = blocks(5)
    one.step((request, 100 - blocks(5)))
    assert queued(one) == {}
    one.finish(request)


def test_a_hook_that_failed_leaves_nothing_of_the_request_before(core: MakeCore) -> None:
    one, first, second = core().connected(), make_request("a", tokens(100)), make_request("b", tokens(100, 1))
    one.side.matched_tokens(first, blocks(3))
    one.side.miss(second)
    one.allocate(second, 0)
    assert queued(one) == {Stage.RUNNING: 100}
    one.finish(second)
