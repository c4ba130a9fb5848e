"""sdist and wheel as a release builds them, and the wheel in an environment of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import run_command

ROOT = Path(__file__).parents[2]
UV = str(Path(sys.executable).with_name("uv"))
BUILD_TIMEOUT_S = 200.0
PACKAGES = ("kvpool", "kvpool_server", "vllm_plugin")


@dataclass(frozen=True, slots=True)
class Distributions:
    """What is uploaded to an index."""

    sdist: Path
    wheel: Path


def tracked_files(*folders: str) -> set[str]:
    """The repository's files below the folders, relative to its root."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Built from a copy of the repository's files, because a build writes beside them."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    command = (UV, "build", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(built), str(source))
    ran = run_command(*command, timeout_s=BUILD_TIMEOUT_S)
    assert ran.returncode == 0, ran.stderr
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    return Distributions(sdist, wheel)


@pytest.fixture(scope="session")
def installed(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel, what the wheel needs, and nothing else."""
    environment = tmp_path_factory.mktemp("installed") / "venv"
    made = run_command(UV, "venv", "--python", sys.executable, str(environment))
    assert made.returncode == 0, made.stderr
    python = environment / "bin" / "python"
    versions = ("--constraints", str(ROOT / "requirements" / "runtime.txt"))
    install = (UV, "pip", "install", "--python", str(python), *versions, str(distributions.wheel))
    ran = run_command(*install, timeout_s=BUILD_TIMEOUT_S)
    assert ran.returncode == 0, ran.stderr
    return python.parent
