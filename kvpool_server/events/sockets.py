"""The two ZeroMQ sockets of a stream of KV events, and what they accept.

Whoever reaches the ports may connect, so what each peer can make the server hold is bounded: what it sends by
`MAX_RECEIVED_BYTES` a frame, what it does not receive by a number of messages of at most about 36 KiB. Not bounded is
what ZeroMQ itself keeps of subscriptions to different topics.
"""

from __future__ import annotations

import zmq
from zmq.auth.thread import ThreadAuthenticator

from kvpool.protocol.errors import ConfigError
from kvpool_server.events.gate import Gate

PUB_HWM = 2_048
"""Messages that wait for a subscriber; further ones are dropped for it, and it sees a gap."""
ROUTER_HWM = 64
"""Messages of a replay that wait for its client, and requests of a client that wait for the server."""
MAX_RECEIVED_BYTES = 1 << 10
"""Of one frame that a peer sends; a larger one ends its connection. Requests and topics are shorter."""
DEAF_MS = 30_000
"""A TCP connection on which nothing could be sent for so long is ended."""


class Sockets:
    """A PUB socket for events and a ROUTER socket for replays. Not thread-safe.

    Args:
        endpoint: where to bind the socket for events: tcp://HOST:PORT (port 0 takes a free one) or ipc://PATH.
        replay_endpoint: where to bind the ROUTER socket; empty for none.
        gate: admits subscribers to the tenant's stream; None: whoever connects is admitted.

    Attributes:
        endpoint, replay_endpoint: as bound.

    Raises ConfigError if an address cannot be listened on; nothing is left behind then.
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
            self.pub = self._bind(zmq.PUB, self.endpoint, "--kv-events")
            self.router = (
                self._bind(zmq.ROUTER, self.replay_endpoint, "--kv-events-replay") if self.replay_endpoint else None
            )
        except BaseException:
            self.close(linger_ms=0)
            raise
        self.endpoint = _bound(self.pub)
        self.replay_endpoint = _bound(self.router) if self.router is not None else ""

    def _bind(self, kind: int, endpoint: str, flag: str) -> zmq.Socket[bytes]:
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
        return socket


def _bound(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
