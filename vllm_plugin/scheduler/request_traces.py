"""What became of the engine's last requests, for `kvpool explain --request`: ids, token counts and times; no tokens.

The scheduler's thread writes, and the reporter's thread takes.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.causes import Cause
from kvpool.explanation_messages import encode_trace
from kvpool.reports import MAX_REQUESTS, MAX_REQUESTS_BYTES
from kvpool.request_trace import MAX_REQUEST_ID_CHARS, RequestTrace
from vllm_plugin.scheduler.request_lookup import RequestLookup
from vllm_plugin.scheduler.request_watcher import RequestWatcher

if TYPE_CHECKING:
    from vllm.v1.request import Request

MAX_TRACES = 1_000
"""Of the last requests that wait to be reported."""
MAX_OPEN = 4_096
"""Requests that have not ended; the oldest is forgotten for another."""

_FRAME_BYTES = 16
"""Of a request in a report: its tag, its length, and its age."""


@dataclass(slots=True)
class _Open:
    asked_at: float
    lookup_ms: float = 0.0
    tier_wait_ms: float = 0.0
    admitted_at: float = 0.0
    loaded_tokens: int = 0
    load_ms: float = 0.0
    load_failed: bool = False


class RequestTraces(RequestWatcher):
    """Those of one engine.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._ended: deque[tuple[float, RequestTrace]] = deque(maxlen=MAX_TRACES)

    def asked(self, request: Request) -> None:
        if request.request_id not in self._open:
            self._open[request.request_id] = _Open(self._clock())
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)

    def admitted(self, request: Request, lookup: RequestLookup | None, num_external_tokens: int) -> None:
        found = self._open.get(request.request_id)
        if found is None or (found.admitted_at and not found.load_failed):
            return  # A load that has ended is admitted again.
        now = found.admitted_at = self._clock()
        found.loaded_tokens = num_external_tokens
        if lookup is not None and lookup.answers:
            waited_s = max(0.0, now - lookup.wait.began_at)
            # vLLM may ask long after the answer.
            ended_at = now if waited_s else min(now, lookup.answered_at)
            found.lookup_ms, found.tier_wait_ms = 1000 * (ended_at - found.asked_at), 1000 * waited_s

    def load_ended(self, request_id: str, succeeded: bool) -> None:
        if (found := self._open.get(request_id)) is not None:
            found.load_ms = 1000 * (self._clock() - found.admitted_at)
            if not succeeded:
                found.load_failed, found.loaded_tokens = True, 0

    def prompt_ended(self, request: Request, causes: Mapping[Cause, int]) -> None:
        found = self._open.pop(request.request_id, None)
        if found is None:
            return
        computed = {cause.label: count for cause, count in causes.items() if count}
        num_tokens = request.num_prompt_tokens
        trace = RequestTrace(
            request.request_id[:MAX_REQUEST_ID_CHARS],
            prompt_tokens=num_tokens,
            local_tokens=max(0, num_tokens - found.loaded_tokens - sum(computed.values())),
            loaded_tokens=found.loaded_tokens,
            computed_tokens=computed,
            lookup_ms=found.lookup_ms,
            tier_wait_ms=found.tier_wait_ms,
            load_ms=found.load_ms,
            load_failed=found.load_failed,
        )
        self._ended.append((found.admitted_at, trace))

    def finished(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def take(self) -> tuple[tuple[float, RequestTrace], ...]:
        """Requests that have ended, as many as one report may tell of, with when they were given blocks.

        The others wait for the next report.
        """
        taken: list[tuple[float, RequestTrace]] = []
        nbytes = 0
        while self._ended and len(taken) < MAX_REQUESTS and nbytes < MAX_REQUESTS_BYTES:
            taken.append(self._ended.popleft())
            nbytes += encode_trace(taken[-1][1]).ByteSize() + _FRAME_BYTES
        return tuple(taken)
