"""Child processes that end with their parent, and get their settings from it.

The parent keeps a pipe to each child's standard input open. The pipe's first line is the child's settings, as JSON; the
pipe closes when the parent ends, however it ends, and the child ends then. The settings may hold keys, which therefore
appear in no command line and no environment.

The parent's side is `ChildProcess`; the child's side is `receive_settings`, then `wait_for_parent_end` or
`exit_with_parent`. Standard library only: a data worker imports this module.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class ChildProcess(subprocess.Popen[bytes]):
    """`python -m MODULE PARENT_PID`, which imports from the same release as this process.

    Args:
        settings: the first line on the child's standard input; bytes travel as hex.
        pass_fds: descriptors that the child inherits under the same numbers.
    """

    def __init__(self, module: str, settings: Mapping[str, Any], pass_fds: Sequence[int], stdout: int | None = None):
        path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        super().__init__(
            [sys.executable, "-P", "-m", module, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=stdout,
            pass_fds=pass_fds,
            process_group=0,  # A terminal's Ctrl-C is for the parent, which may need the child for a while.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        )
        assert self.stdin is not None
        with contextlib.suppress(OSError):  # The child died at once: `poll` says so.
            self.stdin.write(json.dumps(settings, default=bytes.hex).encode() + b"\n")
            self.stdin.flush()

    def request_end(self) -> None:
        """Closes the child's standard input, without waiting. Idempotent."""
        with contextlib.suppress(OSError):
            assert self.stdin is not None
            self.stdin.close()

    def end(self, timeout_s: float) -> None:
        """Requests the end, kills the child after `timeout_s`, and closes the pipes. Idempotent."""
        self.request_end()
        try:
            self.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self.wait()
        if self.stdout is not None:
            self.stdout.close()


def receive_settings() -> dict[str, Any]:
    """In the child: the parent's settings. Ends the process if the parent has ended.

    From now on the process ignores SIGINT and SIGTERM, which a supervisor sends to the parent, too.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        raise SystemExit(0)
    settings: dict[str, Any] = json.loads(line)
    return settings


def wait_for_parent_end() -> None:
    """In the child: returns when the parent has ended, or has requested this process's end.

    Forks of the parent keep the pipe open, so the parent itself is watched as well, where the system can do that.
    """
    parent, pipe, ends = int(sys.argv[1]), sys.stdin.fileno(), select.poll()
    ends.register(pipe, select.POLLIN)
    with contextlib.suppress(OSError):
        ends.register(os.pidfd_open(parent), select.POLLIN)
    # If the parent has ended already, another process may have its number.
    while os.getppid() == parent and [fd for fd, _ in ends.poll()] == [pipe] and os.read(pipe, 4096):
        pass


def exit_with_parent() -> None:
    """In the child: starts a thread that ends the process with the parent, at once, whatever runs."""

    def run() -> None:
        wait_for_parent_end()
        os._exit(0)

    threading.Thread(target=run, name="kvpool-end", daemon=True).start()
