"""What does an install of kvpool cost: bytes on the disk, and time until it is imported and its commands answer?

The wheel is built and installed in an environment of its own, with the versions of requirements/runtime.txt and without
PyTorch and vLLM. Bytes are those of the files, before Python has compiled any. Times are the CPU's in whole processes,
beside a Python that imports nothing: on a busy machine a process waits for much else.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.measuring import Row, alternate, at_most, ms, report

ROOT = Path(__file__).parents[2]
UV = str(Path(sys.executable).with_name("uv"))
MIB = 1 << 20
REACH_OWN_MIB = 5
REACH_ALL_MIB = 150
OWN = ("kvpool", "kvpool_server", "vllm_plugin")
DEADLINE_S = 300.0


def install(place: Path) -> Path:
    """Builds the wheel and installs it in a new environment; returns the environment's `bin`."""
    run(UV, "build", "--quiet", "--wheel", "--out-dir", str(place / "dist"), str(ROOT))
    (wheel,) = (place / "dist").glob("*.whl")
    run(UV, "venv", "--quiet", "--python", sys.executable, str(place / "venv"))
    python = place / "venv" / "bin" / "python"
    versions = ("--constraint", str(ROOT / "requirements" / "runtime.txt"))
    run(UV, "pip", "install", "--quiet", "--python", str(python), *versions, str(wheel))
    return python.parent


def run(*command: str) -> None:
    """Runs a command outside of the repository, whose packages Python would find first."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        command, cwd=tempfile.gettempdir(), env=environment, check=True, capture_output=True, timeout=DEADLINE_S
    )


def cpu_s(*command: str) -> float:
    """CPU seconds of a command and its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(*command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def num_bytes(*folders: Path) -> int:
    """Bytes of the files in the folders."""
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())


def main(rounds: Annotated[int, typer.Option(help="Times that each process is started.")] = 15) -> None:
    """Installs, measures, and reports."""
    with tempfile.TemporaryDirectory(prefix="kvpool-package-") as directory:
        binaries = install(Path(directory))
        (packages,) = (binaries.parent / "lib").glob("python*/site-packages")
        own, everything = num_bytes(*(packages / name for name in OWN)), num_bytes(packages)
        python = str(binaries / "python")

        def starts(*command: str) -> Callable[[], float]:
            return lambda: cpu_s(*command)

        processes = {
            "python that imports nothing": starts(python, "-c", "pass"),
            "import kvpool": starts(python, "-c", "import kvpool"),
            "import kvpool.client": starts(python, "-c", "import kvpool.client.client"),
            "import kvpool_server.server": starts(python, "-c", "import kvpool_server.app.server"),
            "kvpool --version": starts(str(binaries / "kvpool"), "--version"),
        }
        seconds = alternate(processes, rounds, what="starts")
        distributions = len(list(packages.glob("*.dist-info")))
    rows = [
        at_most("kvpool's own files", own / MIB, "MiB", REACH_OWN_MIB),
        at_most("kvpool and all that it needs", everything / MIB, "MiB", REACH_ALL_MIB),
        *(Row(f"{what}: CPU", ms(seconds[what]), "ms") for what in processes),
    ]
    report("package", rows, rounds=rounds, distributions=distributions)


if __name__ == "__main__":
    typer.run(main)
