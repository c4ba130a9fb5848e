"""The two ZeroMQ sockets of a stream of KV events, what they accept, and whom.

Whoever reaches the ports may connect, so what each peer can make the server hold is bounded: what it sends by
`MAX_RECEIVED_BYTES` a frame, what it does not receive by a number of messages of at most about 36 KiB. Not bounded is
what ZeroMQ itself keeps of subscriptions to different topics.

Subscribers are admitted by their CURVE keys: ZeroMQ asks for each connection, before it takes a message from it,
whether the client's key may connect to the stream of a tenant (ZAP; pyzmq's authenticator answers on a thread).
`ZAP_ENFORCE_DOMAIN` refuses connections while nobody answers.

Source: ZAP, https://rfc.zeromq.org/spec/27/.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import structlog
import zmq
from zmq.auth.thread import ThreadAuthenticator

from kvpool.protocol.errors import ConfigError
from kvpool.security.curve import read_pair, read_subscribers
from kvpool.security.files import WatchedFiles
from kvpool.security.principal import ALL_TENANTS

log = structlog.get_logger()

PUB_HWM = 2_048
"""Messages that wait for a subscriber; further ones are dropped for it, and it sees a gap."""
ROUTER_HWM = 64
"""Messages of a replay that wait for its client, and requests of a client that wait for the server."""
MAX_RECEIVED_BYTES = 1 << 10
"""Of one frame that a peer sends; a larger one ends its connection. Requests and topics are shorter."""
DEAF_MS = 30_000
"""A TCP connection on which nothing could be sent for so long is ended."""
LOG_EVERY_S = 10.0
"""A refused subscriber connects again and again: so often at most is a refusal logged."""


class Gate:
    """Which keys may subscribe to whose stream. Thread-safe. Raises ConfigError for files that cannot be used.

    Args:
        key_file: the server's key pair.
        subscribers: the list of public keys and their tenants, read again when it changes.
        tenants: that list, where it is watched already; None: the gate watches it.
        denied: a deny list, whose entries `tenant:NAME` refuse keys although they are listed; None: there is none.
    """

    def __init__(
        self,
        key_file: str,
        subscribers: str,
        tenants: WatchedFiles[dict[bytes, str]] | None = None,
        denied: WatchedFiles[frozenset[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._pair = read_pair(Path(key_file))
        self._tenants = tenants or WatchedFiles([subscribers], lambda: read_subscribers(Path(subscribers)), clock)
        self._denied = denied
        self._clock = clock
        self._log_at = clock()

    def look(self) -> int:
        """Reads the lists again if they have changed, now and then; returns how often they have changed."""
        lists = [each for each in (self._tenants, self._denied) if each is not None]
        for each in lists:
            try:
                each.look()
            except Exception:  # It would end the authenticator's thread, which then admits nobody for ever.
                log.exception("reading a list of subscribers to KV events failed", paths=each.paths)
        return sum(each.version for each in lists)

    def admitted(self, tenant: str) -> frozenset[bytes]:
        """The keys that may subscribe to a tenant's stream: operators', and the tenant's unless it is denied."""
        is_denied = self._denied is not None and f"tenant:{tenant}" in self._denied.value
        may = {ALL_TENANTS} if is_denied else {ALL_TENANTS, tenant}
        return frozenset(key for key, whose in self._tenants.value.items() if whose in may)

    def protect(self, socket: zmq.Socket[bytes], tenant: str) -> None:
        """Has a socket speak CURVE alone, to admitted keys. Call it before `bind`."""
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.zap_domain = tenant.encode()
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._pair.public, self._pair.secret

    def start(self, context: zmq.Context[zmq.Socket[bytes]], tenant: str) -> ThreadAuthenticator:
        """Answers the questions of a context's sockets until `stop` is called."""
        authenticator = ThreadAuthenticator(context)
        authenticator.configure_curve_callback(tenant, self)
        authenticator.start()
        return authenticator

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a key may connect to the stream of the tenant `domain`; the authenticator's thread asks."""
        self.look()
        if key in self.admitted(domain):
            return True
        if self._clock() >= self._log_at:
            self._log_at = self._clock() + LOG_EVERY_S
            log.warning(
                "refused a subscriber to KV events: its key is not listed, or denied", key=key.decode(), tenant=domain
            )
        return False


class Sockets:
    """A PUB socket for events and a ROUTER socket for replays. Not thread-safe.

    Raises ConfigError if an address cannot be listened on; nothing is left behind then.

    Args:
        endpoint: where to bind the socket for events: tcp://HOST:PORT (port 0 takes a free one) or ipc://PATH.
        replay_endpoint: where to bind the ROUTER socket; empty for none.
        gate: admits subscribers to the tenant's stream; None: whoever connects is admitted.

    Attributes:
        endpoint, replay_endpoint: as bound.
    """

    pub: zmq.Socket[bytes]
    router: zmq.Socket[bytes] | None
    _authenticator: ThreadAuthenticator | None

    def __init__(self, endpoint: str, replay_endpoint: str, gate: Gate | None, tenant: str):
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self._gate = gate
        self._tenant = tenant
        self._open()

    def reopen(self) -> None:
        """Ends every connection, and listens on the same endpoints again. Call it again if it raises ConfigError."""
        self.close(linger_ms=0)
        self._open()

    def close(self, linger_ms: int) -> None:
        """Ends every connection, once what was sent has left or so much time has passed. Idempotent."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._context.destroy(linger=linger_ms)  # Returns when the addresses are free.

    def _open(self) -> None:
        self._context = zmq.Context()
        self._authenticator = None if self._gate is None else self._gate.start(self._context, self._tenant)
        try:
            self.pub, self.endpoint = self._bind(zmq.PUB, self.endpoint, "--kv-events")
            self.router = None
            if self.replay_endpoint:
                self.router, self.replay_endpoint = self._bind(zmq.ROUTER, self.replay_endpoint, "--kv-events-replay")
        except BaseException:
            self.close(linger_ms=0)
            raise

    def _bind(self, kind: int, endpoint: str, flag: str) -> tuple[zmq.Socket[bytes], str]:
        """A socket, and its endpoint as bound."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_RECEIVED_BYTES)
        socket.setsockopt(zmq.TCP_MAXRT, DEAF_MS)
        socket.setsockopt(zmq.RCVHWM, ROUTER_HWM)
        socket.setsockopt(zmq.SNDHWM, ROUTER_HWM if kind == zmq.ROUTER else PUB_HWM)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # A full or vanished client raises.
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        if self._gate is not None:
            self._gate.protect(socket, self._tenant)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot listen on {endpoint} for KV events: {error.strerror}; give {flag} another address"
            ) from None
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
