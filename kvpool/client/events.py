"""A subscriber to a server's KV events, which requests the messages that it missed (docs/reference/kv-events.md).

For operators (`kvpool events`), tests, and routers in Python. Not thread-safe.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from kvpool.protocol.errors import InvalidReplyError, InvalidRequestError, PoolTimeoutError
from kvpool.protocol.text import escaped
from kvpool.security.curve import SubscriberKeys

END_SEQ = (1 << 64) - 1
CLEARED = "AllBlocksCleared"
MAX_FRAME_BYTES = 4 << 20
"""Largest frame: a server's message is about 4,096 blocks at most. ZeroMQ hangs up on a larger one for good."""
MAX_QUEUED_MESSAGES = 1_000
"""Most messages that wait to be received. More wait at the server, which drops some at last: a gap that is noticed."""
MAX_REPLAY_BYTES = 1 << 30
MAX_TOPIC_BYTES = 1_024
MAX_REPLAY_S = 600.0


@dataclass(frozen=True, slots=True)
class EventMessage:
    """One message.

    Args:
        topic: TOPIC@FINGERPRINT@MODEL; TOPIC@@ for a message about all namespaces.
        ts: when the server made it, seconds since the epoch.
        events: in order, each a map with its "type".
        nbytes: as received.
    """

    topic: str
    seq: int
    ts: float
    events: list[dict[str, Any]]
    nbytes: int = 0


class Subscriber:
    """Receives a server's KV events, from a snapshot on if it has a replay endpoint, else from the next message on.

    Args:
        endpoint: the server's --kv-events.
        replay_endpoint: its --kv-events-replay; empty: missed messages are lost, and counted in `missed`.
        timeout_ms: longest wait for the next message of a replay.
        keys: for a server with --kv-events-key; None: connect without keys.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str = "", timeout_ms: int = 5_000, keys: SubscriberKeys | None = None
    ):
        self.missed = 0
        self._timeout_ms = timeout_ms
        self._keys = keys
        self._last_seq = -1
        self._context = zmq.Context()
        self._replay_endpoint = replay_endpoint
        self._caught_up = not replay_endpoint
        try:
            self._sub = self._context.socket(zmq.SUB)
            self._prepare(self._sub)
            self._sub.connect(endpoint)
            self._sub.subscribe("")  # Numbers run over all topics: a subscriber to some topics could not see gaps.
        except zmq.ZMQError as error:
            self.close()
            raise InvalidRequestError(
                f"cannot subscribe to {endpoint!r}: {error.strerror}; give it as tcp://HOST:PORT"
            ) from None

    def receive(self, timeout_ms: int) -> list[EventMessage]:
        """The next messages, in order; empty if none come in time.

        Raises:
            PoolTimeoutError: the server does not answer a replay request. The next call repeats the request.
            InvalidReplyError: what came is no message of KV events.
        """
        if not self._caught_up and (messages := self._catch_up()):
            return messages
        if not self._sub.poll(timeout_ms):
            # Neither the loss of the last message shows a gap, nor a restarted server whose clock is behind.
            return self._catch_up() if self._replay_endpoint else []
        message = _decode(self._sub.recv_multipart())
        if message.seq <= self._last_seq:
            return []  # Received with a replay already.
        if self._last_seq >= 0 and message.seq > self._last_seq + 1:
            if self._replay_endpoint:
                return self._catch_up()
            self.missed += message.seq - self._last_seq - 1
        self._last_seq = message.seq
        return [message]

    def _catch_up(self) -> list[EventMessage]:
        self._caught_up = False
        messages = self.replay(self._last_seq + 1)
        self._caught_up = True
        return messages

    def replay(self, start_seq: int) -> list[EventMessage]:
        """Requests, and counts as received, all messages from `start_seq` on; 0: a snapshot. Raises as `receive`."""
        messages: list[EventMessage] = []
        room, ends_at = MAX_REPLAY_BYTES, time.monotonic() + MAX_REPLAY_S
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            self._prepare(dealer)
            dealer.connect(self._replay_endpoint)
            dealer.send_multipart((b"", start_seq.to_bytes(8, "big")))
            while dealer.poll(self._timeout_ms) and time.monotonic() < ends_at:
                message = _decode(dealer.recv_multipart()[1:])
                if message.seq == END_SEQ:
                    return self._accept(messages)
                messages.append(message)
                room -= message.nbytes
                if room < 0:
                    raise InvalidReplyError(f"a replay of KV events has more than {MAX_REPLAY_BYTES} bytes")
        raise PoolTimeoutError(
            f"{self._replay_endpoint} does not answer a replay request; give the server's --kv-events-replay, "
            + ("and keys that it lists" if self._keys else "and keys if the server has --kv-events-key")
        )

    def _prepare(self, socket: zmq.Socket[bytes]) -> None:
        """Bounds what a socket keeps of what its peer sends, and has it prove who it is."""
        socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        if self._keys is not None:
            self._keys.apply(socket)

    def _accept(self, messages: list[EventMessage]) -> list[EventMessage]:
        is_snapshot = messages and messages[0].events and messages[0].events[0].get("type") == CLEARED
        if not is_snapshot:
            messages = [message for message in messages if message.seq > self._last_seq]
        if messages:
            self._last_seq = messages[-1].seq
        return messages

    def close(self) -> None:
        """Idempotent."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Batch(msgspec.Struct, array_like=True):
    """The payload; what follows these fields is ignored."""

    ts: float
    events: list[dict[str, Any]]


_PAYLOAD = msgspec.msgpack.Decoder(_Batch)


def _decode(frames: list[bytes]) -> EventMessage:
    """Raises InvalidReplyError for what is no message of KV events. The last one of a replay has no payload."""
    if len(frames) != 3 or len(frames[1]) != 8 or len(frames[0]) > MAX_TOPIC_BYTES:
        sizes = ", ".join(str(len(frame)) for frame in frames[:4])
        raise InvalidReplyError(
            f"{len(frames)} frames of {sizes} bytes are no message of KV events: it has a topic of at most "
            f"{MAX_TOPIC_BYTES}, a number of 8, and a payload"
        )
    topic, seq, payload = frames
    number = int.from_bytes(seq, "big")
    if number == END_SEQ:
        return EventMessage("", number, 0.0, [])
    try:
        batch = _PAYLOAD.decode(payload)
        return EventMessage(topic.decode(), number, batch.ts, batch.events, sum(map(len, frames)))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidReplyError(f"a message of KV events cannot be decoded: {escaped(str(error), 200)}") from None
