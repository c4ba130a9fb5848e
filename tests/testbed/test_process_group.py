"""A killed run of tests leaves no engine behind: a group of processes ends with the process that started it."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

DEADLINE_S = 60.0
ENGINE = """
import subprocess, sys, time
core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(core.pid, flush=True)
time.sleep(600)
"""
STARTERS = {
    "standard input": """
import os, subprocess, sys, time
command = [sys.executable, "-m", "testbed.process_group", "engine"]
engine = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
time.sleep(600)
""",
    "multiprocessing": """
import importlib, multiprocessing, time
from concurrent.futures import ProcessPoolExecutor
from testbed.process_group import lead
if __name__ == "__main__":
    engine = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=lead)
    engine.submit(importlib.import_module, "engine").result()
""",
}
"""Each starts the engine in another way, and prints what the engine prints: the id of the engine's child."""


@contextmanager
def _ended(pid: int) -> Iterator[int]:
    """A descriptor that is readable once the process has ended. The process is killed afterwards."""
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


@pytest.mark.parametrize("starter", STARTERS)
def test_a_group_ends_with_its_killed_starter(starter: str, tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "starter.py").write_text(STARTERS[starter])
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, str(tmp_path / "starter.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            core = int(process.stdout.readline())
            engine = int(Path(f"/proc/{core}/stat").read_text().split()[3])
            with _ended(engine) as engine_ended, _ended(core) as core_ended:
                assert not select.select([engine_ended, core_ended], [], [], 0)[0]
                process.kill()
                for each in (engine_ended, core_ended):
                    assert select.select([each], [], [], DEADLINE_S)[0], "the engine has outlived its starter"
        finally:
            process.kill()
