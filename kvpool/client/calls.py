"""What every call of a server is made of: its deadline, its place among those at once, and its errors."""

from __future__ import annotations

import datetime as dt
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from kvpool.client.channel import CALL_ERRORS
from kvpool.client.config import ClientConfig, split_address
from kvpool.protocol import wire
from kvpool.protocol.errors import ConfigError, KVPoolError, PoolTimeoutError, UnavailableError
from kvpool.security.certificates import extension_of
from kvpool.security.file_permissions import read_pem
from kvpool.security.tls import TlsFiles
from kvpool.transport.unix_socket import socket_path

MAX_AT_ONCE = 8
"""Calls at once, beside the stream of lookups and those of bytes. The server takes a bounded number on a connection and
counts each until some time after its end; it refuses what exceeds them."""

_VERIFY_FAILED = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([a-zA-Z -]+)")
_NEW_ONE = "make a new one with `kvpool certs issue`"


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
            is_away = error.code() is grpc.StatusCode.UNAVAILABLE
            if is_away and (why := _refusal(error.details() or "", self.config)):
                return UnavailableError(why)
            return wire.error_of(error, self.config.endpoint)
        if isinstance(error, grpc.FutureTimeoutError):
            return PoolTimeoutError(f"kvpool-server at {self.config.endpoint} did not answer in time")
        return UnavailableError(f"the client of kvpool-server at {self.config.endpoint} is closed; make a new one")


def _refusal(details: str, config: ClientConfig) -> str:
    """Why a connection was refused although something listens, from what both sides tell of a failed TLS handshake.

    A server that refuses a client's certificate says nothing, so the client looks for faults in the certificate itself.

    Returns: a sentence with the fault and the fix; empty if `details` of an UNAVAILABLE call tell of no such refusal.
    """
    where, tls = f"kvpool-server at {config.endpoint}", config.tls
    if "WRONG_VERSION_NUMBER" in details:
        return (
            f"what listens at {config.endpoint} does not speak TLS; give the port of --listen, start kvpool-server "
            "with --tls-cert, or leave out tls (--tls)"
        )
    if "missing selected ALPN property" in details:
        return f"what listens at {config.endpoint} speaks TLS, but not gRPC; give the port of --listen"
    if "Hostname Verification Check failed" in details:
        if socket_path(config.endpoint) and not config.server_name:
            return (
                f"the certificate of {where} does not name 'localhost', which it needs on a Unix socket; make one with "
                "`kvpool certs issue DIR --host localhost`"
            )
        host = config.server_name or split_address(config.endpoint)[0]
        given = "server_name" if config.server_name else "endpoint"
        return (
            f"the certificate of {where} does not name {host!r}; give a name that it has as {given}, or make one with "
            f"`kvpool certs issue DIR --host {host}`"
        )
    if tls is not None and (failed := _VERIFY_FAILED.search(details)) is not None:
        if "expired" in failed[1] or "not yet valid" in failed[1]:
            return f"the certificate of {where} is not valid now ({failed[1]}); {_NEW_ONE}, and check the clocks"
        return (
            f"the certificate of {where} is not signed by an authority in {tls.ca} ({failed[1]}); give the ca.crt of "
            "the server's authority"
        )
    if "failed to connect" not in details or "Socket closed" not in details:
        return ""
    if tls is None:
        return (
            f"{where} closed the connection at once; it may speak TLS: give tls (--tls DIR), or check that the port is "
            "that of --listen"
        )
    if not tls.cert:
        return (
            f"{where} closed the connection at once; it may ask for a certificate: give one (cert and key in tls, or a "
            "--tls DIR that has tls.crt and tls.key)"
        )
    return f"{where} refused the connection: {_fault(tls)}"


def _fault(tls: TlsFiles) -> str:
    """What a server may have against the client's certificate."""
    unknown = (
        f"it may not accept the authority that signed {tls.cert}; give a certificate of an authority in the server's "
        "--tls-client-ca"
    )
    try:
        certificate = x509.load_pem_x509_certificates(read_pem(Path(tls.cert)))[0]
    except (ConfigError, ValueError):  # It is being replaced.
        return unknown
    now = dt.datetime.now(dt.UTC)
    if (ended := certificate.not_valid_after_utc) < now:
        return f"{tls.cert} ended on {ended:%Y-%m-%d %H:%M} UTC; {_NEW_ONE}"
    if (begins := certificate.not_valid_before_utc) > now:
        return f"{tls.cert} is not valid before {begins:%Y-%m-%d %H:%M} UTC; check the clock of this host"
    uses = extension_of(certificate, x509.ExtendedKeyUsage)
    if uses is not None and ExtendedKeyUsageOID.CLIENT_AUTH not in uses:
        return f"{tls.cert} is a server's certificate; give a client's, such as that of `kvpool certs` in operator"
    return unknown
