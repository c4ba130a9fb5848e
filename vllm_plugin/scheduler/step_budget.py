"""What the connector may cost one step of the engine: time of the scheduler's thread, and repeated prefix searches.

Every answer "ask again" makes vLLM search (walk) the request's prefix in its own cache once more, with the next step.
That costs `WALK_TOKEN_S` for every token that the engine has itself, on the scheduler's thread, for as long as the
request waits. Beyond the bounds below a request is computed instead of waiting. One request may always wait.
"""

from __future__ import annotations

import time

from vllm_plugin.metrics import Recorder

MIN_WAIT_S, MAX_WAIT_SHARE, ASYNC_WAIT_SHARE = 0.5e-3, 0.1, 0.25
"""All lookups of one step together wait so long for their answers, and this part of a step for answers that are due:
more of a short step with asynchronous scheduling, where the device works meanwhile. A request whose answer comes later
waits for a whole step."""
MAX_BEGIN_S = 1e-3
"""Once the connector has worked so long in one step, waiting left out, the step begins no more lookups and loads, and
receives no more answers. What has begun costs as much again later: in the metadata, and when it ends."""
SHORT_STEP_S, LONG_STEP_S = 0.05, 0.25
"""`MAX_BEGIN_S` is 2 % of a short step. A longer step has more in proportion, as its requests wait longer for the next
one; up to that of a long step, since the engine may have been idle."""
WALK_S = 15e-6
WALK_TOKEN_S = 55e-9
"""Measured: 1.75 ms for 32,768 tokens."""
MAX_WALKS_S = 2e-3
"""Bound for requests that wait for room or for blocks on their way up from a tier, which may take seconds."""
MAX_LOOKUP_WALKS_S = 10e-3
"""Bound for all requests that wait. A lookup is answered by the next step as a rule, and a request has one."""


class StepBudget:
    """Measures the connector's calls of one step, and says whether more work may begin or wait in it."""

    def __init__(self, recorder: Recorder, *, is_async: bool = False) -> None:
        self._recorder, self._is_async = recorder, is_async
        self._spent_s = 0.0
        self._waited_s = 0.0
        self._walks_s = 0.0
        self._began_at: float | None = None
        self._step_began_at = time.monotonic()
        self._lasted_s = self._answer_s = 0.0

    def new_step(self) -> None:
        """The step that is being scheduled is over."""
        now = time.monotonic()
        self._lasted_s, self._step_began_at = now - self._step_began_at, now
        self._spent_s = self._waited_s = self._walks_s = 0.0

    @property
    def _step_s(self) -> float:
        """How long the step is taken to be: as the last one, or as the time since that was scheduled, if it is longer.

        Behind an idle time vLLM schedules two steps at once.
        """
        return min(max(self._lasted_s, time.monotonic() - self._step_began_at), LONG_STEP_S)

    def __enter__(self) -> None:
        """A call of the connector begins; calls do not nest."""
        self._began_at = time.monotonic()

    def __exit__(self, *_: object) -> None:
        assert self._began_at is not None
        self._spent_s += time.monotonic() - self._began_at
        self._began_at = None

    @property
    def may_begin(self) -> bool:
        """Whether a lookup or a load may begin in this step."""
        return self._spent_s < max(1, self._step_s / SHORT_STEP_S) * MAX_BEGIN_S

    def wait_s(self, sent_at: float) -> float:
        """How long a lookup may wait for its answer now."""
        wait_s = MAX_WAIT_SHARE * self._step_s
        if self._is_async:
            wait_s = max(wait_s, ASYNC_WAIT_SHARE * min(self._step_s, SHORT_STEP_S))
        least_s, most_s = (most - self._waited_s for most in (MIN_WAIT_S, wait_s))
        is_due = sent_at + self._answer_s < time.monotonic() + most_s
        return max(0.0, least_s, most_s if is_due else 0.0)

    def answered(self, seconds: float) -> None:
        """So long after it was sent a lookup was answered."""
        self._answer_s += (seconds - self._answer_s) / 8

    def waited(self, seconds: float) -> None:
        self._waited_s += seconds
        self._spent_s -= seconds  # The call that waits counts it, too.

    def may_wait(self, local_tokens: int, is_lookup: bool = False) -> bool:
        """Whether one more request may be told to ask again, for a lookup's answer if `is_lookup`; counts it if so."""
        walk_s = WALK_S + WALK_TOKEN_S * local_tokens
        bound_s = MAX_LOOKUP_WALKS_S if is_lookup else MAX_WALKS_S
        if self._walks_s and self._walks_s + walk_s > bound_s:
            self._recorder.add("declined_waits")
            return False
        self._walks_s += walk_s
        return True
