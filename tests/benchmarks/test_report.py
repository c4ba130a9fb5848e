"""The page and its plots come from the results alone, and the same results give the same bytes."""

import json

import pytest

pytest.importorskip("matplotlib")

from benchmarks.cases.sweep import LIMITS
from benchmarks.harness import figures, glance, plots, report
from benchmarks.harness.measuring import RESULTS, WITHIN_NOISE

MACHINE = {"cpu": "some", "cores": 2, "memory_gib": 8.0}
ORIGIN = {"date": "2026-01-02T00:00:00+00:00", "commit": "0123456789abcdef-dirty", "machine": MACHINE}


def _row(what, figure, unit="ms", reach="", met=None, before=None, **spread):
    """A row of a result; without `spread` it is one from before spreads were recorded."""
    return {"what": what, "figure": figure, "unit": unit, "reach": reach, "met": met, "before": before, **spread}


def _series(name, plot):
    return {
        "plot": plot,
        "name": name,
        "x_unit": "KiB",
        "x": [16, 1024],
        "y_unit": "GB/s",
        "y": [1.0, 2.0],
        "limit": name in LIMITS,
    }


RESULT = {
    **ORIGIN,
    "command": "python -m benchmarks.some",
    "versions": {"python": "3.11"},
    "facts": {"batch_bytes": 64 << 20, "tokens": 4096, "engines": 2},
    "before": ORIGIN,
    "series": [
        *(_series(name, plot) for name in plots.RATES for plot in ("put", "get")),
        *(_series(name, "hit ratio") for name in ("kvpool, LRU", "plain LRU", "clairvoyant")),
        *(_series(name, f"{workload}: TTFT mean") for workload in ("documents", "no reuse") for name in plots.ARMS),
    ],
    "rows": [
        _row("a call that does nothing (Ping): p50", 0.4),
        *(
            _row(f"{blocks} blocks, TP {tp}: {store} {percentile}", 1.0, reach="<= 2", met=True)
            for blocks in (64, 512)
            for tp in (1, 8)
            for store in ("kvpool", "mooncake")
            for percentile in ("p50", "p99")
        ),
        _row("cold TTFT, alone", 100.0),
        _row("cold TTFT, kvpool", 103.0, reach="<= 105", met=WITHIN_NOISE, spread=[95.0, 112.0]),
        _row("warm TTFT, kvpool, another process", 10.0, reach="<= 5", met=False, before=20.0, spread=[8.0, 12.0]),
        _row("own cache TTFT, alone", 5.0),
        *(
            _row(f"{who}, {work}: {measured}", 1.0)
            for who in ("1 client", "4 clients")
            for work in ("lookups", "puts")
            for measured in ("per second", "p50", "p99")
        ),
    ],
}


@pytest.mark.parametrize("name", plots.PLOTS)
def test_a_plot_is_the_same_each_time(name, tmp_path):
    first = plots.draw(name, RESULT, tmp_path / "first")
    second = plots.draw(name, RESULT, tmp_path / "second")
    assert first.read_bytes() == second.read_bytes()
    assert b"date" not in first.read_bytes().lower()


@pytest.mark.parametrize("name", plots.PLOTS)
def test_nothing_is_drawn_of_nothing(name, tmp_path):
    assert plots.draw(name, {**RESULT, "series": [], "rows": []}, tmp_path) is None


def test_lines_that_are_measured_have_a_colour(tmp_path):
    drawn = plots.draw("transport", RESULT, tmp_path).read_text()
    for name in plots.RATES:
        assert (f"{name} (limit)" if name in LIMITS else name) in drawn


def test_pages_name_misses_changes_and_origins(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "DOCUMENT", tmp_path / "docs" / "some" / "page.md")
    monkeypatch.setattr(report, "PLOTS", tmp_path / "docs" / "plots")
    monkeypatch.setattr(figures, "documents", list)
    (tmp_path / "docs" / "some").mkdir(parents=True)
    (tmp_path / "vllm.json").write_text(json.dumps(RESULT))
    report.main()
    listed = (tmp_path / "docs" / "some" / "page.md").read_text().splitlines()[-1]
    assert listed.startswith("| [vllm](../../vllm.md) | What a pool does for a real engine (vLLM on the CPU), beside ")
    assert listed.endswith(" MooncakeStoreConnector | 16 of 18 | 2026-01-02 |")
    page = (tmp_path / "vllm.md").read_text()
    assert "- batch bytes: 67,108,864\n- tokens: 4,096\n- engines: 2\n" in page
    assert "![vllm](docs/plots/vllm.svg)" in page and (tmp_path / "docs" / "plots" / "vllm.svg").exists()
    assert "**Not reached:** warm TTFT, kvpool, another process." in page
    assert "**Within noise:** cold TTFT, kvpool." in page
    assert "| warm TTFT, kvpool, another process | 10 ms | 8 to 12 | <= 5 | **no** | -50 % |" in page
    assert "| cold TTFT, kvpool | 103 ms | 95 to 112 | <= 105 | within noise |  |" in page
    assert "| 64 blocks, TP 1: kvpool p50 | 1 ms |  | <= 2 | (yes) |  |" in page
    assert "commit 0123456789ab-dirty, on the same kind of machine" in page
    assert "| kvpool shm | 1 | 2 |" in page


def test_the_first_screen_has_the_best_of_each_kind(tmp_path):
    question = glance.QUESTIONS[0]
    rows = [
        _row(bar.row, figure) for bar, figure in zip(question.bars, (600.0, 900.0, 110.0, 102.0, 38.0), strict=True)
    ]
    rows.append(_row("other", 1.0, met=False))
    (tmp_path / "gpu.json").write_text(json.dumps({"rows": rows}))
    lines = glance.section(tmp_path, tmp_path / "docs" / "plots", tmp_path / "docs" / "some" / "page.md")
    assert f"| {question.title} | **102 ms** | 110 ms | 600 ms | 38 ms | [gpu](../../gpu.md) |" in lines
    assert f"![{question.title}](../plots/glance-first-token.svg)" in lines
    assert any(line.startswith("1 targets were set before measuring: 0 are met, 1 are not") for line in lines)
    (tmp_path / "gpu.json").write_text(json.dumps({"rows": rows[1:]}))
    assert glance.section(tmp_path, tmp_path / "docs" / "plots", tmp_path / "docs" / "page.md") == []


def test_the_first_screen_finds_all_of_its_rows():
    assert all(glance._figures(question, RESULTS) for question in glance.QUESTIONS)


def test_every_committed_result_is_on_the_page():
    assert {path.stem for path in RESULTS.glob("*.json")} <= report.QUESTIONS.keys()


def test_a_panel_has_a_table_of_its_own_whatever_the_order_of_its_lines() -> None:
    series = [
        {"plot": plot, "name": name, "x_unit": "KiB", "x": [16], "y_unit": "GB/s", "y": [y], "limit": False}
        for name, y in (("shm", 1.0), ("stream", 2.0))
        for plot in ("put", "get")
    ]
    assert report.panels({"series": series}) == [
        *["", "| put, GB/s | 16 KiB |", "|---|---|", "| shm | 1 |", "| stream | 2 |"],
        *["", "| get, GB/s | 16 KiB |", "|---|---|", "| shm | 1 |", "| stream | 2 |"],
    ]
