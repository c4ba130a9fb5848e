"""What is in the sdist and the wheel, and what their metadata say."""

from __future__ import annotations

import re
import sys
import tarfile
import tomllib
from email import message_from_string
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from kvpool.version import __version__
from tests.package.conftest import PACKAGES, ROOT, Distributions, tracked_files
from tests.support.processes import run_command

EXTRAS = {"vllm", "mooncake", "oidc", "otel", "directory", "dev"}
BELONGS_TO_THE_SDIST = {"LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "pyproject.toml", "setup.py"}


@pytest.fixture(scope="module")
def wheel_files(distributions: Distributions) -> set[str]:
    with ZipFile(distributions.wheel) as wheel:
        return set(wheel.namelist())


@pytest.fixture(scope="module")
def metadata(distributions: Distributions) -> Message:
    with ZipFile(distributions.wheel) as wheel:
        return message_from_string(wheel.read(f"kvpool-{__version__}.dist-info/METADATA").decode())


def test_an_index_takes_both(distributions: Distributions) -> None:
    twine = str(Path(sys.executable).with_name("twine"))
    assert distributions.wheel.name == f"kvpool-{__version__}-py3-none-any.whl"
    ran = run_command(twine, "check", "--strict", str(distributions.sdist), str(distributions.wheel))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("PASSED") == 2


def test_the_wheel_has_each_file_of_the_packages_and_no_other(wheel_files: set[str]) -> None:
    files = {name for name in wheel_files if ".dist-info/" not in name and not name.endswith("/")}
    assert files == tracked_files(*PACKAGES)
    assert any(name.startswith("kvpool_server/observability/static/") for name in files)
    assert {f"{package}/py.typed" for package in PACKAGES} <= files
    licences = {name for name in tracked_files(*PACKAGES, "LICENSE") if Path(name).name == "LICENSE"}
    assert len(licences) == 2
    assert {f"kvpool-{__version__}.dist-info/licenses/{name}" for name in licences} <= wheel_files


def test_the_sdist_can_build_the_wheel_and_has_no_tests(distributions: Distributions) -> None:
    with tarfile.open(distributions.sdist) as sdist:
        names = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    assert names >= BELONGS_TO_THE_SDIST | tracked_files(*PACKAGES, "proto")
    folders = {name.partition("/")[0] for name in names if "/" in name}
    assert folders == {*PACKAGES, "proto", "kvpool.egg-info"}


def test_the_metadata_have_what_an_index_shows(metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0 AND MIT"
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS
    urls = dict(url.split(", ", 1) for url in metadata.get_all("Project-URL", []))
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} <= urls.keys()
    assert all(url.startswith("https://") for url in urls.values())


def test_the_pythons_of_the_classifiers_are_those_that_ci_tests(metadata: Message) -> None:
    said = re.findall(r"Python :: (3\.\d+)$", "\n".join(metadata.get_all("Classifier", [])), re.MULTILINE)
    (matrix,) = re.findall(r"python: \[(.*)\]", (ROOT / ".github/workflows/ci.yml").read_text())
    assert said == re.findall(r"[\d.]+", matrix)
    assert metadata["Requires-Python"] == f">={said[0]}"


def test_links_of_the_description_lead_somewhere_from_an_index(metadata: Message) -> None:
    links = re.findall(r"\]\(([^)]+)\)", str(metadata.get_payload()))
    assert len(links) > 10
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    for link in links:
        assert link.startswith(("https://", "#")), link
        if link.startswith(f"{source}/blob/main/"):
            assert (ROOT / link.removeprefix(f"{source}/blob/main/").partition("#")[0]).exists(), link


def test_the_package_holds_nobody_elses_package_back() -> None:
    """Lower bounds alone: of two packages in one environment, one must not stop the other's upgrades."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, lines in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        for line in lines if extra != "vllm" else ():
            assert {each.operator for each in Requirement(line).specifier} == {">="}, line
