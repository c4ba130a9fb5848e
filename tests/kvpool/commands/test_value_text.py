"""`kvpool value` and `kvpool advise --live`: what they print of a server's curves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.commands import common
from kvpool.types import PoolStats, TierStats
from kvpool.value import SIZES, ValueCurve, ValueEstimate, ValueReport

GIB = 1 << 30
RISING = (0.1, 0.2, 0.4, 0.5, 0.6, 0.6)
Run = Callable[..., str]


def report(ratios: Sequence[float] = RISING, tokens_per_s: float = 1_000.0, **fields: object) -> ValueReport:
    seconds = float(str(fields.get("seconds", 7_200.0)))
    estimates = [ValueEstimate(size, ratio, ratio) for size, ratio in zip(SIZES, ratios, strict=True)]
    asked = tokens_per_s * seconds
    curve = ValueCurve("", asked, ratios[2] * asked, ratios[2], estimates, is_total=True)
    return dataclasses.replace(ValueReport(True, GIB, "density", seconds, curves=[curve]), **fields)  # type: ignore[arg-type]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command against a server with this report, and returns its output."""

    def run(found: ValueReport, *arguments: str) -> str:
        stats = PoolStats(tiers=(TierStats("file:/x", size_bytes=100 * GIB),))
        admin = SimpleNamespace(value=lambda: found, stats=lambda: stats)
        monkeypatch.setattr(common, "client_of", lambda endpoint: nullcontext(SimpleNamespace(admin=admin)))
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, (done.output, done.exception)
        return done.stdout

    return run


def rows(printed: str) -> list[list[str]]:
    """The cells of a table's rows, without its head."""
    lines = [line for line in printed.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def heads(printed: str) -> str:
    """The words of a table's head, whose cells may be of two lines."""
    lines = [line.strip("┃").split("┃") for line in printed.splitlines() if line.startswith("┃")]
    return "|".join(" ".join(" ".join(cells).split()) for cells in zip(*lines, strict=True))


def test_columns_that_count_tiers_say_so(run: Run) -> None:
    assert heads(run(report(), "value", "--prefill", "8000")) == "memory|size|hits|off by|tokens a day|GPU-s a day"
    with_tiers = heads(run(report(has_tiers=True), "value", "--prefill", "8000"))
    assert with_tiers == "memory|size|hits|hits with tiers|off by|tokens a day with tiers|GPU-s a day with tiers"


def test_a_curve_that_falls_has_a_footnote(run: Run) -> None:
    footnote = "the larger simulated pools are not full yet."
    assert footnote not in run(report(), "value")
    assert footnote not in run(report((0.1, 0.2, 0.4, 0.5, 0.6, 0.59999)), "value"), "the printed figures are equal"
    assert footnote in run(report((0.1, 0.2, 0.4, 0.943, 0.942, 0.95)), "value")


def test_what_the_server_has_now_is_a_row_whatever_is_chosen(run: Run) -> None:
    first, *others = rows(run(report(), "advise", "--live"))
    assert first[:5] == ["now", "1 GiB", "-", "40.0%", "1"]
    assert "->" in {each[0] for each in others} and ["", *first[1:]] not in others
    (same, *_) = rows(run(report((0.6,) * 6), "advise", "--live", "--target-hit-ratio", "0.5"))
    assert same[0] == "now"
    tiers = rows(run(report(has_tiers=True), "advise", "--live"))[0]
    assert tiers[:3] == ["now", "1 GiB", "100 GiB"]
    assert json.loads(run(report(), "advise", "--live", "--json"))["now"]["memory_bytes"] == GIB


def test_of_choices_that_cost_as_much_the_one_with_more_hits_is_taken(run: Run) -> None:
    printed = run(report(), "advise", "--live")
    chosen = next(row for row in rows(printed) if row[0].startswith("->"))
    assert chosen[3] == "60.0%", "1 GPU costs 1,825 a month in any case, and 4 GiB cost 12"


def test_money_has_no_minus_zero_and_saving_is_no_cost(run: Run) -> None:
    printed = run(dataclasses.replace(report(), arena_bytes=GIB // 64), "advise", "--live")
    assert "-0" not in printed and "1 GPUs" not in printed and "and 1 GPU for prefill" in printed
    costs = " ".join(run(report(), "advise", "--live").split())
    assert "Compared with no pool that costs 12 a month more, and saves 6,480 GPU-seconds of prefill a day." in costs
    saves = " ".join(run(report(tokens_per_s=100_000.0), "advise", "--live").split())
    assert "a month less, and saves " in saves


def test_short_traffic_is_warned_of(run: Run) -> None:
    warning = "Less than an hour is no month"
    long = run(report(), "advise", "--live")
    assert "The advice is from 2 h" in long and warning not in long
    assert warning in run(report(seconds=600.0), "advise", "--live")
