"""Processes of Python modules that import vLLM, each in a session of its own: forked where there is a fork server."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

FORK_SERVER = "ENGINE_FORK_SERVER"
"""Environment variable: the socket of the `testbed.fork_server` that makes the processes of engines."""
MESSAGE_BYTES = 1 << 17


def start_module(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
) -> subprocess.Popen[str] | ForkedProcess:
    """Runs `python -m module`, with pipes for standard input and output.

    Args:
        environment: all of it.
        log: gets standard error.
    """
    if address := os.environ.get(FORK_SERVER):
        return ForkedProcess(address, [module, *arguments], environment, log)
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[1],
        start_new_session=True,
    )


class ForkedProcess:
    """A process made by a fork server: the part of `subprocess.Popen` that is needed of it."""

    def __init__(self, address: str, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]):
        their_stdin, our_stdin = os.pipe()
        our_stdout, their_stdout = os.pipe()
        self.stdin, self.stdout = os.fdopen(our_stdin, "w"), os.fdopen(our_stdout)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
                server.connect(address)
                message = json.dumps({"command": command, "environment": dict(environment)}).encode()
                socket.send_fds(server, [message], [their_stdin, their_stdout, log.fileno()])
                answer, descriptors, *_ = socket.recv_fds(server, MESSAGE_BYTES, 1)
        finally:
            os.close(their_stdin)
            os.close(their_stdout)
        assert descriptors, "the fork server ended"
        self.pid = int(answer)
        self._pidfd = descriptors[0]
        weakref.finalize(self, os.close, self._pidfd)

    def poll(self) -> int | None:
        """None while the process runs."""
        return 0 if select.select([self._pidfd], [], [], 0)[0] else None

    def wait(self, timeout: float) -> int:
        """Waits for the process's end; raises `subprocess.TimeoutExpired` if it goes on."""
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("engine", timeout)
        return 0
