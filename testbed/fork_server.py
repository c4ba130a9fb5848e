"""Forks engines from a process that has imported vLLM, so that an engine starts in 2 s of CPU time instead of 10.

For the tests, which start some sixty engines. The fork server imports modules and does nothing else: it starts no
thread, no gRPC channel and no OpenMP team. A forked engine has its own session, environment, log and pipes, as if it
had been executed. An engine of several processes forks its engine core and its ranks, as vLLM does on GPUs.

Protocol, over a Unix socket: the caller sends a JSON object (command: a module and its arguments; environment) with
three descriptors (standard input, output and error). The new process answers with its id and a pidfd of itself.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

from testbed.engine import IMPORT_SETTINGS
from testbed.forked_process import FORK_SERVER, MESSAGE_BYTES

PRELOADED = (
    "vllm",
    "vllm.compilation.breakable_cudagraph",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.registry",
    "vllm.v1.worker.cpu_worker",
)


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
            [sys.executable, "-m", "testbed.fork_server", str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, **IMPORT_SETTINGS},
            cwd=Path(__file__).parents[1],
            pass_fds=[listener.fileno()],
        )
    assert server.stdin is not None
    try:
        with patch.dict(os.environ, {FORK_SERVER: str(address)}):  # There may be another around this one.
            yield
    finally:
        server.stdin.close()
        server.wait(timeout=30)


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
                _become(connection, **json.loads(message), descriptors=descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
    os._exit(0)  # Taking a large interpreter apart takes seconds.


@functools.cache
def _preload() -> None:
    """Imports what engines share; once, before the first of them."""
    # vLLM's CPU platform spawns its engine core and its ranks, each of which would import vLLM again.
    system_utils = importlib.import_module("vllm.utils.system_utils")
    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    modules = [importlib.import_module(name) for name in PRELOADED]
    # vLLM inspects a model's class in a process of its own, to keep CUDA out of this one. There is no CUDA here, and
    # the engine imports the class anyway.
    modules[PRELOADED.index("vllm.model_executor.models.registry")]._run_in_subprocess = lambda inspect: inspect()
    gc.collect()
    gc.freeze()  # An engine does not search for garbage in what it shares.


def _become(
    connection: socket.socket, command: list[str], environment: dict[str, str], descriptors: list[int]
) -> NoReturn:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    socket.send_fds(connection, [str(os.getpid()).encode()], [os.pidfd_open(os.getpid())])
    connection.close()
    sys.argv = command
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
