"""Child processes: they get their settings, and end with their server, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvpool.transport.child_process import ChildProcess
from tests.support.processes import is_running, wait_for

ROOT = Path(__file__).parents[3]
CHILD = "tests.support.child"
SERVER = f"""
import os, subprocess, sys, time
from kvpool.transport.child_process import ChildProcess
child = ChildProcess("{CHILD}", {{"ends": sys.argv[1], "key": b"secret"}}, (), stdout=subprocess.PIPE)
print(child.pid, flush=True)
if not os.fork():
    time.sleep(60)
print(child.stdout.readline().decode(), end="", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("ends", ["by its main thread", "whatever runs"])
def test_a_child_ends_with_a_server_that_is_killed_although_its_fork_lives(ends: str) -> None:
    command = [sys.executable, "-c", SERVER, ends]
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, process_group=0)
    assert server.stdout is not None
    try:
        pid = int(server.stdout.readline())
        assert server.stdout.readline() == f"{b'secret'.hex()}\n"
        assert "secret" not in Path(f"/proc/{pid}/cmdline").read_text() and is_running(pid)
        server.kill()
        wait_for(lambda: not is_running(pid), "the child's end")
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # The fork, too, which still holds the pipe to the child.
        server.communicate()


def test_a_child_ends_though_its_parent_had_ended_before_it_looked() -> None:
    with subprocess.Popen(["true"]) as parent:
        pass
    code = "from kvpool.transport.child_process import wait_for_parent_end as wait; wait()"
    command = [sys.executable, "-c", code, str(parent.pid)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as child:
        assert child.wait(60) == 0


def test_end_asks_and_waits() -> None:
    child = ChildProcess(CHILD, {"ends": "by its main thread", "key": b""}, (), stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() and child.poll() is None
    child.end(10)
    assert child.poll() == 0
    child.end(0)


def test_end_kills_a_child_that_does_not_end() -> None:
    child = ChildProcess(CHILD, {"ends": "never", "key": b""}, (), stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    began_at = time.monotonic()
    child.end(0.1)
    assert child.poll() == -9 and time.monotonic() - began_at < 20  # The child sleeps for a minute.
