"""The process of an engine that a fork server made, as the process that asked for it sees it."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import weakref
from collections.abc import Mapping
from typing import IO

FORK_SERVER = "ENGINE_FORK_SERVER"
"""Environment variable: the socket of the `testbed.fork_server` that makes the processes of engines."""
MESSAGE_BYTES = 1 << 17


class ForkedProcess:
    """A process made by a fork server: the part of `subprocess.Popen` that an engine needs."""

    def __init__(self, address: str, environment: Mapping[str, str], log: IO[bytes]):
        their_stdin, our_stdin = os.pipe()
        our_stdout, their_stdout = os.pipe()
        self.stdin, self.stdout = os.fdopen(our_stdin, "w"), os.fdopen(our_stdout)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
                server.connect(address)
                message = json.dumps(dict(environment)).encode()
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
