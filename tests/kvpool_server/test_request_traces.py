"""What engines tell of their requests: bounds by engine, tenant and in all, and who is told."""

from __future__ import annotations

import pytest

from kvpool.errors import InvalidRequestError
from kvpool.explanation import MAX_TRACES, Explanation
from kvpool.explanation_messages import encode_explanation, explanation
from kvpool.principal import Principal, Role
from kvpool.request_trace import RequestTrace
from kvpool.v1 import pool_pb2 as pb
from kvpool_server import request_traces as module
from kvpool_server.access.caller import CALLER
from kvpool_server.cache.steps import finish
from kvpool_server.request_traces import RequestTraces
from tests.support.clock import FakeClock


def trace(request_id: str, **fields: object) -> pb.RequestTrace:
    return pb.RequestTrace(request_id=request_id, **fields)  # type: ignore[arg-type]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def traces(clock: FakeClock) -> RequestTraces:
    return RequestTraces(clock)


def find(traces: RequestTraces, request_id: str) -> tuple[RequestTrace, ...]:
    return finish(traces.find_in_steps(request_id))


def test_a_request_is_found_by_how_its_id_begins_with_its_age_and_its_engine(
    traces: RequestTraces, clock: FakeClock
) -> None:
    traces.add(
        "", b"1", "host:1", "m", [trace("cmpl-1", age_seconds=5, prompt_tokens=7, computed_tokens={"evicted": 7})]
    )
    clock.advance(60)
    traces.add("", b"2", "host:2", "m", [trace("cmpl-12"), trace("other")])
    newest, oldest = find(traces, "cmpl-1")
    assert (newest.request_id, newest.engine) == ("cmpl-12", "host:2")
    assert (oldest.engine, oldest.age_seconds, oldest.computed_tokens) == ("host:1", 65, {"evicted": 7})
    assert find(traces, "unknown") == ()


def test_each_engine_and_all_have_a_bound_and_the_largest_tenant_pays(
    traces: RequestTraces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_TRACES_KEPT", 2_500)
    traces.add("small", b"1", "s", "m", [trace("small")])
    for engine in range(4):
        traces.add("big", bytes([engine]), "b", "m", [trace(f"{engine}-{nth}") for nth in range(1_500)])
    assert len(traces) == 2_500
    assert find(traces, "small") and not find(traces, "0-") and not find(traces, "3-499")
    assert find(traces, "3-500") and find(traces, "3-1499")
    assert len(find(traces, "3-")) == MAX_TRACES


@pytest.mark.parametrize(
    "wrong",
    [
        trace("cmpl-large", computed_tokens={f"cause_{nth}": 1 for nth in range(200)}),
        trace("cmpl-label", computed_tokens={"no label!": 1}),
        trace("cmpl-nan", lookup_ms=float("nan")),
        trace("cmpl-" + "x" * 900),
        trace("cmpl-future", age_seconds=-1e9),
        trace("cmpl-old", age_seconds=1e11),
        trace("\x00\x1b"),
        trace(""),
    ],
)
def test_malformed_requests_are_dropped_when_they_arrive(traces: RequestTraces, wrong: pb.RequestTrace) -> None:
    traces.add("umbra", b"1", "e\n", "m", [wrong])
    assert len(traces) == 0
    traces.add("acme", b"1", "e\n", "m", [wrong, trace("cmpl-right")])
    assert find(traces, "cmpl-") == (RequestTrace("cmpl-right", "e", "m"),)


def test_an_id_is_one_to_256_characters(traces: RequestTraces) -> None:
    for wrong in ("", "x" * 257):
        with pytest.raises(InvalidRequestError, match="give 1 to 256"):
            find(traces, wrong)


def test_every_answer_is_one_that_a_client_takes(traces: RequestTraces, clock: FakeClock) -> None:
    traces.add("", b"1", "e", "m", [trace("cmpl-\x00old", age_seconds=1e10), trace("cmpl-" + "x" * 251)])
    clock.advance(60)
    reply = encode_explanation(Explanation(requests=find(traces, "cmpl-")), 1)
    assert {each.request_id[:8] for each in explanation(reply, ()).requests} == {"cmpl-old", "cmpl-xxx"}


def test_no_tenant_crowds_out_anothers_requests(traces: RequestTraces, clock: FakeClock) -> None:
    traces.add("small", b"1", "small", "m", [trace(f"cmpl-{nth}", age_seconds=9) for nth in range(3)])
    clock.advance(60)
    for engine in range(4):
        traces.add("large", bytes([engine]), "large", "m", [trace(f"cmpl-{nth}") for nth in range(MAX_TRACES)])
    found = find(traces, "cmpl-")
    assert [each.engine for each in found] == ["large"] * (MAX_TRACES - 3) + ["small"] * 3
    assert [each.request_id for each in found[-3:]] == ["cmpl-2", "cmpl-1", "cmpl-0"]


def test_a_request_is_kept_without_the_message_that_it_came_in(traces: RequestTraces) -> None:
    report = pb.ReportRequest(requests=[trace("cmpl-1", prompt_tokens=7)])
    traces.add("", b"1", "e", "m", report.requests)
    report.requests[0].prompt_tokens = 8  # A kept submessage would keep the memory of its whole report.
    assert find(traces, "cmpl-1")[0].prompt_tokens == 7


def test_a_tenant_is_told_of_its_own_requests_only(traces: RequestTraces) -> None:
    for tenant in ("acme", "umbra"):
        traces.add(tenant, b"1", tenant, "m", [trace(f"cmpl-{tenant}")])
    token = CALLER.set(Principal("acme", Role.TENANT_OPERATOR))
    try:
        assert [each.request_id for each in find(traces, "cmpl")] == ["cmpl-acme"]
    finally:
        CALLER.reset(token)
    assert len(find(traces, "cmpl")) == 2
