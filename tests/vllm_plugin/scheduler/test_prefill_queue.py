"""What waits for the device, request by request, beside a plain count over all of them."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.effort import effort
from vllm_plugin.scheduler.prefill_queue import PrefillQueue, Stage

NAMES = st.sampled_from("abcdef")


class Machine(RuleBasedStateMachine):
    """Requests that come, load, run and end in any order, some of them unknown to the queue."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = PrefillQueue()
        self.left: dict[str, tuple[Stage, int]] = {}

    @rule(name=NAMES, stage=st.sampled_from(Stage), num_tokens=st.integers(-3, 50))
    def put(self, name: str, stage: Stage, num_tokens: int) -> None:
        self.queue.put(name, stage, num_tokens)
        self.left.pop(name, None)
        if num_tokens > 0:
            self.left[name] = stage, num_tokens

    @rule(name=NAMES)
    def drop(self, name: str) -> None:
        self.queue.drop(name)
        self.left.pop(name, None)

    @rule(scheduled=st.dictionaries(NAMES, st.integers(1, 20)))
    def step(self, scheduled: dict[str, int]) -> None:
        expected = 0
        for name, count in scheduled.items():
            stage, num_tokens = self.left.get(name, (Stage.WAITING, 0))
            if stage is Stage.RUNNING:
                expected += min(count, num_tokens)
                self.left[name] = stage, num_tokens - count
                if num_tokens <= count:
                    del self.left[name]
        assert self.queue.step(scheduled) == expected

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


TestPrefillQueue = Machine.TestCase
TestPrefillQueue.settings = settings(max_examples=effort(50), stateful_step_count=30, deadline=None)


def test_waiting_tokens_count_by_the_share_of_prompts_that_was_computed_lately() -> None:
    queue = PrefillQueue()
    queue.put("a", Stage.WAITING, 1_000)
    for _ in range(200):
        queue.admitted(1_000, 250)
    num_requests, num_tokens = queue.behind("b")
    assert num_requests == 1 and 250 <= num_tokens < 251
