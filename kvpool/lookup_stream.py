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
from queue import SimpleQueue
from typing import Any

import grpc

from kvpool.v1 import pool_pb2 as pb

log = logging.getLogger(__name__)

CLOSE_S = 1.0
MAX_UNSENT = 1024
"""Lookups that wait for a server to take them; with more it has stopped, and they would only be kept in memory."""

Make = Callable[[], pb.LookupRequest]
"""Makes a request, on a thread of the stream. It must not raise."""
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
        method: the stub's `LookupStream`.
    """

    def __init__(self, method: Any):
        self._method = method
        self._lock = threading.Lock()
        self._stream: _Stream | None = None

    def __call__(self, make: Make, timeout: float) -> pb.LookupResponse:
        """One lookup, waited for. Raises as `StreamedLookup.result`."""
        return self.future(make, timeout).result()

    def future(self, make: Make, timeout: float) -> StreamedLookup:
        """Sends a lookup; does not wait. Raises ValueError if the channel is closed."""
        lookup = StreamedLookup(timeout)
        with self._lock:
            if self._stream is None or not self._stream.send(make, lookup):
                self._stream = _Stream(self._method)
                if not self._stream.send(make, lookup):
                    lookup.settle(None, self._stream.error)  # The server is known not to be there.
        return lookup

    def close(self) -> None:
        """Ends the stream; lookups under way fail. The next lookup opens another. Idempotent."""
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


class _Stream:
    """One call. gRPC's thread takes the requests, makes messages of them and sends them; a thread of its own reads the
    replies. So who asks only puts a request into a queue: messages of thousands of blocks take milliseconds to make and
    to send.

    Attributes:
        error: how it ended, once it has.
    """

    def __init__(self, method: Any):
        self._lock = threading.Lock()
        self._waiting: deque[StreamedLookup] = deque()
        self._unsent: SimpleQueue[Make | None] = SimpleQueue()
        self._ended = False
        self.error = StreamedError(grpc.StatusCode.UNAVAILABLE, "the server ended the stream of lookups")
        self._call = method(make() for make in iter(self._unsent.get, None))
        self._thread = threading.Thread(target=self._read, name="kvpool-lookups", daemon=True)
        self._thread.start()

    def send(self, make: Make, lookup: StreamedLookup) -> bool:
        """False if the stream has ended."""
        with self._lock:  # What is sent and what is waited for, in the same order.
            if self._ended:
                return False
            if self._unsent.qsize() >= MAX_UNSENT:
                lookup.settle(None, StreamedError(grpc.StatusCode.UNAVAILABLE, "the server takes no more lookups"))
                return True
            self._waiting.append(lookup)
            self._unsent.put(make)
            return True

    def close(self) -> None:
        self._call.cancel()
        if threading.current_thread() is not self._thread:
            # A thread that ends with the interpreter instead may hold gRPC's locks, for which the exit waits for ever.
            self._thread.join(CLOSE_S)

    def _read(self) -> None:
        try:
            for reply in self._call:
                self._settle_next(reply)
        except grpc.RpcError as error:
            self.error = StreamedError(error.code(), error.details() or "")  # type: ignore[attr-defined]
        except IndexError:  # Whatever answers what nobody asked is no kvpool-server.
            self._call.cancel()
        finally:
            with self._lock:
                self._ended = True
            self._unsent.put(None)  # gRPC's thread ends.
            waiting, self._waiting = self._waiting, deque()  # Nobody adds to what has ended.
            for lookup in waiting:
                lookup.settle(None, self.error)

    def _settle_next(self, reply: pb.LookupReply) -> None:
        with self._lock:
            lookup = self._waiting.popleft()
        if reply.HasField("found"):
            lookup.settle(reply.found, None)
        else:
            code = _CODES.get(reply.error.code, grpc.StatusCode.UNKNOWN)
            lookup.settle(None, StreamedError(code, reply.error.message))
