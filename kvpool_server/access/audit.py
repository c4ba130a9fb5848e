"""The audit log: one JSON object a line for each refused call, each change, each new namespace, and each reading of
credentials.

Lines are queued and written by a thread, so that a slow disk delays no call. Refusals, which anybody can cause, share
`REFUSALS_A_SECOND`; the others are dropped and counted: a stranger must not fill the disk. No other line is dropped: a
line that the file does not take is written again, and meanwhile nothing is changed. logrotate may move the file.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from kvpool.protocol.errors import ConfigError
from kvpool.security.principal import Principal
from kvpool_server.sharing import Shares

log = structlog.get_logger()

REFUSALS_A_SECOND = 100
"""Of a caller as many as are still left; those who have not proved who they are count as one."""
MAX_QUEUED = 1_000
"""Lines that wait for the file, of a caller as many as are still left."""
STRANGER = "stranger"
RETRY_S, CLOSE_S = 0.5, 5.0
READ = "ReadCredentials"
"""In the place of the call: the server has read files of credentials."""


class AuditLog:
    """Appends to a file. Thread-safe. Raises ConfigError if it cannot be opened. `close` writes what is queued.

    The file is made for its owner alone; one that exists keeps its mode.

    Attributes:
        num_dropped: refusals that have no line because there were too many.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic):
        self._path = path
        try:
            self._fd = self._opened()
        except OSError as error:
            raise ConfigError(f"cannot write the audit log {path}: {error.strerror}; see --audit-log") from None
        self._clock = clock
        self._lock = threading.Lock()
        self._second = 0
        self._refusals = Shares()  # In this second.
        self._queue: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        self._queued = Shares()
        self._is_failing = False
        self._closing = threading.Event()
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._write_queued, name="kvpool-audit", daemon=True)
        self._thread.start()

    def write(
        self,
        call: str,
        outcome: str,
        *,
        caller: Principal | None,
        peer: str,
        is_change: bool = False,
        **details: str | int,
    ) -> None:
        """Adds a line; one of a refusal only if there is room for it.

        Args:
            caller: None where callers are not authenticated, or have not proved who they are.
            is_change: the call may have changed something, whatever its outcome.
            details: for example the namespace, and how many blocks. Other people choose some: JSON escapes them.
        """
        owner = str(caller or STRANGER)
        with self._lock:  # First: a flood of refusals is not to cost more than that.
            if not is_change and not self._has_room(owner):
                self.num_dropped += 1
                return
            num_dropped = self.num_dropped
            self._queued.add(owner)
        line = {
            "time": dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
            "caller": None if caller is None else str(caller),
            "peer": peer,
            "call": call,
            "outcome": outcome,
            **details,
            **({"dropped_before": num_dropped} if num_dropped else {}),
        }
        self._queue.put((owner, json.dumps(line).encode() + b"\n"))

    def read(self, what: str, paths: Sequence[str], error: ConfigError | None) -> None:
        """Adds a line about files of credentials that were read, with the error of those that cannot be used."""
        details = {"what": what, "files": ", ".join(paths), **({} if error is None else {"why": str(error)})}
        self.write(READ, "OK" if error is None else "REFUSED", caller=None, peer="", is_change=True, **details)

    def is_behind(self, caller: str) -> bool:
        """Whether the file takes no lines now, or has taken too few of a caller's: no change of it is to be made."""
        with self._lock:
            return self._is_failing or not self._queued.has_room(caller or STRANGER, 1, MAX_QUEUED)

    def _has_room(self, caller: str) -> bool:
        """Whether one more refusal may be written now, which counts then."""
        if (second := int(self._clock())) != self._second:
            self._second, self._refusals = second, Shares()
        if not self._refusals.has_room(caller, 1, REFUSALS_A_SECOND) or self._queued.total >= MAX_QUEUED // 2:
            return False
        self._refusals.add(caller)
        return True

    def _write_queued(self) -> None:
        while (item := self._queue.get()) is not None:
            caller, data = item
            while data and not (self._is_failing and self._closing.is_set()):
                data = self._write(data)
            with self._lock:
                self._queued.add(caller, -1)
        os.close(self._fd)

    def _opened(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _write(self, data: bytes) -> bytes:
        """What is still to be written, after a while if the file takes nothing."""
        try:
            with contextlib.suppress(OSError):  # A file that was moved away gets no more, if there can be another.
                if self._is_moved():
                    fd = self._opened()
                    os.close(self._fd)
                    self._fd = fd
            data = data[os.write(self._fd, data) :]
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                failure = "the audit log cannot be written; nothing is changed until it can"
                log.error(failure, path=self._path, error=str(error))
            self._is_failing = True
            self._closing.wait(RETRY_S)
        return data

    def _is_moved(self) -> bool:
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return True

    def close(self) -> None:
        """Blocks until what is queued is written, `CLOSE_S` at most; lines that the file does not take are lost."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join(CLOSE_S)


CHANGES = frozenset({"Remove", "Clear", "Drain", "SetQuotas"})
"""Calls that change something for others, and are not made while the log is behind."""


def audited(call: str, request: Any, reply: Any) -> dict[str, str | int] | None:
    """What the audit log says of a call that changes something; None: the call is not logged.

    Args:
        request, reply: the call's messages; None: the call has failed, or its caller has hung up.
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
