"""`pip install kvpool` beside a vLLM: each release of the extra's range keeps the packages that it has."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.package.conftest import ROOT, UV
from tests.package.vllm_requirements import RECORD
from tests.support.processes import run_command

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VLLM: dict[str, dict[str, Any]] = json.loads(RECORD.read_text())


def _lowest(specifier: SpecifierSet) -> Version | None:
    lowest = [Version(each.version) for each in specifier if each.operator in (">=", "==")]
    return max(lowest, default=None)


def _here(lines: list[str]) -> dict[str, Requirement]:
    """By name: the requirements that hold on this machine."""
    found = map(Requirement, lines)
    return {canonicalize_name(each.name): each for each in found if each.marker is None or each.marker.evaluate()}


def test_every_release_of_the_extras_range_is_recorded() -> None:
    (requirement,) = map(Requirement, PROJECT["optional-dependencies"]["vllm"])
    bounds = {each.operator: Version(each.version) for each in requirement.specifier}
    assert {f"0.{minor}.0" for minor in range(bounds[">="].minor, bounds["<"].minor)} <= VLLM.keys()


@pytest.mark.parametrize("version", VLLM)
def test_no_lower_bound_is_above_vllms(version: str) -> None:
    """Whoever has the lowest versions that vLLM takes need not upgrade them for kvpool."""
    ours, theirs = _here(PROJECT["dependencies"]), _here(VLLM[version]["packages"])
    shared = ours.keys() & theirs.keys()
    assert shared >= {"protobuf", "numpy", "pydantic", "msgspec"}
    for name in sorted(shared):
        floor, taken = _lowest(ours[name].specifier), _lowest(theirs[name].specifier)
        assert floor is not None
        assert taken is None or floor <= taken, f"{name}: kvpool wants {floor}, and vLLM {version} takes {taken}"


@pytest.mark.parametrize("resolution", ["highest", "lowest-direct"])
@pytest.mark.parametrize("version", VLLM)
def test_one_environment_meets_both(version: str, resolution: str, tmp_path: Path) -> None:
    both = tmp_path / "both.in"
    both.write_text("\n".join([*PROJECT["dependencies"], *VLLM[version]["packages"]]))
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = (UV, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", python)
    ran = run_command(*command, "--resolution", resolution, str(both), timeout_s=120)
    assert ran.returncode == 0, ran.stderr
    chosen = dict(re.findall(r"^([\w-]+)==(\S+)", ran.stdout, re.MULTILINE))
    for name, theirs in _here(VLLM[version]["packages"]).items():
        assert theirs.specifier.contains(chosen[name]), f"{name} {chosen[name]}"
    if resolution == "lowest-direct":
        assert Version(chosen["protobuf"]) == _lowest(_here(VLLM[version]["packages"])["protobuf"].specifier)
