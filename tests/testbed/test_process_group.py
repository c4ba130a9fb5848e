"""A killed run of tests leaves no engine and no server behind."""

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
    "multiprocessing": """
import importlib, multiprocessing, time
from concurrent.futures import ProcessPoolExecutor
from testbed.process_group import lead
if __name__ == "__main__":
    engine = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=lead)
    engine.submit(importlib.import_module, "engine").result()
""",
    "forked server": """
import pathlib, time
from tests.support.processes import ServerProcess
from tests.support.workers import workers_of
if __name__ == "__main__":
    server = ServerProcess(pathlib.Path("logs"))
    print(workers_of(server)[0], flush=True)
    time.sleep(600)
""",
}
"""Starters of an engine, or of a server, which has a child; the starter's output is the child's id."""


@contextmanager
def _watched(pid: int) -> Iterator[int]:
    """A descriptor that is readable once the process has ended. The process is killed afterwards."""
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


@pytest.mark.parametrize("starter", STARTERS)
def test_processes_end_with_their_killed_starter(starter: str, tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "starter.py").write_text(STARTERS[starter])
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    with subprocess.Popen(
        [sys.executable, "starter.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        try:
            assert process.stdout is not None
            child = int(process.stdout.readline())
            parent = int(Path(f"/proc/{child}/stat").read_text().split()[3])
            with _watched(parent) as parent_ended, _watched(child) as child_ended:
                assert not select.select([parent_ended, child_ended], [], [], 0)[0]
                process.kill()
                for each in (parent_ended, child_ended):
                    assert select.select([each], [], [], DEADLINE_S)[0], "a process has outlived its starter"
        finally:
            process.kill()
