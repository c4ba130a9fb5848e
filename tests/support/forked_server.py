"""Servers forked from a process that has imported the server's modules: a start takes a tenth of the CPU time.

A forked server has flags, environment and output files of its own, as an executed one does.
The fork server of `multiprocessing` imports modules and starts no gRPC. It ends with the tests' process, and so do its
servers, also if the tests' process is killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

_PRELOADED = [__name__, "kvpool_server.app.command", "kvpool_server.app.server"]


class ForkedServer:
    """The part of `subprocess.Popen` that `ServerProcess` needs.

    Args:
        flags: of `kvpool-server`.
        environment: all of it.
        out, err: files that exist; the server's standard output and error are appended to them.
    """

    def __init__(self, flags: Sequence[str], environment: Mapping[str, str], out: Path, err: Path):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        arguments = (list(flags), dict(environment), str(out), str(err))
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit status; None while the server runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """The exit status. Raises subprocess.TimeoutExpired if the server goes on."""
        self._process.join(timeout)
        if (status := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("kvpool-server", timeout)
        return status

    def send_signal(self, number: int) -> None:
        """Does nothing once the server has ended, also before the fork server has sent its exit status."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()


def _serve(flags: list[str], environment: dict[str, str], out: str, err: str) -> None:
    """In the new process."""
    for path, number in ((out, 1), (err, 2)):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["kvpool-server", *flags]
    threading.Thread(target=_exit_with_tests, name="exit-with-tests", daemon=True).start()
    from kvpool_server.__main__ import main

    main()


def _exit_with_tests() -> None:
    """Ends the server when the tests' process has ended, or was killed."""
    tests = multiprocessing.parent_process()
    assert tests is not None
    tests.join()
    os._exit(1)
