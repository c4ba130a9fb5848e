"""The wheel in an environment without PyTorch and vLLM: its commands, a server, and the tour in Python."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from testbed.ports import free_endpoint
from tests.package.conftest import ROOT, UV
from tests.support.processes import clean_environment, run_command, wait_for

HEAVY = r"torch.*|vllm.*|transformers|triton|nvidia.*|cuda.*|scipy|pandas|ray|mooncake.*|opentelemetry.*"
MAX_INSTALLED_BYTES = 150 << 20
STOP_TIMEOUT_S = 60.0
TYPED_CALLER = """
from kvpool import Client, Namespace

def ask(client: Client, namespace: Namespace) -> None:
    reveal_type(client.lookup(namespace, []).lease_id)
    client.lookup(namespace, 7)
"""


def _run(directory: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command outside the repository, whose packages Python would find first."""
    return subprocess.run(
        command,
        cwd=directory,
        env=clean_environment(PYTHONPATH="", **environment),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_an_install_brings_nothing_heavy(installed: Path) -> None:
    listed = run_command(UV, "pip", "list", "--python", str(installed / "python"), "--format", "json")
    names = {each["name"] for each in json.loads(listed.stdout)}
    assert "kvpool" in names and "grpcio" in names
    assert not [name for name in names if re.fullmatch(HEAVY, name)]
    num_bytes = sum(path.lstat().st_size for path in installed.parent.rglob("*") if not path.is_symlink())
    assert num_bytes < MAX_INSTALLED_BYTES
    checked = run_command(UV, "pip", "check", "--python", str(installed / "python"))
    assert checked.returncode == 0, checked.stderr


def test_the_tour_runs_and_the_page_is_served(installed: Path, tmp_path: Path) -> None:
    endpoint, http = free_endpoint(), free_endpoint()
    listen = ("--listen", endpoint, "--http-listen", http, "--data-listen", "127.0.0.1:0", "--memory", "64MiB")
    log = tmp_path / "server.log"
    environment = clean_environment(PYTHONPATH="")
    with log.open("wb") as out:
        server = subprocess.Popen(
            [str(installed / "kvpool-server"), *listen], cwd=tmp_path, env=environment, stdout=out, stderr=out
        )
    try:
        ping = (str(installed / "kvpool"), "ping", "--endpoint", endpoint)
        wait_for(lambda: server.poll() is not None or not _run(tmp_path, *ping).returncode, "the server")
        assert server.poll() is None, log.read_text()
        ran = _run(tmp_path, str(installed / "python"), "-c", _tour(), KVPOOL_ENDPOINT=endpoint)
        assert "6 of 6 blocks hit" in ran.stdout, ran.stderr
        read = f"import urllib.request; print(urllib.request.urlopen('http://{http}/').read().decode())"
        assert "<title>kvpool" in _run(tmp_path, str(installed / "python"), "-c", read).stdout
    finally:
        server.send_signal(signal.SIGTERM)
        status = server.wait(STOP_TIMEOUT_S)
    assert status == 0, log.read_text()


def test_types_of_the_client_are_known_to_a_type_checker(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "caller.py").write_text(TYPED_CALLER)
    mypy = (sys.executable, "-m", "mypy", "--strict", "--cache-dir", os.devnull, "--python-executable")
    ran = _run(tmp_path, *mypy, str(installed / "python"), "caller.py")
    assert 'note: Revealed type is "int"' in ran.stdout.replace("builtins.", ""), ran.stdout + ran.stderr
    errors = [line for line in ran.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 1 and 'Argument 2 to "lookup" of "Client"' in errors[0], ran.stdout


def _tour() -> str:
    page = next((ROOT / "docs").rglob("python.md")).read_text()
    return re.findall(r"```python\n(.*?)```", page.split("## A tour", 1)[1], re.DOTALL)[0]
