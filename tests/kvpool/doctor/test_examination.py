from __future__ import annotations

import threading
import time

from kvpool.doctor.examination import examine
from kvpool.protocol.errors import PermissionDeniedError, UnavailableError
from kvpool.report.finding import Level, error, ok, problems, warning


def _raises(error: Exception) -> list[object]:
    raise error


def test_findings_come_in_the_order_of_their_checks() -> None:
    def slow() -> list:  # type: ignore[type-arg]
        second_began.wait(10)
        return [ok("first", "a")]

    def quick() -> list:  # type: ignore[type-arg]
        second_began.set()
        return [error("second", "b", "c")]

    second_began = threading.Event()  # The first check ends only if the second runs beside it.
    found = examine({"first": slow, "second": quick})
    assert [each.check for each in found] == ["first", "second"]


def test_a_check_that_hangs_is_one_finding_and_delays_nothing() -> None:
    release, began = threading.Event(), time.monotonic()
    try:
        hanging = {f"hangs {nth}": lambda: release.wait(60) and [] for nth in range(3)}
        found = examine(hanging | {"works": lambda: [ok("works", "yes")]}, deadline_s=0.3)  # type: ignore[dict-item]
    finally:
        release.set()
    assert time.monotonic() - began < 30
    assert [(each.check, each.level) for each in found] == [
        *((f"hangs {nth}", Level.WARNING) for nth in range(3)),
        ("works", Level.OK),
    ]
    assert found[0].text == "the check did not end within 0.3 s"


def test_what_a_check_raises_is_a_finding() -> None:
    cases = [UnavailableError("away"), PermissionDeniedError("not yours"), ZeroDivisionError("oops")]
    found = examine({str(each): lambda each=each: _raises(each) for each in cases})  # type: ignore[misc]
    assert [each.level for each in found] == [Level.ERROR, Level.WARNING, Level.WARNING]
    assert found[0].text == "away" and "operator's certificate" in found[1].fix and "oops" in found[2].text


def test_problems_are_errors_first() -> None:
    findings = [ok("a", ""), warning("b", "", ""), error("c", "", ""), warning("d", "", "")]
    assert [each.check for each in problems(findings)] == ["c", "b", "d"]
