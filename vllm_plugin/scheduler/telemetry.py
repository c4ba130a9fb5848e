"""What is told of requests on the scheduler's side: spans, causes of computed tokens, reports to the server."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import vllm
from vllm.logger import init_logger

from kvpool.client.tracing import TRACEPARENT, Tracing
from kvpool.protocol.errors import InvalidRequestError, KVPoolError, PermissionDeniedError
from kvpool.protocol.reports import MAX_STAGES, REPORTER_BYTES, Cause, ReportRequest
from kvpool.protocol.types import MissCause
from kvpool.version import __version__
from vllm_plugin.metrics import CAUSE_PREFIX, Recorder
from vllm_plugin.model.groups import Geometry
from vllm_plugin.scheduler.lookups import RequestLookup
from vllm_plugin.scheduler.stages import Stages

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.kvpool.reporter")

REPORT_EVERY_S = 10.0
FIRST_REPORT_EVERY_S = 1.0
"""Until the first report is acknowledged: operators see the engine soon."""
REPORT_TIMEOUT_MS = 2_000
LAST_REPORT_S = 1.0

_OF_SERVER = {cause: Cause[cause.name] for cause in MissCause}


class RequestSpans:
    """OpenTelemetry spans of each request, its lookup and its load; none without `tracing`. No collector is waited for.

    A request's span is a child of what vLLM was told by the client (`Request.trace_headers`, where the engine was
    started with an OTLP endpoint), else a root. Loads and stores of the ranks are its children: jobs carry its
    traceparent.
    """

    def __init__(self, tracing: Tracing | None):
        self._tracing = tracing
        self._open: dict[str, dict[str, Any]] = {}  # Request -> "request", "lookup" and "load" -> span.

    def asked(self, request: Request) -> None:
        """Begins a request's spans when it is first looked up, or when vLLM first asks about it."""
        if self._tracing is None or request.request_id in self._open:
            return
        headers = getattr(request, "trace_headers", None) or {}
        attributes = {"kvpool.request_id": request.request_id, "kvpool.prompt_tokens": request.num_prompt_tokens}
        span = self._tracing.start("kvpool.request", headers.get(TRACEPARENT, ""), attributes)
        lookup = self._tracing.start("kvpool.lookup", self._tracing.traceparent(span), kind="CLIENT")
        self._open[request.request_id] = {"request": span, "lookup": lookup}

    def traceparent(self, request_id: str, part: str = "request") -> str:
        """Of a request's span, or of its "lookup" or its "load"; empty if there is none."""
        span = self._open.get(request_id, {}).get(part)
        return "" if span is None or self._tracing is None else self._tracing.traceparent(span)

    def admitted(self, request: Request, lookup: RequestLookup | None, num_external_tokens: int) -> None:
        """vLLM has allocated the request's blocks: ends the lookup's span, and begins the load's."""
        spans = self._open.get(request.request_id)
        if spans is None or self._tracing is None:
            return
        if (span := spans.pop("lookup", None)) is not None:
            span.set_attribute("kvpool.hit_tokens", num_external_tokens)
            span.set_attribute("kvpool.answered", lookup is not None and bool(lookup.answers))
            # vLLM may ask long after the answer.
            waited_s = 0.0 if lookup is None else max(0.0, time.monotonic() - lookup.answered_at)
            span.end(time.time_ns() - int(1e9 * waited_s))
        if num_external_tokens and "load" not in spans:
            attributes = {"kvpool.tokens": num_external_tokens}
            spans["load"] = self._tracing.start("kvpool.load", self.traceparent(request.request_id), attributes)

    def load_ended(self, request_id: str, succeeded: bool) -> None:
        span = self._open.get(request_id, {}).pop("load", None)
        if span is not None and self._tracing is not None:
            if not succeeded:
                self._tracing.fail(span, "load failed")
            span.end()

    def prompt_ended(self, request: Request, causes: Mapping[Cause, int]) -> None:
        """Notes the computed tokens by cause, with the step that computes the last of the prompt."""
        if (spans := self._open.get(request.request_id)) is not None:
            for cause, count in causes.items():
                spans["request"].set_attribute(f"kvpool.computed_tokens.{cause.label}", count)

    def finished(self, request_id: str) -> None:
        for span in reversed(self._open.pop(request_id, {}).values()):
            span.end()


class ComputedTokens:
    """Why prompt tokens are computed: each of them has one cause, and the sums agree with vLLM's own counter.

    vLLM counts the tokens that a request computes when it gives its first output, by what it was admitted with
    (`Request.prefill_stats`). The causes are noted at the same time, and counted with the step that ends the prompt.
    """

    def __init__(self, geometry: Geometry, recorder: Recorder, spans: RequestSpans):
        self._spans = spans
        self._geometry = geometry
        self._kinds = [group.kind for group in geometry.groups]
        self._recorder = recorder
        self._why: dict[str, Cause] = {}
        self._prompts: dict[str, tuple[Request, Counter[Cause]]] = {}

    def because(self, request: Request, cause: Cause | None) -> None:
        """What keeps a request, by the newest question about it, from a lookup or from taking its answer."""
        self._why.pop(request.request_id, None)
        if cause is not None:
            self._why[request.request_id] = cause

    def admitted(self, request: Request, lookup: RequestLookup | None) -> None:
        """A request was given blocks, after this lookup if there was one."""
        why = self._why.pop(request.request_id, None)
        stats = request.prefill_stats
        # A load that has ended is admitted again, with what it has loaded; a preempted request was counted before.
        if stats is None or request.num_computed_tokens > 0 or request.num_preemptions > 0:
            return
        num_tokens = stats.num_prompt_tokens
        at = num_tokens - stats.num_computed_tokens
        causes: Counter[Cause] = Counter()
        limit = max(at, self._geometry.hit_limit(num_tokens))
        for cause, stop in self._misses(lookup, why, limit):
            if stop > at:
                causes[cause] += min(stop, limit) - at
                at = min(stop, limit)
        causes[Cause.LAST_BLOCK] += num_tokens - at
        self._prompts[request.request_id] = request, causes

    def _misses(self, lookup: RequestLookup | None, why: Cause | None, limit: int) -> Iterator[tuple[Cause, int]]:
        """Causes in the order of the prompt, each with the token before which it ends; the last one ends at `limit`."""
        prefix = None if lookup is None else self._shortest_prefix(lookup)
        if prefix is None:
            yield why or (Cause.LOOKUP_FAILED if lookup is None or not lookup.answers else Cause.WINDOW_OR_STATE), limit
            return
        assert lookup is not None
        idx, stage = prefix
        block_tokens, first = self._kinds[idx].block_tokens, lookup.firsts[idx]
        hits = lookup.answers[stage].hits[idx]
        at = first + hits.num_leading
        yield why or Cause.WINDOW_OR_STATE, at * block_tokens
        if hits.num_pending:
            yield Cause.IN_TIER, (at + hits.num_pending) * block_tokens
        for miss in hits.missing:
            at += miss.count
            yield _OF_SERVER[miss.cause], at * block_tokens
        yield why or Cause.NEVER_STORED, limit

    def _shortest_prefix(self, lookup: RequestLookup) -> tuple[int, int] | None:
        """(group, stage) where the stored prefix ends first; None if no group needs its prefix, or without answers."""
        ends = [
            ((lookup.firsts[idx] + answer.hits[idx].num_leading) * kind.block_tokens, idx, stage)
            for idx, kind in enumerate(self._kinds)
            if kind.needs_prefix
            for stage, answer in enumerate(lookup.answers)
        ]
        return min(ends)[1:] if ends else None

    def step(self, scheduled: dict[str, int]) -> None:
        """A step computes so many tokens of each request: those are counted whose prompts end."""
        for request_id in self._prompts.keys() & scheduled.keys():
            request, causes = self._prompts[request_id]
            if request.num_computed_tokens + scheduled[request_id] >= request.num_prompt_tokens:
                del self._prompts[request_id]
                self._recorder.add("num_requests")
                for cause, count in causes.items():
                    self._recorder.add(f"{CAUSE_PREFIX}{cause.label}", count)
                self._spans.prompt_ended(request, causes)

    def finished(self, request_id: str) -> None:
        """A request has ended; one that gave no output is not counted, as vLLM does not count it."""
        self._why.pop(request_id, None)
        self._prompts.pop(request_id, None)


class ReportLog:
    """Divides an engine's sums into reports. Not thread-safe.

    Invariant: the acknowledged reports, each counted once, add up to the sums when the newest of them was made. A
    report is sent again as it was until it is acknowledged, whatever has been counted since.
    """

    def __init__(self) -> None:
        self.sequence = 0  # Number of the newest report, from 1.
        self.is_under_way = False  # That report was not acknowledged.
        self._acknowledged: dict[str, float] = {}
        self._sent: dict[str, float] = {}

    def next(self, totals: Mapping[str, float]) -> dict[str, float]:
        """What was counted, by name and without zeros, of the report that is under way, or of a new one.

        `totals` has the sums since the start, none of which ever goes back.
        """
        if not self.is_under_way:
            self.sequence, self.is_under_way, self._sent = self.sequence + 1, True, dict(totals)
        before = self._acknowledged
        return {name: total - before.get(name, 0) for name, total in self._sent.items() if total != before.get(name)}

    def acknowledged(self) -> None:
        """The server has counted the report that is under way, or will never take it."""
        self.is_under_way, self._acknowledged = False, self._sent


def computed_tokens(counts: Mapping[str, float]) -> dict[str, int]:
    """Computed tokens by cause."""
    return {
        name.removeprefix(CAUSE_PREFIX): int(count) for name, count in counts.items() if name.startswith(CAUSE_PREFIX)
    }


class Reporter:
    """Tells the server what became of the engine's prompt tokens: every `REPORT_EVERY_S`, and once at the engine's end.

    A thread of its own sends the reports, one call at a time. Nothing waits for it, but for the engine's end, which
    waits for `LAST_REPORT_S` at most. A server of an older release takes no reports: the engine sends none until the
    server restarts. Thread-safe.
    """

    def __init__(self, stages: Stages, recorder: Recorder, num_devices: int):
        self._num_devices = num_devices  # That compute each step.
        self._stages = stages
        self._recorder = recorder
        self._id = secrets.token_bytes(REPORTER_BYTES)
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._log = ReportLog()
        self._namespaces: tuple[bytes, ...] = ()
        self._refused_by = 0  # Boot token of a server that takes no reports.
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-report", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends the last report, and ends the thread. Idempotent."""
        self._ends.set()
        self._thread.join(timeout=LAST_REPORT_S)

    def _run(self) -> None:
        wait_s = FIRST_REPORT_EVERY_S
        while not self._ends.wait(wait_s):
            with self._recorder.guard.part("a report to the pool"):
                if self._send(REPORT_TIMEOUT_MS):
                    wait_s = REPORT_EVERY_S
        timeout_ms = int(LAST_REPORT_S * 500)
        with self._recorder.guard.part("the last report to the pool"):
            if not self._log.is_under_way or self._send(timeout_ms):
                self._send(timeout_ms, is_last=True)

    def _send(self, timeout_ms: int, is_last: bool = False) -> bool:
        """Sends the next report; False if it was not acknowledged."""
        boot_token = self._stages.boot_token
        if (boot_token and boot_token == self._refused_by) or not self._find_namespaces():
            return False
        try:
            is_taken = self._stages.sessions[0].client.rpc.report(self._report(is_last), timeout_ms)
        except InvalidRequestError as error:
            logger.warning("kvpool: the server has refused a report, whose figures are lost: %s", error)
            self._log.acknowledged()
            return False
        except PermissionDeniedError:
            is_taken = False
        except KVPoolError as error:
            logger.debug("kvpool: a report did not reach the server, and is sent again: %s", error)
            return False
        if is_taken:
            self._log.acknowledged()
        else:
            self._refused_by = boot_token
        return is_taken

    def _find_namespaces(self) -> bool:
        """Notes the namespaces that are open now; False if none has been open yet."""
        opened = [session.namespace for session in self._stages.sessions]
        if opened and all(opened):
            self._namespaces = tuple(each.fingerprint for each in opened if each is not None)[:MAX_STAGES]
        return bool(self._namespaces)

    def _report(self, is_last: bool) -> ReportRequest:
        counts = self._log.next(self._recorder.totals())
        return ReportRequest(
            reporter=self._id,
            sequence=self._log.sequence,
            engine=self._name,
            version=__version__,
            vllm_version=vllm.__version__,
            transport=self._stages.transport,
            breaker_open=not self._stages.are_open,
            namespaces=self._namespaces,
            computed_tokens=computed_tokens(counts),
            loaded_tokens=int(counts.get("loaded_tokens", 0)),
            load_seconds=counts.get("load_seconds", 0.0),
            saved_seconds=counts.get("saved_seconds", 0.0),
            lost_seconds=counts.get("lost_seconds", 0.0),
            num_requests=int(counts.get("num_requests", 0)),
            last=is_last,
            num_devices=self._num_devices,
        )
