"""Spans of requests for OpenTelemetry: the request, its lookup and its load, on the scheduler's side.

A request's span is a child of what vLLM was told by the client (`Request.trace_headers`, where the engine was started
with an OTLP endpoint), else a root. Loads and stores of the ranks are its children: jobs carry its traceparent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpool.client.tracing import TRACEPARENT, Tracing
from kvpool.protocol.reports import Cause
from vllm_plugin.scheduler.lookups import RequestLookup

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class _Spans:
    request: Any
    lookup: Any = None
    load: Any = None


class RequestSpans:
    """Begins and ends the spans of an engine's requests.

    Belongs to the scheduler's thread, which never waits for a collector.

    Args:
        tracing: makes the spans; None: there are none.
    """

    def __init__(self, tracing: Tracing | None):
        self._tracing = tracing
        self._open: dict[str, _Spans] = {}

    def asked(self, request: Request) -> None:
        """Begins a request's spans when it is first looked up, or when vLLM first asks for its loadable tokens."""
        if self._tracing is None or request.request_id in self._open:
            return
        headers = getattr(request, "trace_headers", None) or {}
        attributes = {"kvpool.request_id": request.request_id, "kvpool.prompt_tokens": request.num_prompt_tokens}
        span = self._tracing.start("kvpool.request", headers.get(TRACEPARENT, ""), attributes)
        lookup = self._tracing.start("kvpool.lookup", self._tracing.traceparent(span), kind="CLIENT")
        self._open[request.request_id] = _Spans(span, lookup)

    def traceparent(self, request_id: str, part: str = "request") -> str:
        """Of a request's span, or of its "lookup" or its "load"; empty if there is none."""
        span = getattr(self._open.get(request_id), part, None)
        return "" if span is None or self._tracing is None else self._tracing.traceparent(span)

    def admitted(self, request: Request, lookup: RequestLookup | None, num_external_tokens: int) -> None:
        """vLLM has allocated the request's blocks: ends the lookup's span, and begins the load's."""
        spans = self._open.get(request.request_id)
        if spans is None or self._tracing is None:
            return
        if spans.lookup is not None:
            spans.lookup.set_attribute("kvpool.hit_tokens", num_external_tokens)
            spans.lookup.set_attribute("kvpool.answered", lookup is not None and bool(lookup.answers))
            # vLLM may ask long after the answer.
            waited_s = 0.0 if lookup is None else max(0.0, time.monotonic() - lookup.answered_at)
            spans.lookup.end(time.time_ns() - int(1e9 * waited_s))
            spans.lookup = None
        if num_external_tokens and spans.load is None:
            attributes = {"kvpool.tokens": num_external_tokens}
            spans.load = self._tracing.start("kvpool.load", self.traceparent(request.request_id), attributes)

    def load_ended(self, request_id: str, succeeded: bool) -> None:
        """Ends the load's span, after every rank has reported the load."""
        spans = self._open.get(request_id)
        if spans is not None and spans.load is not None and self._tracing is not None:
            if not succeeded:
                self._tracing.fail(spans.load, "load failed")
            spans.load.end()
            spans.load = None

    def prompt_ended(self, request: Request, causes: Mapping[Cause, int]) -> None:
        """Notes the computed tokens by cause, with the step that computes the last of the prompt."""
        if (spans := self._open.get(request.request_id)) is not None:
            for cause, count in causes.items():
                spans.request.set_attribute(f"kvpool.computed_tokens.{cause.label}", count)

    def finished(self, request_id: str) -> None:
        """Ends all spans of a request that has ended."""
        if (spans := self._open.pop(request_id, None)) is not None:
            for span in (spans.lookup, spans.load, spans.request):
                if span is not None:
                    span.end()
