"""The gRPC channel to a server, and what its calls have in common: deadlines, a bound on calls at once, and errors.

The channel is plaintext where nobody else listens, TLS elsewhere, and renewed with its certificate.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partialmethod
from operator import methodcaller
from pathlib import Path
from typing import Any

import grpc

from kvpool.client.config import ClientConfig, is_loopback
from kvpool.client.tracing import ClientInterceptor, tracing_of
from kvpool.protocol import wire
from kvpool.protocol.errors import ConfigError, KVPoolError, PoolTimeoutError, UnavailableError
from kvpool.protocol.replies import CONTROL_LIMIT, METHOD_LIMITS
from kvpool.security.files import WatchedFiles
from kvpool.security.principal import Principal
from kvpool.security.tls import TlsIdentity, read_identity
from kvpool.security.tokens import read_token
from kvpool.transport.unix_socket import grpc_target, socket_path

MAX_AT_ONCE = 8
"""Calls at once, beside the stream of lookups and those of bytes. The server takes a bounded number on a connection and
counts each until some time after its end; it refuses what exceeds them."""
RETIRE_S = 600.0
"""How long calls of a renewed channel may go on: the longest deadline of a call."""

_RETRIES = {
    "maxAttempts": 5,
    "initialBackoff": "0.1s",  # Where the server does not say how long to wait.
    "maxBackoff": "0.1s",
    "backoffMultiplier": 1,
    "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
}
"""Of a call that a server refuses for now: see BusyError."""

_METHODS = [
    {"name": [{"service": wire.SERVICE_NAME, "method": name}], "maxResponseMessageBytes": most, "retryPolicy": _RETRIES}
    for name, most in {**METHOD_LIMITS, "": CONTROL_LIMIT}.items()  # Without a name: all other methods.
]
"""How large the replies of each method may be; gRPC refuses a larger one before it is read."""

_OPTIONS = [
    ("grpc.service_config", json.dumps({"methodConfig": _METHODS})),
    ("grpc.service_config_disable_resolution", 1),  # No name server may widen the limits.
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),  # The server bounds the calls of a connection: each client has its own.
]


def open_channel(config: ClientConfig) -> grpc.Channel | RenewedChannel:
    """The channel that the settings ask for; the server is reached with the first call.

    Raises ConfigError for files that cannot be used, and for plaintext to another host that nobody has allowed.
    """
    if (files := config.tls) is not None:
        identity = WatchedFiles(files.paths, lambda: read_identity(files))
        token = None
        if config.token_file:
            token = WatchedFiles([config.token_file], lambda: read_token(Path(config.token_file)))
        return RenewedChannel(identity, lambda: _traced(_secure(config, identity), config), token)
    if config.token_file:
        raise ConfigError(
            f"token_file {config.token_file} without tls: whoever is on the network could read the token; give tls "
            "with the authority of the server's certificate (ca), on the command line --tls DIR"
        )
    is_here = bool(socket_path(config.endpoint)) or is_loopback(config.endpoint.rpartition(":")[0])
    if not (config.insecure_network or is_here):
        raise ConfigError(
            f"endpoint {config.endpoint} is on another host, and there is no tls: whoever is on the network between "
            "could read and change what you compute; give tls (ca, cert, key), or allow it with insecure_network; on "
            "the command line --tls DIR or --insecure-network"
        )
    return _traced(grpc.insecure_channel(grpc_target(config.endpoint), options=_OPTIONS), config)


def _traced(channel: grpc.Channel, config: ClientConfig) -> grpc.Channel:
    """The same channel; with `otel`, one whose calls have spans."""
    tracing = tracing_of(config)
    return channel if tracing is None else grpc.intercept_channel(channel, ClientInterceptor(tracing))


def _secure(config: ClientConfig, identity: WatchedFiles[TlsIdentity]) -> grpc.Channel:
    files = identity.value
    credentials = grpc.ssl_channel_credentials(files.ca, files.key, files.cert)
    # A Unix socket has no host name for the server's certificate to prove; every certificate of ours names this one.
    name = config.server_name or ("localhost" if socket_path(config.endpoint) else "")
    authority = [("grpc.default_authority", name)] if name else []
    return grpc.secure_channel(grpc_target(config.endpoint), credentials, options=[*_OPTIONS, *authority])


CALL_ERRORS = (grpc.RpcError, grpc.FutureCancelledError, grpc.FutureTimeoutError, ValueError)
"""What gRPC raises for a call; a ValueError if the channel is closed."""


class RenewedChannel:
    """As much of a `grpc.Channel` as clients use. A new one takes its place when its certificate is replaced, because
    gRPC's cannot read files again.

    New calls go over the new channel. Those that run go on over the old one, which is closed `RETIRE_S` later.

    Args:
        identity: the certificate's files.
        make: makes a channel with the identity in force.
        token: sent with each call; None: nothing is.
    """

    def __init__(
        self, identity: WatchedFiles[TlsIdentity], make: Callable[[], grpc.Channel], token: WatchedFiles[str] | None
    ):
        self._identity = identity
        self._make = make
        self._token = token
        self._lock = threading.Lock()
        self._is_closed = False
        self._retired: deque[tuple[float, grpc.Channel]] = deque()
        self._version = identity.version
        self._current = make()

    @property
    def version(self) -> int:
        """How often the channel was renewed; looks whether it is time to."""
        self.current()
        return self._version

    def current(self) -> grpc.Channel:
        if self._identity.look() == self._version:
            return self._current
        with self._lock:
            if self._identity.version != self._version and not self._is_closed:
                now = time.monotonic()
                while self._retired and self._retired[0][0] <= now:
                    self._retired.popleft()[1].close()
                self._retired.append((now + RETIRE_S, self._current))
                self._current, self._version = self._make(), self._identity.version
            return self._current

    @property
    def principal(self) -> Principal | None:
        """Whom the certificate in force names; None: it names no principal, or there is only a token."""
        return self._identity.value.principal

    def metadata(self) -> dict[str, Any]:
        """What every call is made with."""
        if self._token is None:
            return {}
        self._token.look()
        return {"metadata": (("authorization", f"Bearer {self._token.value}"),)}

    def _bind(self, kind: str, *args: Any, **options: Any) -> Any:
        return _Method(self, methodcaller(kind, *args, **options))

    unary_unary = partialmethod(_bind, "unary_unary")
    unary_stream = partialmethod(_bind, "unary_stream")
    stream_unary = partialmethod(_bind, "stream_unary")
    stream_stream = partialmethod(_bind, "stream_stream")

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            while self._retired:
                self._retired.popleft()[1].close()
            self._current.close()


class _Method:
    """A method of the current channel, with the ways to call it that clients use."""

    def __init__(self, channel: RenewedChannel, bind: Callable[[grpc.Channel], Any]):
        self._channel = channel
        self._bind = bind
        self._bound: tuple[grpc.Channel, Any] | None = None

    def _method(self) -> Any:
        channel, bound = self._channel.current(), self._bound
        if bound is None or bound[0] is not channel:
            self._bound = bound = channel, self._bind(channel)
        return bound[1]

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._method()(*args, **options, **self._channel.metadata())

    def future(self, *args: Any, **options: Any) -> Any:
        return self._method().future(*args, **options, **self._channel.metadata())


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
            self._waiting.append(turn)
        turn.wait(timeout_s)
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

    def send(self, method: Any, request: Any) -> Any:
        """Starts a call; returns its `grpc.Future`. Waits only while there are `MAX_AT_ONCE` calls."""
        return self._send(method, request, self._take(None))

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

    def _send(self, method: Any, request: Any, timeout_ms: float | None) -> Any:
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
