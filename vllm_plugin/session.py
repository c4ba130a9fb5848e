"""The connection of one process to its pool: opened in the background, lost without harm, found again by itself.

Nobody waits for it: `namespace` is None while the pool is away, and every path treats that as a miss.

States: down -> (background: open_namespace) -> up -> (an error that means it is gone, or three timeouts) -> down.
"""

from __future__ import annotations

import threading

from vllm.logger import init_logger

from kvpool.client import Client, Namespace
from kvpool.config import ClientConfig
from kvpool.errors import (
    KVPoolError,
    PoolTimeoutError,
    UnavailableError,
    UnknownNamespaceError,
)
from kvpool.namespace import NamespaceSpec

logger = init_logger("vllm.kvpool.session")

FIRST_RETRY_S = 0.25
LAST_RETRY_S = 5.0
OPEN_TIMEOUT_MS = 2_000
TIMEOUTS_TO_DOWN = 3
PING_EVERY_S = 2.0


class Session:
    """Thread-safe.

    Args:
        name: for logs and the thread's name: "scheduler" or "worker 0".
    """

    def __init__(self, config: ClientConfig, spec: NamespaceSpec, name: str):
        self.client = Client(config)
        self._spec = spec
        self._name = name
        self._namespace: Namespace | None = None
        self._timeouts = 0
        self._said = ""  # The same trouble is worth one line of log.
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self._wanted.set()
        self._thread = threading.Thread(target=self._keep_open, name=f"kvpool-session-{name}", daemon=True)
        self._thread.start()

    @property
    def namespace(self) -> Namespace | None:
        """The open namespace; None while the pool is away."""
        return self._namespace

    def report(self, error: KVPoolError | None) -> None:
        """Says how a call ended; decides whether the pool is still there."""
        with self._lock:
            if error is None:
                self._timeouts = 0
                return
            if isinstance(error, PoolTimeoutError):
                self._timeouts += 1
                if self._timeouts < TIMEOUTS_TO_DOWN:
                    return
            elif not isinstance(error, UnavailableError | UnknownNamespaceError):
                return
            if self._namespace is None:
                return
            self._namespace = None
            self._timeouts = 0
            self._said = str(error)
            self._wanted.set()
        # A dead server's memory is not given back while anybody maps it, and its successor may need it.
        self.client.detach()
        logger.warning("kvpool is away, computing without it, trying again in the background: %s", error)

    def close(self) -> None:
        """Ends the thread and the connection. Idempotent."""
        with self._lock:
            self._closed.set()
            self._wanted.set()
            self._namespace = None
        self.client.close()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=OPEN_TIMEOUT_MS / 1000 + 1)

    def _keep_open(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._closed.is_set():
            if not self._wanted.wait(PING_EVERY_S):
                self._ping()
                continue
            if self._closed.is_set():
                return
            try:
                self._open()
                retry_s = FIRST_RETRY_S
            except Exception as error:  # Whatever it is: a thread that dies here would leave the engine without a pool.
                if self._closed.is_set():
                    return
                if str(error) != self._said:
                    self._said = str(error)
                    logger.warning("kvpool is away, computing without it, trying again in the background: %s", error)
                self._closed.wait(retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)

    def _ping(self) -> None:
        """Notices a server that went away, or came back as another, before a request does."""
        namespace = self._namespace
        if namespace is None:
            return
        try:
            self.client.check(namespace)
        except KVPoolError as error:
            self.report(error)

    def _open(self) -> None:
        namespace = self.client.open_namespace(self._spec, timeout_ms=OPEN_TIMEOUT_MS)
        with self._lock:
            if self._closed.is_set():
                return
            self._namespace = namespace
            self._wanted.clear()
        self._said = ""
        logger.info(
            "%s: kvpool at %s, namespace %s, transport %s, %d bytes a block",
            self._name,
            self.client.config.endpoint,
            namespace.fingerprint.hex()[:12],
            namespace.transport.name,
            namespace.spec.groups[0].slot_bytes,
        )
