"""Lookups over one long-lived call, instead of setting up a call for each.

A stream opens with the first lookup and lives until the server or the client goes; the next lookup opens another. The
server answers in order, so that the oldest question is always the one that is answered.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from kvpool.v1 import pool_pb2 as pb

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
        if not self._settled.acquire(timeout=remaining if timeout is None else min(timeout, remaining)):
            if time.monotonic() < self._ends_at:
                raise grpc.FutureTimeoutError
            raise StreamedError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        self._settled.release()  # For others who ask.
        if self._error is not None:
            raise self._error
        assert self._reply is not None
        return self._reply

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Calls back once the server has answered, however late, or never will; from whichever thread that is."""
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
            callback(self)


class LookupStream:
    """One client's. Thread-safe.

    Args:
        open_call: takes an iterator of requests, returns the call, which iterates over replies.
    """

    def __init__(self, open_call: Callable[[Iterator[pb.LookupRequest]], Any]):
        self._open_call = open_call
        self._lock = threading.Lock()
        self._stream: _Stream | None = None

    def __call__(self, request: pb.LookupRequest, timeout: float) -> pb.LookupResponse:
        """One lookup, waited for. Raises as `StreamedLookup.result`."""
        return self.future(request, timeout).result()

    def future(self, request: pb.LookupRequest, timeout: float) -> StreamedLookup:
        """Sends a lookup; does not wait. Raises ValueError if the channel is closed."""
        lookup = StreamedLookup(timeout)
        with self._lock:
            if self._stream is None or not self._stream.send(request, lookup):
                self._stream = _Stream(self._open_call)
                self._stream.send(request, lookup)
        return lookup

    def close(self) -> None:
        """Ends the stream; lookups under way fail. The next lookup opens another. Idempotent."""
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


class _Stream:
    """One call, and the thread that reads its replies."""

    def __init__(self, open_call: Callable[[Iterator[pb.LookupRequest]], Any]):
        self._requests: queue.SimpleQueue[pb.LookupRequest | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: deque[StreamedLookup] = deque()
        self._ended = False
        self._call = open_call(iter(self._requests.get, None))
        threading.Thread(target=self._read, name="kvpool-lookups", daemon=True).start()

    def send(self, request: pb.LookupRequest, lookup: StreamedLookup) -> bool:
        """False if the stream has ended."""
        with self._lock:  # Both queues in the same order.
            if self._ended:
                return False
            self._waiting.append(lookup)
            self._requests.put(request)
            return True

    def close(self) -> None:
        self._call.cancel()

    def _read(self) -> None:
        error: grpc.RpcError = StreamedError(grpc.StatusCode.UNAVAILABLE, "the server ended the stream of lookups")
        try:
            for reply in self._call:
                with self._lock:
                    lookup = self._waiting.popleft()
                if reply.HasField("found"):
                    lookup.settle(reply.found, None)
                else:
                    code = _CODES.get(reply.error.code, grpc.StatusCode.UNKNOWN)
                    lookup.settle(None, StreamedError(code, reply.error.message))
        except grpc.RpcError as raised:
            error = raised
        with self._lock:
            self._ended = True
            waiting, self._waiting = self._waiting, deque()
        self._requests.put(None)  # gRPC's own thread waits there.
        for lookup in waiting:
            lookup.settle(None, error)
