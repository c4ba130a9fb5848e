"""A data port that does not do what it should: what each of its connections does is written in a script."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from kvpool.transport.data_port import HEADER_BYTES, MAGIC, MAX_MESSAGE_BYTES, NO_ROOM, Header, Kind, Reply, Status
from kvpool.transport.tcp_connection import Peer
from tests.support.data_client import receive_exactly as receive

NONCE = b"n" * 16
TRICKLED_BYTES = 40
FORGED = "m\n\x1b[31m"
"""The message of a refusal, over and over: it would forge lines of logs, and colours of terminals."""


class Does(Enum):
    """What a connection does with a MOVE; the first four also instead of a greeting."""

    SERVE = "serves it"
    CUT = "hangs up at some byte of it"
    STALL = "stands still at some byte of it, until `ScriptedPort.resume` is set"
    TRICKLE = "sends its first bytes one by one"
    REFUSE = "tells an error, whose first bytes it sends one by one"
    LIE = "tells another size"
    CHAT = "tells success with a message"
    GARBLE = "sends what is no reply"
    EXTRA = "serves it, and sends bytes that nobody asked for"


GREETINGS = (Does.SERVE, Does.CUT, Does.STALL, Does.TRICKLE, Does.REFUSE)


@dataclass(frozen=True, slots=True)
class Act:
    """One thing that a connection does.

    Args:
        at: where in the bytes to cut or to stall, as a fraction.
        delay_s: before it begins; between two bytes that trickle.
        status: of a refusal.
    """

    does: Does
    at: float = 0.0
    delay_s: float = 0.0
    status: Status = Status.EXPIRED


HONEST = Act(Does.SERVE)


class _HungUpError(Exception):
    pass


class ScriptedPort:
    """Serves the connections that it gets, the nth by the nth script; later ones serve everything.

    Args:
        scripts: of each connection, its greeting and its MOVEs; what is beyond a script is served.

    Attributes:
        arena: uint8 [nbytes].
        resume: ends all stalls.
    """

    def __init__(self, scripts: Sequence[Sequence[Act]], nbytes: int = 1 << 20):
        self.arena = np.zeros(nbytes, np.uint8)
        self.resume = threading.Event()
        self._scripts = deque(map(deque, scripts))
        self._clients: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def num_connections(self) -> int:
        """How many it has accepted."""
        return len(self._clients)

    def peer(self, timeout_s: float = 5.0) -> Peer:
        host, port = self._listener.getsockname()
        return Peer(host, port, NONCE, timeout_s)

    def close(self) -> None:
        self.resume.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(10)
        self._listener.close()
        for client in self._clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            script = self._scripts.popleft() if self._scripts else deque()
            self._clients.append(client)
            self._threads.append(threading.Thread(target=self._serve, args=(client, script)))
            self._threads[-1].start()

    def _serve(self, client: socket.socket, script: deque[Act]) -> None:
        with client, contextlib.suppress(OSError, EOFError, _HungUpError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            act = script.popleft() if script else HONEST
            self._send(client, act, MAGIC + (NO_ROOM if act.does is Does.REFUSE else NONCE))
            kind, offsets = Kind.READ, np.zeros(0, "<u8")
            while True:
                header = Header.decode(receive(client, HEADER_BYTES))
                if header.kind is not Kind.MOVE:
                    kind, offsets = header.kind, np.frombuffer(receive(client, 8 * header.stop), "<u8")
                    continue
                starts = [int(at) + header.skip_bytes for at in offsets[header.first : header.stop]]
                self._move(client, script.popleft() if script else HONEST, kind, starts, header.region_bytes)

    def _move(self, client: socket.socket, act: Act, kind: Kind, starts: list[int], region_bytes: int) -> None:
        nbytes = len(starts) * region_bytes
        if kind is Kind.WRITE and act.does is not Does.REFUSE:
            received = b""
            if act.does in (Does.CUT, Does.STALL):
                received = receive(client, int(act.at * nbytes))
                self._stop(act)
            received += receive(client, nbytes - len(received))
            rows = np.frombuffer(received, np.uint8).reshape(-1, region_bytes)
            for start, row in zip(starts, rows, strict=True):
                self.arena[start : start + region_bytes] = row
            payload = b""
        else:
            payload = b"".join(self.arena[start : start + region_bytes].tobytes() for start in starts)
        self._send(client, act, self._reply(act, nbytes) + payload)
        if act.does is Does.REFUSE:
            client.shutdown(socket.SHUT_WR)
            while client.recv(1 << 18):
                pass

    def _reply(self, act: Act, nbytes: int) -> bytes:
        if act.does is Does.REFUSE:
            return Reply(act.status, 0, (FORGED * MAX_MESSAGE_BYTES)[: int(act.at * MAX_MESSAGE_BYTES)]).encode()
        if act.does is Does.CHAT:
            return Reply(Status.OK, nbytes, "by the way").encode()
        if act.does is Does.GARBLE:
            return b"\xff" * 16
        return Reply(Status.OK, nbytes + (act.does is Does.LIE)).encode()

    def _send(self, client: socket.socket, act: Act, words: bytes) -> None:
        if act.does in (Does.TRICKLE, Does.REFUSE):
            for at in range(min(TRICKLED_BYTES, len(words))):
                client.sendall(words[at : at + 1])
                time.sleep(act.delay_s)
            client.sendall(words[TRICKLED_BYTES:])
            return
        time.sleep(act.delay_s)
        if act.does in (Does.CUT, Does.STALL):
            at = int(act.at * len(words))
            client.sendall(words[:at])
            self._stop(act)
            words = words[at:]
        client.sendall(words + b"\xff" * 7 * (act.does is Does.EXTRA))

    def _stop(self, act: Act) -> None:
        if act.does is Does.CUT:
            raise _HungUpError
        self.resume.wait(20)


@contextlib.contextmanager
def scripted_port(*scripts: Sequence[Act], nbytes: int = 1 << 20) -> Iterator[ScriptedPort]:
    """A port until the end of the block."""
    port = ScriptedPort(scripts, nbytes)
    try:
        yield port
    finally:
        port.close()
