"""`kvpool value`: what it prints of a server's curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.commands import common
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.value.histogram import SIZES
from tests.support.values import replaced

GIB = 1 << 30
RISING = (0.1, 0.2, 0.4, 0.5, 0.6, 0.6)
Run = Callable[..., str]


def report(ratios: Sequence[float] = RISING, tokens_per_s: float = 1_000.0, **fields: object) -> pb.ValueResponse:
    seconds = float(str(fields.get("seconds", 7_200.0)))
    estimates = [
        pb.ValueEstimate(size=size, hit_ratio=ratio, hit_ratio_with_tiers=ratio)
        for size, ratio in zip(SIZES, ratios, strict=True)
    ]
    asked = tokens_per_s * seconds
    curve = pb.ValueCurve(
        tenant="", lookup_tokens=asked, hit_tokens=ratios[2] * asked, estimates=estimates, is_total=True
    )
    return replaced(
        pb.ValueResponse(enabled=True, arena_bytes=GIB, policy="density", seconds=seconds, curves=[curve]), **fields
    )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command against a server with this report, and returns its output."""

    def run(found: pb.ValueResponse, *arguments: str) -> str:
        admin = SimpleNamespace(value=lambda: found)
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
    assert heads(run(report(), "value", "--prefill", "8000")) == "memory|size|hits|tokens a day|GPU-s a day"
    with_tiers = heads(run(report(has_tiers=True), "value", "--prefill", "8000"))
    assert with_tiers == "memory|size|hits|hits with tiers|tokens a day with tiers|GPU-s a day with tiers"


def test_lookups_that_were_left_out_are_counted(run: Run) -> None:
    assert "left out" not in run(report(), "value")
    assert "1,234 lookups and puts came too fast and were left out" in run(report(left_out=1_234), "value")
