"""Forks engines from a process that has imported vLLM, so that an engine starts in 2 s of CPU time instead of 10.

For the tests, which start some sixty engines. The fork server imports modules and does nothing else: it starts no
thread, no gRPC channel and no OpenMP team. A forked engine has its own session, environment, log and pipes, as if it
had been executed.

Protocol, over a Unix socket: the caller sends a JSON object (the environment) with three descriptors (standard input,
output and error). The engine answers with its process id and a pidfd of itself.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NoReturn

from benchmarks.harness import engine

PRELOADED = (
    "vllm",
    "vllm.compilation.breakable_cudagraph",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.registry",
    "vllm.v1.worker.cpu_worker",
)
MESSAGE_BYTES = 1 << 17


@contextmanager
def fork_server(directory: Path) -> Iterator[None]:
    """Runs a fork server and names it in this process's environment, where `Engine` finds it.

    Args:
        directory: where its socket and its log go.
    """
    address = directory / "fork-server"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        (directory / "fork-server.log").open("wb") as log,
    ):
        listener.bind(str(address))
        listener.listen()  # A connection waits here until the modules are imported.
        server = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.harness.fork_server", str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=Path(__file__).parents[2],
            pass_fds=[listener.fileno()],
        )
    assert server.stdin is not None
    os.environ[engine.FORK_SERVER] = str(address)
    try:
        yield
    finally:
        del os.environ[engine.FORK_SERVER]
        server.stdin.close()
        server.wait(timeout=30)


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


def main() -> None:
    """Forks an engine for each connection until standard input ends."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        _preload()
        connection, _ = listener.accept()
        with connection:
            message, descriptors, *_ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
            if os.fork() == 0:
                listener.close()
                _become_engine(connection, json.loads(message), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
    os._exit(0)  # Taking a large interpreter apart takes seconds.


@functools.cache
def _preload() -> None:
    """Imports what engines share; once, before the first of them."""
    modules = [importlib.import_module(name) for name in PRELOADED]
    # vLLM inspects a model's class in a process of its own, to keep CUDA out of this one. There is no CUDA here, and
    # the engine imports the class anyway.
    modules[PRELOADED.index("vllm.model_executor.models.registry")]._run_in_subprocess = lambda inspect: inspect()
    gc.collect()
    gc.freeze()  # An engine does not search for garbage in what it shares.


def _become_engine(connection: socket.socket, environment: dict[str, str], descriptors: list[int]) -> NoReturn:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    socket.send_fds(connection, [str(os.getpid()).encode()], [os.pidfd_open(os.getpid())])
    connection.close()
    engine.serve()
    raise AssertionError("an engine's process ends in `serve`")


if __name__ == "__main__":
    main()
