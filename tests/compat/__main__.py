"""Runs kvpool with other Pythons, packages and releases of vLLM, and writes the table of the results.

`python -m tests.compat` runs every lane of `lanes.py`, `--lane NAME` one. Each lane has an environment of its own,
which is deleted afterwards; one of vLLM takes 3 GB.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import typer

from tests.compat import environment, results
from tests.compat.lanes import LANES, Lane
from tests.compat.results import Result

_ASK_CONTRACT = """
from kvpool.protocol.errors import ConfigError
from vllm_plugin.connector import check_contract
try:
    check_contract()
except ConfigError as error:
    print("REFUSED", error)
"""


def run(lane: Lane, python: Path, through: list[str]) -> Result:
    """Runs the tests of a lane. A vLLM that the connector refuses runs none."""
    today, versions = datetime.now(UTC).date().isoformat(), environment.versions(python)
    own = {"PYTHONPATH": str(environment.ROOT), "PATH": f"{python.parent}:{os.environ['PATH']}"}
    if lane.vllm:
        asked = _run([str(python), "-c", _ASK_CONTRACT], own, capture=True)
        _, refused, refusal = asked.stdout.partition("REFUSED ")
        if refused:
            return Result(lane.name, versions, f"{results.REFUSED}{refusal.strip()}")
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        options = ["-q", "-p", "no:cacheprovider", "-m", "not gpu and not more", f"--junit-xml={report}"]
        workers = [] if lane.vllm else ["-n", "2", "--dist", "loadfile"]
        _run([*through, str(python), "-m", "pytest", *options, *workers, *lane.tests], own)
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = sorted({f"{case.get('classname')}::{case.get('name')}" for case in failed})
    passed = len(cases) - len(failed) - len(skipped)
    return Result(lane.name, versions, results.outcome(passed, len(skipped), names, today))


def _run(command: list[str], own: dict[str, str], capture: bool = False) -> subprocess.CompletedProcess[str]:
    out = subprocess.PIPE if capture else None
    return subprocess.run(
        command, cwd=environment.ROOT, env={**os.environ, **own}, stdout=out, text=True, check=capture
    )


def main(
    lane: Annotated[list[str] | None, typer.Option(help="Lanes to run; default: all.")] = None,
    through: Annotated[str, typer.Option(help="A command to start pytest with, such as 'nice'.")] = "",
) -> None:
    """Runs lanes, and writes their rows in docs/reference/compatibility.md."""
    by_name = {each.name: each for each in LANES}
    failed = []
    for name in lane or by_name:
        if name not in by_name:
            raise typer.BadParameter(f"unknown lane {name!r}; choose from {', '.join(by_name)}")
        with tempfile.TemporaryDirectory(prefix="kvpool-compat-") as directory:
            python = environment.make(by_name[name], Path(directory, "venv"))
            result = run(by_name[name], python, shlex.split(through))
        results.write(result)
        print(f"{name}: {result.outcome}", flush=True)
        if not result.has_passed and not result.outcome.startswith(results.REFUSED):
            failed.append(name)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
