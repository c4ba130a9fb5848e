"""Servers whose memory outlives them: below kvpool's keeper, or with the test as the service manager."""

from __future__ import annotations

import array
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import KVPoolError
from testbed.kept import server_below
from testbed.ports import free_endpoint
from tests.support.processes import clean_environment, wait_for

START_S, STOP_S = 30.0, 20.0


class KeptServer:
    """`kvpool-server` with --keep at its default. Close it.

    Args:
        flags: without addresses; the memory is 8 MiB unless they say otherwise.
        inherited: descriptors that it gets from its manager, by name; they stay open here.
        isolate: a command in front of the server's, which has it run as its only child.

    Attributes:
        endpoint: of gRPC.
        pid: of the keeper where there is one, else of the server.
    """

    def __init__(
        self,
        directory: Path,
        *flags: str,
        endpoint: str = "",
        environment: Mapping[str, str] = {},
        inherited: Mapping[str, int] = {},
        isolate: Sequence[str] = (),
    ):
        self.endpoint = endpoint or free_endpoint()
        self.log = directory / f"server-{len(list(directory.glob('server-*')))}.log"
        memory = () if "--memory" in flags else ("--memory", "8MiB")
        command = [*isolate, sys.executable, "-m", "kvpool_server", "--listen", self.endpoint, "--http-listen", ""]
        command += ["--data-listen", "127.0.0.1:0", *memory, *flags]
        whole = clean_environment(**environment)
        for name in ("NOTIFY_SOCKET", "FDSTORE"):
            if name not in environment:
                whole.pop(name, None)
        if inherited:
            fds = map(str, inherited.values())
            command = [sys.executable, "-c", _INHERIT, ":".join(inherited), *fds, "--", *command]
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=out, env=whole, pass_fds=tuple(inherited.values())
            )
        self.pid = self._process.pid
        if isolate:
            (self.pid,) = wait_for(lambda: children_of(self._process.pid), "the only child")

    @property
    def server_pid(self) -> int:
        """Of the server below the keeper; 0 while there is none."""
        return server_below(self.pid)

    def connect(self, **options: object) -> Client:
        """A client, once the server answers."""

        def answers() -> Client | None:
            assert self._process.poll() is None, self.log.read_text()
            client = Client(ClientConfig(self.endpoint, timeout_ms=5_000, **options))  # type: ignore[arg-type]
            try:
                client.admin.ping()
            except KVPoolError:
                client.close()
                return None
            return client

        return wait_for(answers, "an answer", START_S)

    def kill_server(self, number: int = signal.SIGKILL) -> None:
        """Ends the server below the keeper by a signal; returns when another one serves."""
        before = wait_for(lambda: self.server_pid, "a server", START_S)
        os.kill(before, number)
        wait_for(lambda: self.server_pid not in (0, before), "another server", START_S)
        self.connect().close()

    def signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout_s: float = STOP_S) -> int:
        return self._process.wait(timeout_s)

    def says(self, text: str) -> bool:
        return text in self.log.read_text()

    def close(self) -> None:
        """SIGCONT and SIGTERM, then SIGKILL. Idempotent."""
        for number in (signal.SIGCONT, signal.SIGTERM):
            self.signal(number)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


_INHERIT = """
import fcntl, os, sys
names, end = sys.argv[1], sys.argv.index("--")
fds = [fcntl.fcntl(int(fd), fcntl.F_DUPFD_CLOEXEC, 64) for fd in sys.argv[2:end]]
for nth, fd in enumerate(fds):
    os.dup2(fd, 3 + nth)
os.environ |= {"LISTEN_FDS": str(len(fds)), "LISTEN_FDNAMES": names, "LISTEN_PID": str(os.getpid())}
os.execv(sys.argv[end + 1], sys.argv[end + 1:])
"""


class Manager:
    """A service manager with a descriptor store, as systemd's. Close it.

    Attributes:
        kept: the descriptors by name.
        states: that came without descriptors.
    """

    def __init__(self, directory: Path):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._path = str(directory / "notify")
        self._socket.bind(self._path)
        self.environment = {"NOTIFY_SOCKET": self._path, "FDSTORE": "4"}
        self.kept: dict[str, int] = {}
        self.states: list[str] = []

    def receive(self) -> None:
        """Takes what has come."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, 4_096, 8)
            except BlockingIOError:
                return
            states = dict(each.partition("=")[::2] for each in data.decode().split("\n"))
            if "FDSTORE" in states:
                (self.kept[states["FDNAME"]],) = fds
            elif "FDSTOREREMOVE" in states:
                os.close(self.kept.pop(states["FDNAME"]))
            else:
                self.states.append(data.decode())

    def close(self) -> None:
        self.receive()
        for fd in self.kept.values():
            os.close(fd)
        self._socket.close()


def send_as_stranger(address: str, name: str) -> None:
    """Offers a descriptor to the keeper of another process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger, open("/dev/null", "rb") as file:
        stranger.connect("\0" + address[1:])
        rights = array.array("i", [file.fileno()])
        stranger.sendmsg([f"FDSTORE=1\nFDNAME={name}".encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        stranger.send(b"FDSTOREREMOVE=1\nFDNAME=kvpool-arena")
        time.sleep(0.1)
