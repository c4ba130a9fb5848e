"""Engines that opted in tell of each request what became of its prompt; the others tell nothing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.causes import Cause
from kvpool.reports import (
    MAX_CAUSES,
    MAX_ENGINE_CHARS,
    MAX_REPORT_BYTES,
    MAX_REQUESTS,
    MAX_STAGES,
    EngineReport,
)
from kvpool.request_trace import RequestTrace
from kvpool.wire import encode_report
from tests.support.clock import FakeClock
from tests.support.processes import wait_for
from tests.support.vllm_objects import make_request, tokens
from tests.vllm_plugin.core import Core, MakeCore
from tests.vllm_plugin.scheduler.test_reporter import LENGTH, compute
from vllm_plugin.scheduler import reporter as reporter_module
from vllm_plugin.scheduler import request_traces as module
from vllm_plugin.scheduler.request_lookup import PromotionWait
from vllm_plugin.scheduler.request_traces import RequestTraces


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "EVERY_S", 0.05)
    monkeypatch.setattr(reporter_module, "FIRST_EVERY_S", 0.05)


def told(core: Core, request_id: str) -> tuple[RequestTrace, ...]:
    return core.side.stages.sessions[0].client.admin.explain_request(request_id)


def test_the_server_is_told_of_each_request_once(core: MakeCore) -> None:
    one = core(explain_requests=True).connected()
    for nth in range(3):
        compute(one, f"told-{nth}")
    wait_for(lambda: len(told(one, "told-")) >= 3, "the reports")
    wait_for(lambda: one.side.stages.sessions[0].client.admin.stats().engines, "another report")
    found = told(one, "told-")
    assert [each.request_id for each in found] == ["told-2", "told-1", "told-0"]
    assert {each.prompt_tokens for each in found} == {LENGTH}
    for each in found:
        assert sum(each.computed_tokens.values()) == LENGTH and each.computed_tokens["never_stored"]
        assert (each.local_tokens, each.loaded_tokens, each.load_failed) == (0, 0, False)
        assert each.lookup_ms > 0 and each.age_seconds >= 0 and ":" in each.engine


def test_an_engine_that_did_not_opt_in_tells_of_no_request(core: MakeCore) -> None:
    one = core().connected()
    compute(one, "silent")
    client = one.side.stages.sessions[0].client
    wait_for(lambda: any(sum(each.computed_tokens.values()) for each in client.admin.namespaces()), "the report")
    assert told(one, "silent") == ()


def test_a_load_its_failure_and_the_waits_are_told() -> None:
    clock = FakeClock()
    traces, request = RequestTraces(clock), make_request("r", tokens(LENGTH, "r"))
    traces.asked(request)
    traces.admitted(request, None, 64)
    clock.advance(2)
    traces.load_ended("r", succeeded=False)
    traces.admitted(request, None, 0)
    traces.prompt_ended(request, {})
    ((at, trace),) = traces.take()
    assert at == clock.now and trace.load_failed
    assert (trace.loaded_tokens, trace.load_ms, trace.local_tokens) == (0, 2_000, LENGTH)
    assert traces.take() == ()


def test_a_lookup_takes_until_its_answer_however_late_vllm_asks() -> None:
    clock = FakeClock()
    traces, request = RequestTraces(clock), make_request("r", tokens(LENGTH, "r"))
    answered: Any = SimpleNamespace(answers=[None], answered_at=clock.now + 2, wait=PromotionWait(0))
    traces.asked(request)
    clock.advance(10)
    traces.admitted(request, answered, 0)
    traces.prompt_ended(request, {})
    ((_, trace),) = traces.take()
    assert trace.lookup_ms == 2_000


def test_what_waits_and_what_has_not_ended_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OPEN", 3)
    traces = RequestTraces(FakeClock())
    requests = [make_request(str(nth), tokens(LENGTH)) for nth in range(5)]
    for request in requests:
        traces.asked(request)
    for request in requests:
        traces.prompt_ended(request, {})
    assert [trace.request_id for _, trace in traces.take()] == ["2", "3", "4"]
    for _ in range(module.MAX_TRACES + 5):
        traces.asked(requests[0])
        traces.prompt_ended(requests[0], {})
    assert [len(traces.take()) for _ in range(3)] == [MAX_REQUESTS, module.MAX_TRACES - MAX_REQUESTS, 0]


def test_a_report_of_the_longest_ids_is_one_that_the_server_takes() -> None:
    traces = RequestTraces(FakeClock())
    requests = [make_request(f"{nth:03}" + "\U0001f600" * 300, tokens(LENGTH, "r")) for nth in range(200)]
    for request in requests:
        traces.asked(request)
        traces.admitted(request, None, 64)
        traces.prompt_ended(request, dict.fromkeys(Cause, 1))
    taken = []
    while part := traces.take():
        report = EngineReport(
            b"r" * 16,
            1 << 60,
            *("x" * MAX_ENGINE_CHARS for _ in range(4)),
            namespaces=(b"n" * 32,) * MAX_STAGES,
            computed_tokens={f"{nth:064}": 1 << 40 for nth in range(MAX_CAUSES)},
            requests=tuple(replace(trace, age_seconds=1e9) for _, trace in part),
        )
        assert encode_report(report).ByteSize() <= MAX_REPORT_BYTES
        taken += [trace.request_id[:3] for _, trace in part]
    assert taken == [f"{nth:03}" for nth in range(200)], "the others wait for the next report"
