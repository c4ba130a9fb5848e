"""The notebook runs from its first cell to its last in a real kernel, on its own trace and on a given one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.prometheus import ROOT

NOTEBOOK = ROOT / "examples" / "notebook" / "replay.ipynb"
PACKAGES = ("nbclient==0.10.2", "nbformat==5.10.4", "ipykernel==6.30.1", "matplotlib-inline==0.1.7")
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
nbformat.validate(notebook)
NotebookClient(notebook, timeout=240).execute()
nbformat.write(notebook, sys.argv[2])
"""


@pytest.mark.parametrize("is_given", [False, True])
def test_the_notebook_runs_and_draws(is_given: bool, tmp_path: Path) -> None:
    stored = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in stored)
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"timestamp": {nth}, "hash_ids": [1, 2, {nth}]}}\n' for nth in range(3, 60)))
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix, "PYTHONPATH": str(ROOT)}
    if is_given:
        environment["TRACE"] = str(trace)
    run = [str(Path(sys.executable).with_name("uv")), "run", "--no-project", "--active", "--quiet"]
    layered = [part for package in PACKAGES for part in ("--with", package)]
    command = [*run, *layered, "python", "-c", EXECUTE, str(NOTEBOOK), str(tmp_path / "done.ipynb")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr
    cells = [cell for cell in json.loads((tmp_path / "done.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    said = "".join(str(output.get("text", "")) for cell in cells for output in cell["outputs"])
    assert ("57 requests" in said) is is_given
    (drawn,) = [output for output in cells[-1]["outputs"] if "image/png" in output.get("data", {})]
    assert len(drawn["data"]["image/png"]) > 5_000
