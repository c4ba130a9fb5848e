"""Plots come from the results alone, and the same results give the same bytes.

What the pages say is compared with the committed pages in test_numbers_in_docs.py.
"""

import json

import pytest

pytest.importorskip("matplotlib")

from benchmarks.cases.sweep import LIMITS
from benchmarks.harness import glance, plots, report
from benchmarks.harness.measuring import RESULTS

DRAWN = [name for name in plots.PLOTS if (RESULTS / f"{name}.json").exists()]


def _result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", DRAWN)
def test_a_plot_is_the_same_each_time(name, tmp_path):
    first = plots.draw(name, _result(name), tmp_path / "first")
    second = plots.draw(name, _result(name), tmp_path / "second")
    assert first.read_bytes() == second.read_bytes()
    assert b"date" not in first.read_bytes().lower()


@pytest.mark.parametrize("name", DRAWN)
def test_nothing_is_drawn_of_nothing(name, tmp_path):
    assert plots.draw(name, {**_result(name), "series": [], "rows": []}, tmp_path) is None


def test_lines_that_are_measured_have_a_colour(tmp_path):
    drawn = plots.draw("transport", _result("transport"), tmp_path).read_text()
    for name in plots.RATES:
        assert (f"{name} (limit)" if name in LIMITS else name) in drawn


def test_the_first_screen_finds_all_of_its_rows(tmp_path):
    assert all(glance._figures(question, RESULTS) for question in glance.QUESTIONS)
    assert glance.section(tmp_path, tmp_path / "plots", tmp_path / "page.md") == [], "there are no results"


def test_every_committed_result_is_on_the_page():
    assert {path.stem for path in RESULTS.glob("*.json")} <= report.QUESTIONS.keys()
