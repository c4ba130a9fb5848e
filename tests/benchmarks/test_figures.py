"""A number with a unit names the result it is from, or is a setting."""

import json

import pytest

from benchmarks.harness import figures

ROWS = [
    {"what": "warm TTFT, kvpool", "figure": 102.3457, "unit": "ms"},
    {"what": "hits", "figure": 0.1305, "unit": ""},
    {"what": "entries", "figure": 144122, "unit": ""},
    {"what": "load", "figure": 42.94, "unit": "GB/s"},
]


@pytest.fixture(autouse=True)
def _results(tmp_path, monkeypatch):
    (tmp_path / "gpu.json").write_text(json.dumps({"rows": ROWS}))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures.rows.cache_clear()
    yield
    figures.rows.cache_clear()


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        ("in 87 ms<!-- gpu: warm TTFT, kvpool --> each", "in 102 ms<!-- gpu: warm TTFT, kvpool --> each"),
        ("0.09 s<!-- gpu: warm TTFT, kvpool -->", "0.10 s<!-- gpu: warm TTFT, kvpool -->"),
        ("7.9 %<!-- gpu: hits -->", "13.1 %<!-- gpu: hits -->"),
        ("all 1,000 operations<!-- gpu: entries -->", "all 144,122 operations<!-- gpu: entries -->"),
        ("1 GB/s\n  <!-- gpu: load -->", "43 GB/s\n  <!-- gpu: load -->"),
        ("87 ms, and no mark", "87 ms, and no mark"),
    ],
)
def test_a_marked_number_is_the_figure_of_its_result(typed, written):
    assert figures.refresh(typed) == written
    assert figures.refresh(written) == written


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("1 ms<!-- cpu: warm TTFT, kvpool -->", "no result cpu.json"),
        ("1 ms<!-- gpu: warm -->", "no row 'warm'"),
        ("1 GiB<!-- gpu: warm TTFT, kvpool -->", "is in 'ms', and the page says 'GiB'"),
    ],
)
def test_a_mark_that_leads_nowhere_is_an_error(typed, said):
    with pytest.raises(LookupError, match=said):
        figures.refresh(typed)


LOOSE = ["87 ms", "1.6 times", "2 %", "4 GB/s", "a 64-MiB batch", "| 16 KiB |", "in 5\nseconds"]
NOT_LOOSE = [
    "1 ms<!-- gpu: warm TTFT, kvpool -->",
    "`--memory 16GiB`",
    "```\n87 ms\n```",
    "20,000 tokens of 8 documents",
    "[it](#at-5-s)",
    "<!-- begin table -->\n| 128 KiB |\n<!-- end table -->",
]


def test_a_measured_number_without_a_mark_is_loose():
    for text in LOOSE:
        assert len(figures.loose(f"It takes {text}.", [])) == 1, text
    for text in NOT_LOOSE:
        assert figures.loose(text, []) == []
    (left,) = figures.loose("no answer for\n10 s, and 20 s later", ["no answer for 10 s"])
    assert "20 s" in left and "10 s" not in left, "a phrase covers its own numbers only"
