"""Process groups that end with the process that started them, also if that one is killed.

`python -m testbed.process_group MODULE ARGUMENT...` runs a module as the leader of a group, until its standard input
ends. That must be a pipe to which nobody writes; the kernel closes it with the process that holds its other end.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import select
import signal
import sys
import threading


def lead() -> None:
    """In a child of `multiprocessing`: starts a session whose processes end with the parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    os.setsid()
    _end_with(parent.sentinel)


def _end_with(pipe: int) -> None:
    """Starts a thread that kills this process's group when the other end of `pipe` is closed."""

    def wait() -> None:
        select.select([pipe], [], [])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-starter", daemon=True).start()


if __name__ == "__main__":
    assert os.getpgrp() == os.getpid(), "the starter's own group would be killed"
    _end_with(sys.stdin.fileno())
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
