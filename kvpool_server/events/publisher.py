"""Puts messages on a PUB socket and answers replay requests on a ROUTER socket, both as vLLM's publisher does.

A thread owns the sockets and waits for no subscriber: a PUB socket drops messages that a slow subscriber does not
receive, and a replay continues whenever its client has received some of it, until it is done or stalls for too long.

Whoever reaches the ports may connect, so what each peer can make the server hold is bounded: what it sends by
`MAX_RECEIVED_BYTES` a frame, what it does not receive by a number of messages of at most about 36 KiB.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import structlog
import zmq

from kvpool.errors import ConfigError
from kvpool_server.events.history import History, Message
from kvpool_server.events.ledger import Ledger, SnapshotLostError

log = structlog.get_logger()

_END = Message(b"", (1 << 64) - 1, b"")
_END_SEQ = _END.seq.to_bytes(8, "big")
PUB_HWM = 2_048
"""Messages that wait for a subscriber; further ones are dropped for it, and it sees a gap."""
ROUTER_HWM = 64
"""Messages of a replay that wait for its client, and requests of a client that wait for the server."""
MAX_RECEIVED_BYTES = 1 << 10
"""Of one frame that a peer sends; a larger one ends its connection. Requests and topics are shorter."""
DEAF_MS = 30_000
"""A TCP connection on which nothing could be sent for so long is ended."""
MAX_REPLAYS = 16
SNAPSHOT_EVERY_S = 10.0
"""From the beginning of one snapshot for a client to that of the next."""
REPLAY_S = 120.0
"""How long one replay may take."""
MAX_CLIENTS = 1_024
"""Clients whose last snapshot is remembered."""
REPLAY_STALL_S = 10.0
POLL_MS = 1_000
POLL_REPLAYS_MS = 5
LINGER_MS = 200
MESSAGES_A_TURN = 64


@dataclass(slots=True)
class _Replay:
    client: bytes
    messages: Iterator[Message | None]
    is_new_snapshot: bool
    begins_at: float
    ends_at: float
    stalls_at: float
    unsent: list[bytes] | None = None
    is_done: bool = False


class Publisher:
    """See the module.

    Args:
        endpoint: where to bind the PUB socket: tcp://HOST:PORT (port 0 takes a free one) or ipc://PATH.
        replay_endpoint: where to bind the ROUTER socket; empty for none.

    Attributes:
        endpoint, replay_endpoint: as bound.

    Raises:
        ConfigError: an address cannot be listened on; nothing is left behind then.
    """

    def __init__(self, ledger: Ledger, history: History, endpoint: str, replay_endpoint: str):
        self._ledger = ledger
        self._history = history
        self._is_stopping = False
        self._replays: list[_Replay] = []
        self._snapshot_at: dict[bytes, float] = {}
        self._context = zmq.Context()
        try:
            self._pub = self._bind(zmq.PUB, endpoint, "--kv-events")
            self._router = self._bind(zmq.ROUTER, replay_endpoint, "--kv-events-replay") if replay_endpoint else None
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.endpoint = _bound(self._pub)
        self.replay_endpoint = _bound(self._router) if self._router is not None else ""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        ledger.wake = self._wake
        self._wake()
        self._thread = threading.Thread(target=self._run, name="kvpool-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publishes the remaining changes, and ends the thread. Idempotent."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self._wake()
        self._thread.join()
        self._ledger.wake = lambda: None
        self._context.destroy(linger=LINGER_MS)
        os.close(self._wake_fd)

    def _bind(self, kind: int, endpoint: str, flag: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_RECEIVED_BYTES)
        socket.setsockopt(zmq.TCP_MAXRT, DEAF_MS)
        socket.setsockopt(zmq.RCVHWM, ROUTER_HWM)
        socket.setsockopt(zmq.SNDHWM, PUB_HWM if kind == zmq.PUB else ROUTER_HWM)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # A full or vanished client raises.
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot listen on {endpoint} for KV events: {error.strerror}; give {flag} another address"
            ) from None
        return socket

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        without_requests, with_requests = zmq.Poller(), zmq.Poller()
        for poller in (without_requests, with_requests):
            poller.register(self._wake_fd, zmq.POLLIN)
        if self._router is not None:
            with_requests.register(self._router, zmq.POLLIN)
        while not self._is_stopping:
            try:
                poller = with_requests if len(self._replays) < MAX_REPLAYS else without_requests
                poller.poll(POLL_REPLAYS_MS if self._replays or self._ledger.catch_up() else POLL_MS)
                self._turn()
            except Exception:
                log.exception("publishing KV events failed")  # Subscribers see a gap; the next turn may succeed.
                time.sleep(0.1)
        self._publish()

    def _turn(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass
        self._publish()
        if self._router is not None:
            self._receive(self._router)
            for replay in self._replays:
                self._continue(self._router, replay)
            self._replays = [replay for replay in self._replays if not replay.is_done]

    def _publish(self) -> None:
        for message in self._history.publish():
            self._pub.send_multipart(_frames(message))

    def _receive(self, router: zmq.Socket[bytes]) -> None:
        while len(self._replays) < MAX_REPLAYS:
            try:
                frames = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3 or len(frames[2]) != 8:
                log.warning(
                    "ignored a replay request: it must be an empty frame and 8 bytes", sizes=list(map(len, frames[1:]))
                )
                continue
            client, start_seq = frames[0], int.from_bytes(frames[2], "big")
            # A client that asks again has given up on its previous replay: each client has one at most.
            self._replays = [replay for replay in self._replays if replay.client != client]
            begins_at, is_snapshot = time.monotonic(), self._history.needs_snapshot(start_seq)
            if is_snapshot:
                begins_at = max(begins_at, self._snapshot_at.get(client, -math.inf) + SNAPSHOT_EVERY_S)
            ends_at, stalls_at = begins_at + REPLAY_S, begins_at + REPLAY_STALL_S
            answer = self._history.answer(start_seq)
            self._replays.append(_Replay(client, answer, is_snapshot, begins_at, ends_at, stalls_at))

    def _remember_snapshot(self, client: bytes, now: float) -> None:
        self._snapshot_at.pop(client, None)
        self._snapshot_at[client] = now
        if len(self._snapshot_at) > MAX_CLIENTS:
            del self._snapshot_at[next(iter(self._snapshot_at))]

    def _continue(self, router: zmq.Socket[bytes], replay: _Replay) -> None:
        """Sends as much as the client receives, MESSAGES_A_TURN at most: other clients wait meanwhile."""
        now = time.monotonic()
        if now < replay.begins_at:
            return
        if replay.is_new_snapshot:
            replay.is_new_snapshot = False
            self._remember_snapshot(replay.client, now)
        replay.is_done = now > replay.ends_at
        for _ in range(0 if replay.is_done else MESSAGES_A_TURN):
            time.sleep(0)  # The pool's loop takes the interpreter's lock before the next message is encoded.
            frames = replay.unsent
            if frames is None:
                try:
                    message = next(replay.messages, _END)
                except SnapshotLostError as error:
                    log.warning("gave up a snapshot of the KV events", reason=str(error))
                    replay.is_done = True
                    return
                if message is None:  # The answer is not ready yet.
                    return
                frames = [replay.client, b"", *_frames(message)]
            try:
                router.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                replay.unsent = frames
                replay.is_done = time.monotonic() > replay.stalls_at
                return
            except zmq.ZMQError:
                replay.is_done = True  # The client is gone.
                return
            replay.unsent = None
            replay.stalls_at = time.monotonic() + REPLAY_STALL_S
            if frames[3] == _END_SEQ:
                replay.is_done = True
                return


def _frames(message: Message) -> tuple[bytes, bytes, bytes]:
    return message.topic, message.seq.to_bytes(8, "big"), message.payload


def _bound(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
