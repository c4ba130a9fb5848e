"""Keeps a server's memory while the server dies, is upgraded, and starts again. `kvpool-server` becomes it.

The keeper is the server's parent, and its service manager (`store.py`): it holds the descriptors that the server gives
it, hands them to the next one, passes signals on, and ends with the server that stops by itself. SIGUSR1 has the server
stop and start again, from the files that are installed then. No thread and no gRPC; standard library only.

A server that serves, and dies soon, several times in a row starts the next time without the memory: what lies there
may be why it dies.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import itertools
import json
import math
import os
import secrets
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvpool_server.keeping import store

DELAY_S = (0.05, 10.0)
"""From a crash to the next start: at first, and at most; longer after each crash in a row."""
HEALTHY_S = 10.0
"""A server that lived longer did not die of its start: what counts crashes in a row begins anew."""
MAX_CRASHES = 3
"""In a row; with one more the memory is given up. SIGKILL of a server that serves comes from outside, and is none."""
FAILED = 1
"""Exit status of a server that an error has ended."""
PATIENCE_S = 300.0
"""How long no server may get so far that it serves clients, whatever is why, until the memory is given up. Where its
adoption is why, servers give it up before."""
MAX_DESCRIPTORS, MAX_MESSAGE_BYTES = 8, 4_096
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
HANDLED = {*PASSED_ON, signal.SIGUSR1}
"""A server gets them blocked, and lets them through once it can handle them."""
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
MESSAGES_A_TURN = 64
_CREDENTIALS = struct.Struct("iII")


def is_wanted(arguments: Sequence[str]) -> bool:
    """Whether a server with these arguments needs a keeper: it has no manager, and neither a flag nor the environment
    says no. One whose configuration file says no tells its keeper."""
    says = os.environ.get("KVPOOL_KEEP", "")
    for each, following in itertools.pairwise([*arguments, ""]):
        name, _, value = each.partition("=")
        if name == "--keep":
            says = value or following
    return says != "no" and not store.exists() and not {"--help", "--version"} & set(arguments)


def become(arguments: Sequence[str]) -> None:
    """Replaces this process by the keeper of a server with these arguments. Raises OSError."""
    root, path = Path(__file__).parents[2], os.environ.get("PYTHONPATH", "")
    if not root.name.endswith("-packages"):  # Not installed.
        path = os.pathsep.join(filter(None, (path, str(root))))
    os.execve(sys.executable, _command(__spec__.name, arguments), {**os.environ, "PYTHONPATH": path})


def _command(module: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-P", "-m", module, *arguments]


class Keeper:
    """Args: command: starts the server."""

    def __init__(self, command: Sequence[str]):
        self._command = command
        self._kept: dict[str, list[int]] = {}
        self._pid, self._keeps = 0, True
        self._is_ready = self._is_stopping = self._is_restarting = self._has_served = False
        self._address = f"{store.KEEPER}{os.getpid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("\0" + self._address[1:])
        self._signals, wakes = socket.socketpair(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        signal.set_wakeup_fd(wakes.detach())
        for number in (*PASSED_ON, signal.SIGUSR1, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # The number comes as a byte.

    def run(self) -> int:
        """Starts servers until one stops by itself, or none can start; returns the last one's exit status."""
        crashes, has_given_up, why, failing_since = 0, False, "", math.inf
        while True:
            began = time.monotonic()
            status = self._serve(why)
            now = time.monotonic()
            has_died = status < 0 or status == FAILED
            fails = status != 0 and not self._is_ready and self._has_served and bool(self._kept)
            if self._is_stopping or not (self._is_restarting or (self._keeps and (has_died or fails))):
                return _exit_status(status)
            failing_since = min(failing_since, now) if fails else math.inf
            if self._is_ready and (self._is_restarting or now - began > HEALTHY_S):
                crashes, has_given_up = 0, False
            elif self._is_ready:
                crashes += status != -signal.SIGKILL
            why = f"signal {-status}" if status < 0 else f"status {status}"
            is_hopeless = now > failing_since + PATIENCE_S or not (self._is_ready or self._is_restarting or fails)
            if is_hopeless or (crashes > MAX_CRASHES and has_given_up):
                _say(f"the server has ended ({why}), and so does its keeper")
                return _exit_status(status)
            if crashes > MAX_CRASHES:
                _say("the memory is given up: what lies there may be why the server crashes")
                self._forget(*list(self._kept))
                crashes, has_given_up = MAX_CRASHES, True  # One more crash is the last.
            _say(f"the server has ended ({why}); another one starts {'with' if self._kept else 'without'} its memory")
            delay_s = max(DELAY_S[0], (now - failing_since) / 2) if fails else DELAY_S[0] * (2**crashes - 1)
            if not self._rest(min(delay_s, DELAY_S[1])):
                return 0

    def _serve(self, why: str) -> int:
        """Starts a server and waits for its end; returns its exit status, or minus the number of a signal."""
        self._is_ready, self._is_restarting, self._keeps = False, False, True
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        try:
            self._pid = os.fork()
            if not self._pid:
                self._exec(why)
        except OSError as error:  # The system has no room for another process.
            _say(f"no server can start: {error.strerror}")
            return FAILED
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {*HANDLED, signal.SIGCHLD})
        while True:
            self._wait(None)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # As the first process of a container it has others.
                    if ended[0] == self._pid:
                        self._receive()
                        self._pid = 0
                        return os.waitstatus_to_exitcode(ended[1])

    def _exec(self, why: str) -> None:
        """In the new process: becomes the server, with the kept descriptors."""
        try:
            named = [(name, fd) for name, fds in self._kept.items() for fd in fds]
            above = store.FIRST_FD + MAX_DESCRIPTORS
            high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for _, fd in named]
            for nth, fd in enumerate(high):
                os.dup2(fd, store.FIRST_FD + nth, inheritable=True)
            offered = {
                "NOTIFY_SOCKET": self._address,
                store.ROOM: str(MAX_DESCRIPTORS),
                store.OFFERED: str(len(named)),
                store.OFFERED_NAMES: ":".join(name for name, _ in named),
                store.OFFERED_TO: str(os.getpid()),
                store.ENDED: why,
            }
            signal.set_wakeup_fd(-1)
            os.execve(self._command[0], list(self._command), {**os.environ, **offered})
        except OSError as error:
            print(f"kvpool-server: cannot start {self._command[0]}: {error.strerror}", file=sys.stderr)
        finally:
            os._exit(127)

    def _rest(self, seconds: float) -> bool:
        """Waits; False if the keeper is to end."""
        ends_at = time.monotonic() + seconds
        while not self._is_stopping and (left_s := ends_at - time.monotonic()) > 0:
            self._wait(left_s)
        return not self._is_stopping

    def _wait(self, seconds: float | None) -> None:
        """Handles signals and messages until some have come, or the time is over."""
        ready, _, _ = select.select([self._signals, self._socket], [], [], seconds)
        if self._socket in ready:
            self._receive()
        if self._signals in ready:
            for number in self._signals.recv(64):
                self._handle(signal.Signals(number))

    def _handle(self, number: signal.Signals) -> None:
        self._is_stopping |= number in STOPS
        if number is signal.SIGUSR1:
            self._is_restarting, number = True, signal.SIGTERM
        if self._pid and number is not signal.SIGCHLD:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def _receive(self) -> None:
        """Takes what the server has sent; other processes' messages are ignored, and their descriptors closed."""
        space = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4 * MAX_DESCRIPTORS)
        for _ in range(MESSAGES_A_TURN):  # A stranger who sends many delays no signal.
            try:
                data, ancillary, *_ = self._socket.recvmsg(MAX_MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            fds, sender = array.array("i"), 0
            for _, kind, content in ancillary:
                if kind == socket.SCM_RIGHTS:
                    fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                elif kind == socket.SCM_CREDENTIALS:
                    sender = _CREDENTIALS.unpack(content)[0]
            states = data.decode(errors="replace").split("\n") if sender and sender == self._pid else []
            self._take(dict(state.partition("=")[::2] for state in states), fds.tolist())

    def _take(self, states: Mapping[str, str], fds: list[int]) -> None:
        name = states.get("FDNAME", "")
        if "FDSTORE" in states and sum(map(len, self._kept.values())) + len(fds) <= MAX_DESCRIPTORS:
            self._kept.setdefault(name, []).extend(fds)
        else:
            for fd in fds:
                os.close(fd)
        self._keeps &= states.get("KEEP") != "no"
        if "FDSTOREREMOVE" in states:
            self._forget(name)
        self._is_ready |= "READY" in states
        self._has_served |= self._is_ready
        told = [f"{key}={value}" for key, value in states.items() if not key.startswith(("FD", "KEEP"))]
        if told and not ("STOPPING" in states and self._is_restarting):
            with contextlib.suppress(OSError):
                store.notify(*told)

    def _forget(self, *names: str) -> None:
        for name in names:
            for fd in self._kept.pop(name, []):
                os.close(fd)


def _say(event: str) -> None:
    """A line for people, or of JSON where the server's are."""
    is_json = "json" in {os.environ.get("KVPOOL_LOG_FORMAT"), *(each.rpartition("=")[2] for each in sys.argv)}
    text = json.dumps({"event": event, "level": "warning"}) if is_json else f"kvpool-server: {event}"
    with contextlib.suppress(OSError):  # The disk of the log is full, or its pipe has no reader.
        if select.select([], [sys.stderr], [], 0)[1]:  # Or one that stands still.
            print(text, file=sys.stderr, flush=True)


def _exit_status(status: int) -> int:
    """As a shell tells of a process that a signal has ended."""
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    raise SystemExit(Keeper(_command("kvpool_server", sys.argv[1:])).run())
