"""Lookups over one long-lived call, instead of setting up a call for each.

A stream opens with the first lookup and lives until the server or the client goes; the next lookup opens another. The
server answers in order, so that the oldest question is always the one that is answered.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvpool.v1 import pool_pb2 as pb

log = logging.getLogger(__name__)

CLOSE_S = 1.0
MAX_UNSENT = 1024
"""Lookups that wait for a server to take them; with more it has stopped, and they would only be kept in memory."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class StreamedError(grpc.RpcError):
    """How a lookup failed, as a call of its own would have."""

    def __init__(self, code: grpc.StatusCode, details: str):
        super().__init__(details)
        self._code = code
        self._details = details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


class StreamedLookup:
    """A lookup under way: as much of `grpc.Future` as is needed."""

    def __init__(self, timeout_s: float):
        self._ends_at = time.monotonic() + timeout_s
        self._lock = threading.Lock()
        self._is_settled = False
        self._settled = threading.Lock()  # Held until it is settled: cheaper to wait for than an Event.
        self._settled.acquire()
        self._reply: pb.LookupResponse | None = None
        self._error: grpc.RpcError | None = None
        self._callbacks: list[Callable[[Any], None]] = []

    def done(self) -> bool:
        return self._is_settled or time.monotonic() >= self._ends_at

    def result(self, timeout: float | None = None) -> pb.LookupResponse:
        """The answer.

        Raises:
            grpc.FutureTimeoutError: it is not there within `timeout` seconds.
            grpc.RpcError: it failed, or its deadline has passed. (An answer that is there is given even so.)
        """
        remaining = max(0.0, self._ends_at - time.monotonic())
        if not self._settled.acquire(timeout=remaining if timeout is None else max(0.0, min(timeout, remaining))):
            if time.monotonic() < self._ends_at:
                raise grpc.FutureTimeoutError
            raise StreamedError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        self._settled.release()  # For others who ask.
        if self._error is not None:
            raise self._error
        assert self._reply is not None
        return self._reply

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Calls back once the server has answered, however late, or never will; from whichever thread that is.

        What it raises is logged. It must not wait for another lookup: the thread may be the one that hears the answers.
        """
        with self._lock:
            if not self._is_settled:
                self._callbacks.append(callback)
                return
        callback(self)

    def settle(self, reply: pb.LookupResponse | None, error: grpc.RpcError | None) -> None:
        """Sets what it came to."""
        with self._lock:
            self._reply, self._error = reply, error
            self._is_settled = True
            self._settled.release()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                log.exception("a callback of a lookup failed")


class LookupStream:
    """One client's. Thread-safe.

    Args:
        streaming: the stub's `LookupStream`.
        unary: the stub's `Lookup`, for a gRPC whose calls cannot be driven as `_Stream` does.
    """

    def __init__(self, streaming: Any, unary: Any):
        self._streaming: Any | None = streaming
        self._unary = unary
        self._lock = threading.Lock()
        self._stream: _Stream | None = None

    def __call__(self, request: pb.LookupRequest, timeout: float) -> pb.LookupResponse:
        """One lookup, waited for. Raises as `StreamedLookup.result`."""
        reply: pb.LookupResponse = self.future(request, timeout).result()
        return reply

    def future(self, request: pb.LookupRequest, timeout: float) -> Any:
        """Sends a lookup; does not wait. Raises ValueError if the channel is closed."""
        lookup = StreamedLookup(timeout)
        packed = request.SerializeToString()
        with self._lock:
            if self._stream is not None and self._stream.send(packed, lookup):
                return lookup
            if self._streaming is not None:
                try:
                    self._stream = _Stream(self._streaming)
                except (ImportError, AttributeError, TypeError):
                    self._streaming = None
                else:
                    if not self._stream.send(packed, lookup):
                        lookup.settle(None, self._stream.error)  # The server is known not to be there.
                    return lookup
        return self._unary.future(request, timeout=timeout)

    def close(self) -> None:
        """Ends the stream; lookups under way fail. The next lookup opens another. Idempotent."""
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


class _Stream:
    """One call: whoever asks sends, and a thread of its own reads the replies.

    gRPC's own streams have two more threads on the way, one that takes requests out of an iterator and one that hands
    replies on; to wake them takes a good part of a short lookup. So this drives the call itself, on a queue of its own
    ("segregated"), as gRPC's streams of one thread do. That is no public interface of gRPC: what differs in another
    release raises AttributeError or TypeError here, when the call is opened.

    A call has at most one message on its way out at a time, and one awaited.

    Attributes:
        error: how it ended, once it has.

    Source: grpc._channel._UnaryStreamMultiCallable and _SingleThreadedRendezvous.
    """

    def __init__(self, method: Any):
        from grpc._cython import cygrpc  # type: ignore[attr-defined]

        self._receive = (cygrpc.ReceiveMessageOperation(0),)
        self._send = cygrpc.SendMessageOperation
        self._cancelled = cygrpc.StatusCode.cancelled
        self._lock = threading.Lock()
        self._waiting: deque[StreamedLookup] = deque()
        self._unsent: deque[bytes] = deque()
        self._ended = False
        self.error = StreamedError(grpc.StatusCode.UNAVAILABLE, "the server ended the stream of lookups")
        opening = {
            _OPENED: (cygrpc.SendInitialMetadataOperation(None, 0),),
            _GREETED: (cygrpc.ReceiveInitialMetadataOperation(0),),
            _ENDED: (cygrpc.ReceiveStatusOnClientOperation(0),),
            _REPLIED: self._receive,
        }
        self._due = set(opening)  # What the call has yet to report: asking it for more than that would never return.
        self._call = method._channel.segregated_call(
            cygrpc.PropagationConstants.GRPC_PROPAGATE_DEFAULTS,
            method._method,
            None,
            None,
            None,
            None,
            [(operations, tag) for tag, operations in opening.items()],
            None,
            None,
        )
        self._thread = threading.Thread(target=self._read, name="kvpool-lookups", daemon=True)
        self._thread.start()

    def send(self, request: bytes, lookup: StreamedLookup) -> bool:
        """False if the stream has ended."""
        with self._lock:  # What is sent and what is waited for, in the same order.
            if self._ended:
                return False
            if len(self._unsent) >= MAX_UNSENT:
                lookup.settle(None, StreamedError(grpc.StatusCode.UNAVAILABLE, "the server takes no more lookups"))
                return True
            self._waiting.append(lookup)
            self._unsent.append(request)
            if _SENT not in self._due:
                self._send_next()
            return True

    def _send_next(self) -> None:
        self._start((self._send(self._unsent.popleft(), 0),), _SENT)

    def _start(self, operations: tuple[Any, ...], tag: str) -> None:
        if self._call.operate(operations, tag):
            self._due.add(tag)

    def close(self) -> None:
        with self._lock:
            if not self._ended:
                self._call.cancel(self._cancelled, "the client is closed")
        if threading.current_thread() is not self._thread:
            # A thread that ends with the interpreter instead may hold gRPC's locks, for which the exit waits for ever.
            self._thread.join(CLOSE_S)

    def _read(self) -> None:
        while self._due:
            event = self._call.next_event()
            message: bytes | None = event.batch_operations[0].message() if event.tag == _REPLIED else None
            if message is not None:
                self._settle_next(message)
            with self._lock:
                self._due.discard(event.tag)
                if message is not None:
                    self._start(self._receive, _REPLIED)
                elif event.tag == _SENT and self._unsent and not self._ended:
                    self._send_next()
                elif event.tag == _ENDED:
                    self.error = _error_of(event.batch_operations[0]) or self.error
                    self._ended = True
        waiting, self._waiting = self._waiting, deque()  # Nobody adds to what has ended.
        for lookup in waiting:
            lookup.settle(None, self.error)

    def _settle_next(self, message: bytes) -> None:
        try:
            reply = pb.LookupReply.FromString(message)
            with self._lock:
                lookup = self._waiting.popleft()
        except (DecodeError, IndexError):
            self.close()  # Whatever answers there is no kvpool-server.
            return
        if reply.HasField("found"):
            lookup.settle(reply.found, None)
        else:
            code = _CODES.get(reply.error.code, grpc.StatusCode.UNKNOWN)
            lookup.settle(None, StreamedError(code, reply.error.message))


_OPENED, _GREETED, _SENT, _REPLIED, _ENDED = "opened", "greeted", "sent", "replied", "ended"


def _error_of(status: Any) -> StreamedError | None:
    """How a call ended; None if it just did."""
    code = _CODES.get(status.code(), grpc.StatusCode.UNKNOWN)
    if code is grpc.StatusCode.OK:
        return None
    details = status.details() or ""
    return StreamedError(code, details if isinstance(details, str) else details.decode(errors="replace"))
