"""What engines report is counted once, whatever is lost, repeated or reordered; and what one may say is bounded."""

from __future__ import annotations

import math

import pytest

from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.reports import MAX_ENGINE_CHARS, Cause, ReportRequest
from kvpool_server.observability.usage import Pair
from kvpool_server.reports import engines as engines_module
from kvpool_server.reports.engines import SILENT_S, EngineReports
from tests.support.clock import FakeClock

SPACE = b"n" * 32
EVICTED = Cause.EVICTED.label


def report(sequence: int = 1, reporter: bytes = b"r" * 16, **fields: object) -> ReportRequest:
    told = {"engine": "host:1", "namespaces": (SPACE,), **fields}
    return ReportRequest(reporter=reporter, sequence=sequence, **told)  # type: ignore[arg-type]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def reports(clock: FakeClock) -> EngineReports:
    return EngineReports(clock)


def test_what_is_kept_of_a_report_is_what_is_shown(reports: EngineReports) -> None:
    unknown = b"\xfa\x3e\x80\x80\x04" + bytes(1 << 16)  # Field 1,007, which no release has.
    causes = {"of a later release": 3, "and another": 4, EVICTED: 5}
    given = report(engine="\x1b[31m" + "x" * 1_000, version="1\n2", computed_tokens=causes)
    reports.report(ReportRequest.FromString(given.SerializeToString() + unknown), "acme", "model")
    (kept,) = reports._reporters.values()
    assert kept.shown is not None and len(kept.shown.SerializeToString()) < 1_000
    (shown,) = reports.engines()
    assert shown.engine.isprintable() and len(shown.engine) <= MAX_ENGINE_CHARS and shown.version == "12"
    assert reports.totals[Pair("model", "acme")].computed_tokens == {"other": 7, EVICTED: 5}


def test_an_engine_is_shown_until_it_is_silent_or_says_that_it_ends(reports: EngineReports, clock: FakeClock) -> None:
    reports.report(report(version="1.2", breaker_open=True, transport="shm"), "acme", "model")
    clock.advance(SILENT_S - 1)
    (state,) = reports.engines()
    assert (state.engine, state.version, state.breaker_open, state.transport) == ("host:1", "1.2", True, "shm")
    assert (state.age_seconds, state.tenant, state.model, state.namespaces) == (59, "acme", "model", [SPACE])
    assert not reports.report(report(1, transport="tcp"), "acme", "model")
    assert reports.engines()[0].transport == "shm", "a report of long ago is no news of the engine"
    reports.report(report(2, last=True), "acme", "model")
    assert reports.engines() == []
    reports.report(report(3), "acme", "model")
    clock.advance(SILENT_S + 1)
    assert reports.engines() == []
    assert reports.totals and reports.of_namespace(SPACE) is not None


def test_tenants_have_numbers_of_their_own(reports: EngineReports) -> None:
    reports.report(report(100, num_requests=1), "umbra", "model")
    assert reports.report(report(1, num_requests=1), "acme", "model")
    assert {pair.tenant: each.num_requests for pair, each in reports.totals.items()} == {"umbra": 1, "acme": 1}


def test_one_tenant_pushes_out_no_other(reports: EngineReports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_module, "MAX_REPORTERS", 8)
    monkeypatch.setattr(engines_module, "MAX_ENGINES", 4)
    first = report(7, engine="small")
    reports.report(first, "small", "model")
    for nth in range(100):
        reports.report(report(1, nth.to_bytes(16, "little")), "large", "model")
    shown = reports.engines()
    assert len(shown) == 4 and [state.tenant for state in shown].count("small") == 1
    assert not reports.report(first, "small", "model")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"reporter": b"short"}, "reporter has 5 bytes"),
        ({"sequence": 0}, "count reports from 1"),
        *(({"namespaces": (SPACE,) * count}, "number of namespaces") for count in (0, 17)),
        ({"saved_seconds": math.nan}, "saved_seconds of the report is nan"),
        ({"saved_seconds": math.inf}, "saved_seconds"),
        ({"lost_seconds": -1.0}, "lost_seconds"),
        ({"load_seconds": 1e9}, "load_seconds"),
        ({"loaded_tokens": 1 << 41}, "loaded_tokens"),
        ({"num_requests": 1 << 41}, "num_requests"),
        ({"computed_tokens": {f"cause {nth}": 1 for nth in range(65)}}, "number of causes"),
        ({"computed_tokens": {EVICTED: 1 << 40, "declined": 1}}, "computed_tokens"),
    ],
)
def test_a_report_beyond_a_bound_changes_nothing(reports: EngineReports, fields: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        reports.report(report(**{"num_requests": 1, **fields}), "acme", "model")  # type: ignore[arg-type]
    assert reports.engines() == [] and not reports.totals
