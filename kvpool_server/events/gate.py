"""Admits subscribers to KV events by their CURVE keys.

ZeroMQ asks for each connection, before it takes a message from it, whether the client's key may connect to the
stream of a tenant (ZAP; pyzmq's authenticator answers on a thread). `ZAP_ENFORCE_DOMAIN` refuses connections while
nobody answers.

Source: ZAP, https://rfc.zeromq.org/spec/27/.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import structlog
import zmq
from zmq.auth.thread import ThreadAuthenticator

from kvpool.security.curve import read_pair, read_subscribers
from kvpool.security.principal import ALL_TENANTS
from kvpool.security.watched_files import WatchedFiles

log = structlog.get_logger()

LOG_EVERY_S = 10.0
"""A refused subscriber connects again and again: so often at most is a refusal logged."""


class Gate:
    """See the module. Thread-safe. Raises ConfigError for files that cannot be used.

    Args:
        key_file: the server's key pair.
        subscribers: the list of public keys and their tenants, read again when it changes.
        denied: a deny list, whose entries `tenant:NAME` refuse keys although they are listed; None: there is none.
    """

    def __init__(
        self,
        key_file: str,
        subscribers: str,
        denied: WatchedFiles[frozenset[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._pair = read_pair(Path(key_file))
        self._tenants = WatchedFiles([subscribers], lambda: read_subscribers(Path(subscribers)), clock)
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
