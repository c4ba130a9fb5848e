"""What every call of a server is made of: its deadline, its place among those at once, and its errors."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from kvpool.client.channel import CALL_ERRORS
from kvpool.client.config import ClientConfig
from kvpool.protocol import wire
from kvpool.protocol.errors import KVPoolError, PoolTimeoutError, UnavailableError

MAX_AT_ONCE = 8
"""Calls at once, beside the stream of lookups and those of bytes. The server takes a bounded number on a connection and
counts each until some time after its end; it refuses what exceeds them."""


class _Places:
    """Places for calls, which go to those who have waited longest. (A semaphore's go to whoever comes first.)"""

    def __init__(self, count: int):
        self._free = count
        self._waiting: deque[threading.Event] = deque()
        self._lock = threading.Lock()

    def take(self, timeout_s: float) -> bool:
        """Waits for a place; False if there is none in time."""
        turn = threading.Event()
        with self._lock:
            if self._free:
                self._free -= 1
                return True
            if timeout_s <= 0:
                return False
            self._waiting.append(turn)
        if turn.wait(timeout_s):
            return True
        with self._lock:
            if not turn.is_set():
                self._waiting.remove(turn)
            return turn.is_set()

    def give_back(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._free += 1


class Calls:
    """Calls of one server. Thread-safe. Every method raises UnavailableError and PoolTimeoutError."""

    def __init__(self, config: ClientConfig):
        self.config = config
        self._places = _Places(MAX_AT_ONCE)

    def call(self, method: Callable[..., Any], request: Any, timeout_ms: int | None = None) -> Any:
        """Calls a method of the stub, and waits for its answer until `timeout_ms`, by default the config's."""
        left_ms = self._take(timeout_ms)
        try:
            return method(request, timeout=self.timeout_s(left_ms))
        except CALL_ERRORS as error:
            raise self.error_of(error) from None
        finally:
            self._places.give_back()

    def send(self, method: Any, request: Any, timeout_ms: int | None = None) -> Any:
        """Starts a call; returns its `grpc.Future`. Waits only while there are `MAX_AT_ONCE` calls."""
        return self._send(method, request, self._take(timeout_ms))

    def send_now(self, method: Any, request: Any, timeout_ms: float | None = None) -> Any:
        """As `send`; None, and no call, while there are `MAX_AT_ONCE`."""
        return self._send(method, request, timeout_ms) if self._places.take(0.0) else None

    def _take(self, timeout_ms: int | None) -> float:
        """Takes a place among `MAX_AT_ONCE`; returns the milliseconds that are left of it. Raises PoolTimeoutError."""
        ends_at = time.monotonic() + self.timeout_s(timeout_ms)
        if not self._places.take(self.timeout_s(timeout_ms)):
            raise PoolTimeoutError(
                f"{MAX_AT_ONCE} calls to kvpool-server at {self.config.endpoint} were under way for too long"
            )
        return 1000 * max(0.0, ends_at - time.monotonic())

    def _send(self, method: Any, request: Any, timeout_ms: float | None = None) -> Any:
        """As `send`, for which a place has been taken."""
        try:
            call = self.started(method, request, timeout_ms)
        except BaseException:
            self._places.give_back()
            raise
        # gRPC cancels a call that nothing refers to any more; the callback keeps the reference until the end.
        call.add_done_callback(lambda _: self._places.give_back())
        return call

    def started(self, method: Any, request: Any, timeout_ms: float | None = None) -> Any:
        """A call that is none of `MAX_AT_ONCE`."""
        try:
            return method.future(request, timeout=self.timeout_s(timeout_ms))
        except CALL_ERRORS as error:
            raise self.error_of(error) from None

    def result(self, call: Any) -> Any:
        """Waits for the answer of a call that was sent, until the call's own deadline."""
        try:
            return call.result(timeout=self.timeout_s())
        except CALL_ERRORS as error:
            raise self.error_of(error) from None

    def timeout_s(self, timeout_ms: float | None = None) -> float:
        return (timeout_ms if timeout_ms is not None else self.config.timeout_ms) / 1000

    def error_of(self, error: Exception) -> KVPoolError:
        """The kvpool error for one of `CALL_ERRORS`."""
        if isinstance(error, grpc.RpcError):
            return wire.error_of(error, self.config.endpoint)
        if isinstance(error, grpc.FutureTimeoutError):
            return PoolTimeoutError(f"kvpool-server at {self.config.endpoint} did not answer in time")
        return UnavailableError(f"the client of kvpool-server at {self.config.endpoint} is closed; make a new one")
