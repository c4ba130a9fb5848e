"""The connection of one process to its pool: opened in the background, and opened again whenever it is lost.

No caller waits for the connection: `namespace` is None while the pool is away, and every path treats that as a miss.
`Breaker` decides when the pool is away; `Session` makes the probes, in a thread of its own.

A probe opens the namespace, and then needs `PROBE_PINGS` pings answered, each within the timeout of a lookup: a slower
pool would answer no lookup in time. So a pool that has stopped answering costs a request one lookup timeout at most,
and after `FAILURES_TO_OPEN` such requests it costs nothing.
"""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from vllm.logger import init_logger

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.rpc import Namespace
from kvpool.client.transport_choice import KEPT_S
from kvpool.protocol import errors
from kvpool.protocol.errors import KVPoolError
from kvpool.protocol.namespace import Difference, NamespaceSpec, differences
from kvpool.protocol.text import opened_text
from kvpool.protocol.wire import decode_spec
from vllm_plugin.metrics import Recorder

logger = init_logger("vllm.kvpool.session")

FAILURES_TO_OPEN = 3
FIRST_WAIT_S = 0.25
MAX_RETRY_S = 5.0
MAX_FLAP_WAIT_S = 60.0
STABLE_S = 60.0
OPEN_TIMEOUT_MS = 2_000
PROBE_PINGS = 3
PING_EVERY_S = 2.0
EXPLAIN_EVERY_S = 10.0
"""The list of namespaces is fetched at most so often, however many engines come and go."""
MAX_EXPLAINED = 16
"""Differences that one session logs; an engine of a busy pool would fill its log otherwise."""
MAX_DIFFERENCES, MAX_WORDS = 8, 200
"""Differences that one line of the log says, and characters of each: another namespace may have thousands of fields."""
MAY_NOT_LIST = (
    "its certificate or token may not list namespaces, so it cannot say why blocks of other engines are not read; with "
    "the role tenant-operator, `kvpool doctor` and `kvpool namespaces --diff` can"
)
AWAY = "kvpool is away: the engine computes without the pool and retries in the background: %s"

_GONE = (errors.UnavailableError, errors.UnknownNamespaceError)
_USELESS = (
    errors.PoolTimeoutError, errors.ChecksumError, errors.LeaseExpiredError, errors.TransferError,
    errors.InvalidReplyError,
)  # fmt: skip


class State(enum.Enum):
    """Whether calls go through, and whether a probe is under way."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """A circuit breaker: decides when to stop calling the pool, and when to probe it again. It makes no calls itself.

    It begins open: a pool is used once it has answered a probe. Calls go through only while it is closed.

      closed -> open       the pool is unreachable or breaks the protocol, or `FAILURES_TO_OPEN` calls of one kind
                           failed in a row
      open -> half-open    the wait is over, and a probe is under way in the background
      half-open -> closed  the probe found a pool that answers in time
      half-open -> open    the probe failed: the wait doubles, up to `MAX_RETRY_S`

    After opening the breaker waits `FIRST_WAIT_S`. Where calls failed, the wait is twice as long each time that the
    breaker had not been closed for `STABLE_S` before, up to `MAX_FLAP_WAIT_S`: a pool that answers probes and fails
    calls is tried about once a minute, at the price of `FAILURES_TO_OPEN` calls. A pool that is unreachable costs no
    call, however often it restarts, and is probed every `MAX_RETRY_S`.

    Why no library: pybreaker 1.4 and purgatory 3.0 probe with a caller's own request and wait a fixed time; only the
    counter would be left of them. Not thread-safe: the session holds a lock. `clock` tells monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.state = State.OPEN
        self._failures: dict[str, int] = {}
        self._closed_at = -math.inf
        self._flap_wait_s = FIRST_WAIT_S
        self._retry_wait_s = 0.0
        self._probe_at = clock()

    def succeeded(self, call: str) -> None:
        """A call succeeded. A load proves lookup, transfer and checksum; any other call proves only itself."""
        if call == "load":
            self._failures.clear()
        else:
            self._failures.pop(call, None)

    def failed(self, call: str, error: KVPoolError) -> bool:
        """A call failed; True if that opens the breaker.

        Errors that say nothing about the next call (a full pool, a malformed request) do not count. A draining server's
        refusal of a lookup opens the breaker. Its refusal of a store does not: loads under leases of before still
        succeed. Failures are counted by kind of call, so that stores that succeed cannot hide loads that always fail.
        """
        if self.state is not State.CLOSED:
            return False  # A call that began before it opened.
        now, wait_s = self._clock(), FIRST_WAIT_S
        if isinstance(error, _USELESS):
            self._failures[call] = self._failures.get(call, 0) + 1
            # A server that breaks the protocol once has another release, or another mind.
            if self._failures[call] < FAILURES_TO_OPEN and not isinstance(error, errors.InvalidReplyError):
                return False
            if now - self._closed_at < STABLE_S:
                wait_s = min(2 * self._flap_wait_s, MAX_FLAP_WAIT_S)
            self._flap_wait_s = wait_s
        elif not isinstance(error, _GONE) or (isinstance(error, errors.DrainingError) and call != "lookup"):
            return False
        self._retry_wait_s = min(wait_s, MAX_RETRY_S)
        self.state = State.OPEN
        self._probe_at = now + wait_s
        return True

    def renew(self) -> None:
        """Calls go to another namespace from now on: the breaker begins anew, with a probe at once."""
        self.state = State.OPEN
        self._failures.clear()
        self._probe_at = self._clock()

    def wait_s(self) -> float | None:
        """Seconds until the next probe is due; None while the breaker is closed."""
        return None if self.state is State.CLOSED else max(0.0, self._probe_at - self._clock())

    def probe_began(self) -> None:
        assert self.state is State.OPEN, self.state
        self.state = State.HALF_OPEN

    def probe_ended(self, succeeded: bool) -> None:
        assert self.state is State.HALF_OPEN, self.state
        now = self._clock()
        if succeeded:
            self.state = State.CLOSED
            self._closed_at = now
            self._failures.clear()
        else:
            self.state = State.OPEN
            self._retry_wait_s = min(max(2 * self._retry_wait_s, FIRST_WAIT_S), MAX_RETRY_S)
            self._probe_at = now + self._retry_wait_s


class Session:
    """Keeps a namespace of the pool open: `namespace`, which is None while the breaker is not closed. Thread-safe.

    Args:
        config: `timeout_ms` is the budget of a lookup.
        spec: of the namespace; one that is not known yet is waited for in the session's thread.
        name: for logs and the thread's name: "scheduler" or "worker 0".
        explains: whether this session logs why nothing of other namespaces of the model is read.
    """

    def __init__(
        self,
        config: ClientConfig,
        spec: NamespaceSpec | Future[NamespaceSpec],
        name: str,
        recorder: Recorder | None = None,
        *,
        explains: bool = False,
    ):
        self.client = Client(config)
        self._spec = None if isinstance(spec, Future) else spec
        self._naming = spec if isinstance(spec, Future) else None
        self._name = name
        self._recorder = recorder or Recorder()
        self._breaker = Breaker()
        self._tell: Callable[[Namespace | None], None] = lambda opened: None  # Until `when_open` sets a listener.
        self._said = ""  # The last logged error: a repeated error is logged once.
        self._explains = explains
        self._explained: set[tuple[str, ...]] = set()  # Of each difference, its fields.
        self._num_opened = -1  # By this session, when the pool was last asked for its namespaces.
        self._explained_at = -math.inf
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self._want()
        self._thread = threading.Thread(target=self._keep_open, name=f"kvpool-session-{name}", daemon=True)
        self._thread.start()

    def when_open(self, tell: Callable[[Namespace | None], None]) -> None:
        """Calls `tell` each time that the namespace is opened, on the session's thread; at once if it is open now.

        Calls it with None, again and again, while the pool is away and its transport is closed: the memory of a dead
        server is free once the listener has let go of it, too.
        """
        with self._lock:
            self._tell = tell
            namespace = self.namespace
        if namespace is not None:
            tell(namespace)

    def report(self, error: KVPoolError | None, call: str = "") -> None:
        """Records how a "lookup", "load", "store" or "ping" ended. An error may open the breaker."""
        with self._lock:
            if error is None:
                self._breaker.succeeded(call)
                return
            if not self._breaker.failed(call, error):
                return
            self._said = str(error)
            self._recorder.add("breaker_openings")
            self._want()
        logger.warning(AWAY, error)

    def move(self, spec: NamespaceSpec) -> None:
        """Moves to another namespace, which is opened in the background."""
        with self._lock:
            self._spec = spec
            self._breaker.renew()
            self._want()

    def _want(self) -> None:
        """The breaker is open, and the session's thread is to open the namespace."""
        self.namespace: Namespace | None = None
        self._recorder.set("breaker_open", 1)
        self._wanted.set()

    def close(self) -> None:
        """Ends the thread and the connection. Idempotent."""
        with self._lock:
            self._closed.set()
            self._wanted.set()
            self.namespace = None
        self.client.close()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=OPEN_TIMEOUT_MS / 1000 + 1)

    def _keep_open(self) -> None:
        if self._naming is not None:
            if self._naming.exception() is not None:
                return  # The caller that could not name the namespace has said why.
            with self._lock:
                self._spec = self._spec or self._naming.result()  # It may have moved on meanwhile.
        while not self._closed.is_set():
            with self._recorder.guard.part("a session's turn") as turn:
                self._turn()
            if turn.failed:  # Without this thread the engine would stay without a pool.
                self._closed.wait(PING_EVERY_S)

    def _turn(self) -> None:
        with self._lock:
            wait_s = self._breaker.wait_s()
        if wait_s is None:
            if not self._wanted.wait(PING_EVERY_S):
                self._ping()
        elif wait_s == 0:
            self._probe()
        else:
            self.client.attachment.away()
            if self.client.attachment.choice is None:
                self._tell(None)
            self._closed.wait(min(wait_s, KEPT_S))  # The next turn calls `away` again, which then unmaps kept memory.

    def _ping(self) -> None:
        """Notices, before a request does, that the server is gone or has restarted."""
        namespace = self.namespace
        if namespace is None:
            return
        try:
            num_opened = self.client.rpc.check(namespace)
        except KVPoolError as error:
            self.report(error, "ping")
        else:
            self.report(None, "ping")
            self._explain(namespace, num_opened)
            self._leave_fallback(namespace)

    def _leave_fallback(self, namespace: Namespace) -> None:
        """Moves the namespace to a faster transport, if it fell back to gRPC and a faster one works by now."""
        transport = self.client.attachment.retry()
        if transport is None:
            return
        faster = replace(namespace, transport=transport)
        with self._lock:
            if self.namespace is not namespace:
                return  # Lost or moved meanwhile: the next probe opens it over the faster transport.
            self._recorder.add(f"connected_{transport.name}")
            self.namespace = faster
            tell = self._tell
        tell(faster)
        self._log_transport(faster)

    def _probe(self) -> None:
        with self._lock:
            self._breaker.probe_began()
            spec = self._spec
        assert spec is not None, "a session probes after its namespace is known"
        try:
            namespace = self.client.open_namespace(spec, timeout_ms=OPEN_TIMEOUT_MS)
            num_opened = max(self.client.rpc.check(namespace) for _ in range(PROBE_PINGS))
        except Exception as error:  # Of any kind: without this thread the engine would stay without a pool.
            with self._lock:
                if spec is self._spec:
                    self._breaker.probe_ended(False)
            if str(error) != self._said and not self._closed.is_set():
                self._said = str(error)
                logger.warning(AWAY, error)
            return
        with self._lock:
            if self._closed.is_set() or spec is not self._spec:
                return  # Moved on meanwhile: another probe is due.
            self._breaker.probe_ended(True)
            self._recorder.set("breaker_open", 0)
            self._recorder.add(f"connected_{namespace.transport.name}")
            self.namespace = namespace
            self._wanted.clear()
            tell = self._tell
        tell(namespace)
        self._said = ""
        self._log_transport(namespace)
        self._explain(namespace, num_opened)

    def _log_transport(self, namespace: Namespace) -> None:
        choice = self.client.attachment.choice
        say = logger.warning if choice is not None and choice.is_fallback else logger.info
        say(
            "%s: kvpool at %s, namespace %s, transport %s, %d bytes a block of all groups",
            self._name,
            self.client.config.endpoint,
            namespace.fingerprint.hex()[:12],
            namespace.transport.name if choice is None else choice.route,
            sum(group.slot_bytes for group in namespace.spec.groups),
        )

    def _explain(self, namespace: Namespace, num_opened: int) -> None:
        """Logs why another engine's blocks of the same model cannot be read, where the pool has such a namespace.

        The engine that was there first logs it too: each ping tells how many namespaces the pool has opened so far.
        """
        now, spec = time.monotonic(), namespace.spec
        if not self._explains or num_opened == self._num_opened or now - self._explained_at < EXPLAIN_EVERY_S:
            return
        try:
            # A call that is refused is a line in the audit log.
            if "ListNamespaces" not in self.client.admin.whoami().methods:
                self._explains = False
                logger.info("%s: %s", self._name, MAY_NOT_LIST)
                return
            infos = self.client.admin.namespaces(holdings=False)
        except KVPoolError:
            return
        self._num_opened, self._explained_at = num_opened, now
        akin = [
            (differences(spec.listed(), decode_spec(info.spec)), info)
            for info in infos
            if info.spec.model == spec.model
            and info.spec.pipeline_stage == spec.pipeline_stage
            and info.fingerprint != namespace.fingerprint
        ]
        # The newest of the closest: the one that has come since.
        found, other = min(reversed(akin), key=lambda pair: len(pair[0]), default=([], None))
        fields = tuple(difference.field for difference in found)
        if other is None or fields in self._explained or len(self._explained) >= MAX_EXPLAINED:
            return
        self._explained.add(fields)
        has_hits = any(info.lookup_hits for info in infos if info.fingerprint == namespace.fingerprint)
        logger.log(
            logging.INFO if has_hits else logging.WARNING,
            "%s: kvpool has another namespace of %s, of which nothing can be read in %s, because %s",
            self._name,
            spec.model,
            namespace.fingerprint.hex()[:12],
            _in_words(found, f"{other.fingerprint.hex()[:12]} ({opened_text(other.opened_by, other.age_seconds)})"),
        )


def _in_words(found: Sequence[Difference], there: str) -> str:
    """The differences as text; without the values of private fields (tenant, salt) and of long ones (layer formats)."""
    said = []
    for difference in found[:MAX_DIFFERENCES]:
        values = f"{difference.ours!r} here, {difference.theirs!r} in"
        is_said = not difference.is_private and len(values) <= MAX_WORDS
        said.append(f"{difference.field}: {values} {there}" if is_said else f"{difference.field} differs in {there}")
        there = "it"
    return "; ".join(said)
