"""A real kvpool-server as a subprocess, and waiting with a deadline."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import PoolTimeoutError, UnavailableError
from kvpool.security.tls import TlsFiles
from testbed.ports import free_endpoint
from tests.support.forked_server import ForkedServer

START_DEADLINE_S = 150.0
"""The first server of a fresh checkout is imported from a cold disk, beside engines that are too."""
STOP_DEADLINE_S = 60.0
_WELCOME = re.compile(r" on (\S+)(?: and unix:[^;]+)?; metrics and health: (\S+)")
_JSON_WELCOME = re.compile(r'"endpoint": "(\S+)", "unix_endpoint": [^,]+, "metrics_and_health": "(\S+)"')

Found = TypeVar("Found")


@contextlib.contextmanager
def unread_pipe(has_reader: bool) -> Iterator[int]:
    """Where to write what nobody reads: to a pipe without a reader, or to a full one whose reader stands still."""
    unread, into = os.pipe()
    if has_reader:
        os.set_blocking(into, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(into, bytes(4_096))
        os.set_blocking(into, True)
    else:
        os.close(unread)
    try:
        yield into
    finally:
        os.close(into)
        if has_reader:
            os.close(unread)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie: a process whose other threads are still ending is none."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" or len(list(Path(f"/proc/{pid}/task").iterdir())) > 1
    except FileNotFoundError:
        return False


def wait_for(ask: Callable[[], Found], what: str, deadline_s: float = 30.0) -> Found:
    """Asks until the answer is truthy, and returns it; AssertionError naming `what` after the deadline."""
    ends_at = time.monotonic() + deadline_s
    while not (found := ask()):
        assert time.monotonic() < ends_at, f"{what}: not within {deadline_s} s"
        time.sleep(0.005)
    return found


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment without the KVPOOL_ variables of this machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVPOOL_")}
    return {**kept, **extra}


def _with_defaults(flags: Sequence[str], *, keeps: bool = False) -> list[str]:
    """With a free data port and without a keeper, which would have a process of its own, unless flags say otherwise."""
    defaults = {"--data-listen": "127.0.0.1:0"} | ({} if keeps else {"--keep": "no"})
    return [*flags, *(part for flag in defaults.keys() - flags for part in (flag, defaults[flag]))]


def server_command(*flags: str, module: str = "kvpool_server", keeps: bool = False) -> list[str]:
    """A server's command; its data port is a free one, and it has no keeper, unless `flags` say otherwise.

    Args:
        keeps: leaves --keep to its default, which earlier releases do not know.
    """
    return [sys.executable, "-m", module, *_with_defaults(flags, keeps=keeps)]


def run_command(*command: str, timeout_s: float = 60.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, with a deadline."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=clean_environment(**environment), check=False
    )


def run_server(*flags: str, timeout_s: float = STOP_DEADLINE_S, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a server that does not start, to its end; its data port is a free one unless `flags` say otherwise."""
    with tempfile.TemporaryDirectory() as directory:
        out, err = Path(directory, "out"), Path(directory, "err")
        for path in (out, err):
            path.touch()
        server = ForkedServer(_with_defaults(flags), clean_environment(**environment), out, err)
        try:
            status = server.wait(timeout_s)
        finally:
            server.kill()
        return subprocess.CompletedProcess(["kvpool-server", *flags], status, out.read_text(), err.read_text())


class ServerProcess:
    """One server. It listens on free ports unless `flags` say otherwise; another can be started at its endpoint.

    Args:
        tls, token_file: of the client that asks whether the server is there.
        is_executed: runs the command in an interpreter of its own, for tests of a server's start and end. Other
            servers are forked.
        tree: a directory with the packages of another release, whose server is executed.
        module: whose command is executed.

    Attributes:
        endpoint: HOST:PORT of gRPC.
        unix_endpoint: unix:PATH; empty without --unix-listen.
        http_url: of /metrics and /healthz.
    """

    def __init__(
        self,
        log_dir: Path,
        *flags: str,
        environment: Mapping[str, str] = {},
        tls: TlsFiles | None = None,
        token_file: str = "",
        is_executed: bool = False,
        tree: Path | None = None,
        module: str = "kvpool_server",
    ):
        defaults = {
            "--listen": free_endpoint(),
            "--http-listen": "127.0.0.1:0",
            "--memory": "8MiB",
        }
        self.unix_endpoint = f"unix:{flags[flags.index('--unix-listen') + 1]}" if "--unix-listen" in flags else ""
        missing = [part for flag, value in defaults.items() if flag not in flags for part in (flag, value)]
        log_dir.mkdir(parents=True, exist_ok=True)
        nth = len(list(log_dir.glob("server-*.out")))
        self._out, self._err = log_dir / f"server-{nth}.out", log_dir / f"server-{nth}.err"
        whole, keeps = clean_environment(**environment), False
        if tree is not None:
            is_executed, whole = True, {**whole, "PYTHONPATH": str(tree)}
            keeps = not (tree / "kvpool_server/keeping").is_dir()
        with self._out.open("w") as out, self._err.open("w") as err:
            self._process = (
                subprocess.Popen(
                    server_command(*missing, *flags, module=module, keeps=keeps),
                    stdout=out,
                    stderr=err,
                    env=whole,
                    cwd=tree,
                )
                if is_executed
                else ForkedServer(_with_defaults([*missing, *flags]), whole, self._out, self._err)
            )
        try:
            welcome = wait_for(self._welcome, "the server's welcome", START_DEADLINE_S)
            self.endpoint, self.http_url = welcome.groups()
            config = ClientConfig(self.endpoint, timeout_ms=5_000, tls=tls, token_file=token_file)
            with Client(config) as client:
                wait_for(lambda: _answers(client), "an answer to Ping", START_DEADLINE_S)
        except BaseException:
            self.kill()
            raise

    def _welcome(self) -> re.Match[str] | None:
        assert self._process.poll() is None, f"kvpool-server ended at its start: {self.stderr}"
        return _WELCOME.search(self.stdout) or _JSON_WELCOME.search(self.stderr)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def own_bytes(self) -> int:
        """Memory of the server without the arena."""
        return own_bytes(self.pid)

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def send_signal(self, number: int) -> None:
        """Sends a signal and does not wait."""
        self._process.send_signal(number)

    def terminate(self) -> None:
        """Sends SIGTERM and does not wait."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self, deadline_s: float = STOP_DEADLINE_S) -> int:
        """The exit status; subprocess.TimeoutExpired if it goes on."""
        return self._process.wait(deadline_s)

    def kill(self) -> None:
        """SIGKILL: no drain, no cleaning up. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(STOP_DEADLINE_S)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL. Idempotent."""
        if self._process.poll() is not None:
            return
        self.terminate()
        try:
            self.wait()
        except subprocess.TimeoutExpired:
            self.kill()


def own_bytes(pid: int) -> int:
    """Memory of a process without the arena."""
    (kib,) = re.findall(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(kib) << 10


def _answers(client: Client) -> bool:
    try:
        client.admin.ping()
    except (UnavailableError, PoolTimeoutError):
        return False
    return True
