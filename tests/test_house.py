"""The house: no module outgrows a sitting, and packages keep their modules in rooms."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_LINES = 400
AT_THE_ROOT = {
    "kvpool": {"__init__.py", "cli.py", "py.typed", "version.py"},
    "kvpool_server": {"__init__.py", "__main__.py", "py.typed"},
    "vllm_plugin": {
        "__init__.py",
        "config.py",
        "connector.py",
        "metadata.py",
        "metrics.py",
        "py.typed",
        "releases.py",
        "session.py",
    },
}
"""What both sides of a package, or none of its rooms, own. A new module belongs to a room."""


def modules(package: str) -> list[Path]:
    """Modules of a package that git knows, without generated ones."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", f"{package}/*.py"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in names if "/v1/" not in name and (ROOT / name).exists()]


@pytest.mark.parametrize("package", AT_THE_ROOT)
def test_no_module_outgrows_a_sitting(package: str) -> None:
    lines = {module.relative_to(ROOT): len(module.read_text().splitlines()) for module in modules(package)}
    assert lines and {str(module): count for module, count in lines.items() if count > MAX_LINES} == {}


@pytest.mark.parametrize("package", AT_THE_ROOT)
def test_new_modules_have_a_room(package: str) -> None:
    assert {each.name for each in (ROOT / package).iterdir() if each.is_file()} == AT_THE_ROOT[package]
