"""The audit log: one JSON object a line for each refused call, each change, each new namespace, and each reading of
credentials.

Lines are queued and written by a thread, so that a slow disk delays no call. Refusals, which anybody can cause, share
`REFUSALS_A_SECOND`; the others are dropped and counted: a stranger must not fill the disk. No other line is dropped:
the server makes no change while the log is behind. logrotate may move the file at any time.
"""

from __future__ import annotations

import datetime as dt
import io
import json
import logging
import logging.handlers
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvpool.protocol.errors import ConfigError
from kvpool.security.principal import Principal
from kvpool_server.cache.shares import Shares

REFUSALS_A_SECOND = 100
"""Of a caller as many as are still left; those who have not proved who they are count as one."""
MAX_QUEUED = 1_000
READ = "ReadCredentials"
"""In the place of the call: the server has read files of credentials."""


class _OwnersFile(logging.handlers.WatchedFileHandler):
    """Makes the file for its owner alone, also after each rotation; one that exists keeps its mode."""

    def _open(self) -> io.TextIOWrapper:
        return open(self.baseFilename, "a", encoding="ascii", opener=partial(os.open, mode=0o600))


class AuditLog:
    """Appends to a file. Thread-safe. Raises ConfigError if it cannot be opened. `close` writes what is queued.

    Attributes:
        num_dropped: refusals that have no line because there were too many.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic):
        try:
            handler = _OwnersFile(path)
        except OSError as error:
            raise ConfigError(f"cannot write the audit log {path}: {error.strerror}; see --audit-log") from None
        handler.setFormatter(logging.Formatter("%(message)s"))
        self._queue: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        self._listener = logging.handlers.QueueListener(self._queue, handler)
        self._handler = handler
        self._clock = clock
        self._lock = threading.Lock()
        self._second = 0
        self._refusals = Shares()  # In this second.
        self.num_dropped = 0
        self._listener.start()

    def write(self, call: str, outcome: str, *, caller: Principal | None, peer: str, **details: str | int) -> None:
        """Adds a line.

        Args:
            outcome: the call's gRPC status.
            caller: None where callers are not authenticated, or have not proved who they are.
            peer: the address that the call came from.
            details: for example the namespace, and how many blocks. Other people choose some: JSON escapes them.
        """
        if outcome not in ("OK", "CANCELLED") and not self._has_room(str(caller or "stranger")):
            return
        line = {
            "time": dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
            "caller": None if caller is None else str(caller),
            "peer": peer,
            "call": call,
            "outcome": outcome,
            **details,
        }
        if self.num_dropped:
            line["dropped_before"] = self.num_dropped
        self._queue.put(logging.LogRecord("kvpool.audit", logging.INFO, "", 0, json.dumps(line), None, None))

    def read(self, what: str, paths: Sequence[str], error: ConfigError | None) -> None:
        """Adds a line about files of credentials that were read, with the error of those that cannot be used."""
        details = {"what": what, "files": ", ".join(paths), **({} if error is None else {"why": str(error)})}
        self.write(READ, "OK" if error is None else "REFUSED", caller=None, peer="", **details)

    @property
    def is_behind(self) -> bool:
        """Whether the disk has not taken what is queued for long: no change is to be made now."""
        return self._queue.qsize() >= MAX_QUEUED

    def _has_room(self, caller: str) -> bool:
        """Whether one more refusal may be written now; counts it, or that it is dropped."""
        with self._lock:
            second = int(self._clock())
            if second != self._second:
                self._second = second
                self._refusals = Shares()
            is_room = self._refusals.has_room(caller, 1, REFUSALS_A_SECOND) and self._queue.qsize() < MAX_QUEUED // 2
            if is_room:
                self._refusals.add(caller)
            else:
                self.num_dropped += 1
            return is_room

    def close(self) -> None:
        """Blocks until what is queued is written."""
        self._listener.stop()
        self._handler.close()


CHANGES = frozenset({"OpenNamespace", "Remove", "Clear", "Drain", "SetQuotas"})
"""Calls that change something for others."""


def audited(call: str, request: Any, reply: Any) -> dict[str, str | int] | None:
    """What the audit log says of a call that changes something; None: the call is not logged.

    Args:
        request, reply: the call's messages; None: the caller has hung up before the reply.
    """
    if call == "OpenNamespace" and reply is not None and reply.created:
        return {"namespace": reply.fingerprint.hex(), "model": request.spec.model, "tenant": request.spec.tenant}
    if call in ("Remove", "Clear"):
        count = {} if reply is None else {"count": reply.num_removed}
        return {"namespace": request.namespace.hex() or "all", **count}
    if call == "Drain":
        return {} if reply is None else {"remaining_ms": reply.remaining_ms}
    if call == "SetQuotas":
        return {"quotas": ", ".join(f"{quota.subject}={quota.limit_bytes}" for quota in request.quotas)}
    return None
