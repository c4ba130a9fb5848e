"""Lookups over one long-lived gRPC call, which saves the set-up of a call for each.

A stream lives until the server or the client ends it; the next lookup then opens another. Lookups that a server leaves
unanswered when it ends a stream without an error are sent once more, over the next one: a server ends streams from time
to time, so that nobody's certificate is trusted for ever.

A server takes streams with a deadline only, so that a client that stops reading costs it memory for a bounded time. So
the client renews its stream long before: the old one still answers what was sent.

The server answers in the order of the requests. Leases that end travel with the next lookup: a message of their own
would cost the server as much as a lookup.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Literal

import grpc
from google.protobuf.message import DecodeError

from kvpool.protocol.errors import InvalidReplyError, KVPoolError
from kvpool.protocol.messages import MESSAGE_BYTES, pieces
from kvpool.protocol.replies import LookupQuestion
from kvpool.protocol.wire import NAME_KEY, SERVICE_NAME
from kvpool.v1 import pool_pb2 as pb

CLOSE_S = 1.0
FLUSH_S = 0.2
"""How long closing waits for leases to be released; if that takes longer, they are left to expire."""
MAX_UNSENT = 1024
"""Most requests that wait to be sent. A server behind by more has stopped; further lookups fail at once."""
STREAM_S = 540.0
"""Deadline of a stream."""
RENEW_S = 270.0
"""How old a stream becomes before the next lookup opens another. Younger than STREAM_S by more than a lookup takes."""
RELEASE_WITHIN_S = 0.02
"""How long leases that end wait for a lookup to travel with, before a message of their own is sent."""
MAX_RELEASED = 4096
"""Most leases that wait for a message. Further ones are left to expire."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class StreamedError(grpc.aio.AioRpcError):
    """The error of a lookup, as of a call of its own. `name` is of an error that its code does not tell apart."""

    def __init__(self, code: grpc.StatusCode, details: str, name: str = ""):
        named = grpc.aio.Metadata((NAME_KEY, name)) if name else grpc.aio.Metadata()
        super().__init__(code, grpc.aio.Metadata(), named, details, None)


class StreamedLookup(Future[pb.LookupResponse]):
    """A lookup that was sent: the parts of `grpc.Future` that clients use.

    Callbacks run once the server has answered, even after the deadline, or once the stream has ended, perhaps on the
    thread that reads the answers: a callback must not wait for another lookup.

    Args:
        question: called on gRPC's thread, and must not raise. A reply of more than its `max_reply_bytes` is not parsed:
            its parts may take 60 times its size.
    """

    def __init__(self, question: LookupQuestion, timeout_s: float):
        super().__init__()
        self.question = question
        self._ends_at = time.monotonic() + timeout_s
        self.was_sent_again = False

    def done(self) -> bool:
        return super().done() or time.monotonic() >= self._ends_at

    def result(self, timeout: float | None = None) -> pb.LookupResponse:
        """The answer.

        Raises:
            grpc.FutureTimeoutError: the answer has not arrived within `timeout` seconds.
            grpc.RpcError: the lookup failed, or its deadline has passed without an answer.
            InvalidReplyError: the reply is none to this lookup; the stream has ended.
        """
        remaining = self._ends_at - time.monotonic()
        try:
            return super().result(max(0.0, remaining if timeout is None else min(timeout, remaining)))
        except TimeoutError:
            if time.monotonic() < self._ends_at:
                raise grpc.FutureTimeoutError from None
            raise StreamedError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None


class LookupStream:
    """The lookups of one client. Thread-safe.

    Args:
        channel: when its `version` changes, lookups go over a new stream, and the old one ends once it has been
            answered. A channel without versions is never renewed.
    """

    def __init__(self, channel: Any):
        self._method = channel.stream_stream(f"/{SERVICE_NAME}/LookupStream", None, None)
        self._channel = channel
        self._version = 0
        self._lock = threading.Lock()
        self._stream: _Stream | None = None

    def future(self, question: LookupQuestion, timeout: float) -> StreamedLookup:
        """Sends a lookup; does not wait. Raises ValueError if the channel is closed."""
        lookup = StreamedLookup(question, timeout)
        self._send(lookup)
        return lookup

    def _send(self, lookup: StreamedLookup) -> None:
        with self._lock:
            self._renew()
            if self._stream is None or not self._stream.send(lookup):
                self._stream = _Stream(self._method, self)
                if not self._stream.send(lookup):
                    lookup.set_exception(self._stream.error)  # The server cannot be reached.

    def send_again(self, lookup: StreamedLookup) -> None:
        """Sends a lookup that a stream has left unanswered. Called by the stream's thread."""
        lookup.was_sent_again = True
        try:
            self._send(lookup)
        except ValueError:  # The channel is closed.
            lookup.set_exception(StreamedError(grpc.StatusCode.CANCELLED, "the client is closed"))

    def release(self, lease_ids: Sequence[int]) -> None:
        """Ends leases with the next lookup, or within RELEASE_WITHIN_S; does not wait. Raises as `future`.

        If the stream ends with an error before, the leases expire.
        """
        with self._lock:
            self._renew()
            if self._stream is None or not self._stream.release(lease_ids):
                self._stream = _Stream(self._method, self)
                self._stream.release(lease_ids)

    def _renew(self) -> None:
        version = getattr(self._channel, "version", 0)
        if self._stream is not None and (version != self._version or time.monotonic() > self._stream.renew_at):
            self._stream.finish()
            self._stream = None
        self._version = version

    def close(self) -> None:
        """Ends the stream; lookups in flight fail. The next lookup opens another. Idempotent."""
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


_Queued = StreamedLookup | Literal["release", "end"]
"""To be sent: a lookup; leases, in a message of their own, which the server does not answer; nothing more."""


class _Stream:
    """One call. A caller only queues its request: gRPC's thread makes and sends the messages, which takes milliseconds
    for thousands of blocks, and a thread of the stream reads the replies.

    Args:
        lookups: sends what the server has not answered over another stream.

    Attributes:
        has_ended: whether it sends no more requests.
        renew_at: monotonic seconds; from then on the next lookup opens another stream.
        error: why the stream ended, once it has.
    """

    def __init__(self, method: Any, lookups: LookupStream):
        self._lock = threading.Lock()
        self._lookups = lookups
        self._waiting: deque[StreamedLookup] = deque()
        self._unsent: SimpleQueue[_Queued] = SimpleQueue()
        self._released: list[int] = []
        self._unanswered: deque[tuple[bool, list[int]]] = deque(maxlen=MAX_UNSENT)
        """Of each message that was sent after the last one with an answer: whether it asks, and what it releases."""
        self._in_pieces: set[StreamedLookup] = set()  # Those that wait for an answer, and were several messages here.
        self.renew_at = time.monotonic() + RENEW_S
        self.has_ended = self._is_closed = False
        self.error: StreamedError | KVPoolError = StreamedError(
            grpc.StatusCode.UNAVAILABLE, "kvpool-server ended the stream of lookups"
        )
        self._call = method(self._requests(), timeout=STREAM_S)
        self._thread = threading.Thread(target=self._read, name="kvpool-lookups", daemon=True)
        self._thread.start()

    def send(self, lookup: StreamedLookup) -> bool:
        """Queues a request; False if the stream has ended."""
        with self._lock:  # Requests and lookups must have the same order.
            if self.has_ended:
                return False
            if self._unsent.qsize() >= MAX_UNSENT:
                too_many = f"{MAX_UNSENT} lookups wait to be sent: kvpool-server has stopped reading"
                lookup.set_exception(StreamedError(grpc.StatusCode.UNAVAILABLE, too_many))
                return True
            self._waiting.append(lookup)
            self._unsent.put(lookup)
            return True

    def release(self, lease_ids: Sequence[int]) -> bool:
        """Queues leases to release; False if the stream has ended."""
        with self._lock:
            if self.has_ended:
                return False
            is_first = not self._released
            self._released += lease_ids[: MAX_RELEASED - len(self._released)]
        if is_first:
            self._unsent.put("release")
        return True

    def finish(self) -> None:
        """Sends no more than what is queued; does not wait. The stream ends with the last answer."""
        self._unsent.put("end")

    def close(self) -> None:
        is_own = threading.current_thread() is self._thread
        self._is_closed = True
        self.finish()
        if self._released and not is_own:
            self._thread.join(FLUSH_S)
        self._call.cancel()
        if not is_own:
            # A thread that is killed at the interpreter's end may hold gRPC's locks, and the exit would wait for them.
            self._thread.join(CLOSE_S)

    def _requests(self) -> Iterator[bytes]:
        """The messages to send, in order. Runs on gRPC's thread."""
        queued = self._unsent.get()
        while queued != "end":
            if queued == "release":
                with suppress(Empty):
                    queued = self._unsent.get(timeout=RELEASE_WITHIN_S)
            lookup = queued if isinstance(queued, StreamedLookup) else None
            request = pb.LookupRequest() if lookup is None else lookup.question()
            with self._lock:
                released, self._released = self._released, []
                self._unanswered.append((lookup is not None, released))
            request.release.extend(released)
            if released or lookup is not None:
                encoded = request.SerializeToString()
                if lookup is not None and len(encoded) >= MESSAGE_BYTES:
                    self._in_pieces.add(lookup)
                yield from pieces(encoded)
            queued = queued if queued == "end" else self._unsent.get()

    def _read(self) -> None:
        has_ended_well = False
        try:
            if not all(map(self._end_next, self._call)):
                self._call.cancel()
            has_ended_well = True
        except grpc.RpcError as error:
            self.error = StreamedError(error.code(), error.details() or "")  # type: ignore[attr-defined]
        except InvalidReplyError as error:  # What follows cannot be told apart: the peer is no kvpool-server.
            self.error = error
            self._call.cancel()
        finally:
            with self._lock:
                self.has_ended = True
                # Releases without an unanswered lookup count as read. To send them again, over a stream that the server
                # may end for being idle as it did this one, would open stream after stream; a lost one's lease expires.
                unread = self._unanswered if any(asks for asks, _ in self._unanswered) else ()
                unreleased = [*self._released, *(each for _, released in unread for each in released)]
            self.finish()  # gRPC's thread ends.
            waiting, self._waiting = self._waiting, deque()  # Nothing is added after the end.
            for lookup in waiting:
                if has_ended_well and not lookup.was_sent_again:
                    self._lookups.send_again(lookup)
                else:
                    lookup.set_exception(self.error)
            if has_ended_well and unreleased and not self._is_closed:
                with suppress(ValueError):  # The channel is closed.
                    self._lookups.release(unreleased)

    def _end_next(self, reply: bytes) -> bool:
        """Ends the oldest lookup with its reply.

        Returns: whether the next reply is the next lookup's. A server of the release before answers each piece of a
            request, with an error.

        Raises InvalidReplyError, after which no lookup is answered.
        """
        with self._lock:
            if not self._waiting:
                raise InvalidReplyError("the server answered a lookup that was not sent")
            lookup = self._waiting[0]
        if len(reply) > (most := lookup.question.max_reply_bytes):
            raise InvalidReplyError(f"the server's reply to a lookup has {len(reply)} bytes; {most} are allowed")
        try:
            outcome = pb.LookupReply.FromString(reply)
        except DecodeError as error:
            raise InvalidReplyError(f"the server's reply to a lookup cannot be parsed: {error}") from None
        with self._lock:
            self._waiting.popleft()
            while self._unanswered and not self._unanswered.popleft()[0]:
                pass
        if outcome.HasField("found"):
            lookup.set_result(outcome.found)
        else:
            code = _CODES.get(outcome.error.code, grpc.StatusCode.UNKNOWN)
            lookup.set_exception(StreamedError(code, outcome.error.message, outcome.error.name))
        is_whole = lookup not in self._in_pieces
        self._in_pieces.discard(lookup)
        return is_whole or outcome.HasField("found")
