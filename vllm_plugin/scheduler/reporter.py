"""Tells the server what became of the engine's prompt tokens: every `EVERY_S`, and once when the engine ends.

A thread of its own sends the reports, one call at a time. Nothing waits for it, but for the engine's end, which waits
for `LAST_S` at most. A server of an older release takes no reports: the engine sends none until the server restarts.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Mapping

import vllm
from vllm.logger import init_logger

from kvpool.protocol.errors import InvalidRequestError, KVPoolError, PermissionDeniedError
from kvpool.protocol.reports import MAX_STAGES, REPORTER_BYTES, ReportRequest
from kvpool.version import __version__
from vllm_plugin.metrics import CAUSE_PREFIX, Recorder
from vllm_plugin.scheduler.stages import Stages

logger = init_logger("vllm.kvpool.reporter")

EVERY_S = 10.0
FIRST_EVERY_S = 1.0
"""Until the first report is acknowledged: operators see the engine soon."""
TIMEOUT_MS = 2_000
LAST_S = 1.0


class ReportLog:
    """Divides an engine's sums into reports. Not thread-safe.

    Invariant: the acknowledged reports, each counted once, add up to the sums when the newest of them was made. A
    report is sent again as it was until it is acknowledged, whatever has been counted since.

    Attributes:
        sequence: number of the newest report, from 1.
        is_under_way: that report was not acknowledged.
    """

    def __init__(self) -> None:
        self.sequence = 0
        self.is_under_way = False
        self._acknowledged: dict[str, float] = {}
        self._sent: dict[str, float] = {}

    def next(self, totals: Mapping[str, float]) -> dict[str, float]:
        """What the report to send says was counted, without zeros: the one that is under way, or a new one.

        Args:
            totals: sums since the start, by name; none ever goes back.
        """
        if not self.is_under_way:
            self.sequence, self.is_under_way, self._sent = self.sequence + 1, True, dict(totals)
        before = self._acknowledged
        return {name: total - before.get(name, 0) for name, total in self._sent.items() if total != before.get(name)}

    def acknowledged(self) -> None:
        """The server has counted the report that is under way, or will never take it."""
        self.is_under_way, self._acknowledged = False, self._sent


def computed_tokens(counts: Mapping[str, float]) -> dict[str, int]:
    """Computed tokens by cause."""
    return {
        name.removeprefix(CAUSE_PREFIX): int(count) for name, count in counts.items() if name.startswith(CAUSE_PREFIX)
    }


class Reporter:
    """Sends the reports of an engine on a thread of its own. Thread-safe.

    Args:
        num_devices: that compute each step.
    """

    def __init__(self, stages: Stages, recorder: Recorder, num_devices: int):
        self._num_devices = num_devices
        self._stages = stages
        self._recorder = recorder
        self._id = secrets.token_bytes(REPORTER_BYTES)
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._log = ReportLog()
        self._namespaces: tuple[bytes, ...] = ()
        self._refused_by = 0  # Boot token of a server that takes no reports.
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-report", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends the last report, and ends the thread. Idempotent."""
        self._ends.set()
        self._thread.join(timeout=LAST_S)

    def _run(self) -> None:
        wait_s = FIRST_EVERY_S
        while not self._ends.wait(wait_s):
            with self._recorder.guard.part("a report to the pool"):
                if self._send(TIMEOUT_MS):
                    wait_s = EVERY_S
        timeout_ms = int(LAST_S * 500)
        with self._recorder.guard.part("the last report to the pool"):
            if not self._log.is_under_way or self._send(timeout_ms):
                self._send(timeout_ms, is_last=True)

    def _send(self, timeout_ms: int, is_last: bool = False) -> bool:
        """Sends the next report; False if it was not acknowledged."""
        boot_token = self._stages.boot_token
        if boot_token and boot_token == self._refused_by:
            return False
        if not self._find_namespaces():
            return False
        client = self._stages.sessions[0].client
        try:
            is_taken = client.rpc.report(self._report(is_last), timeout_ms)
        except InvalidRequestError as error:
            logger.warning("kvpool: the server has refused a report, whose figures are lost: %s", error)
            self._log.acknowledged()
            return False
        except PermissionDeniedError:
            is_taken = False
        except KVPoolError as error:
            logger.debug("kvpool: a report did not reach the server, and is sent again: %s", error)
            return False
        if is_taken:
            self._log.acknowledged()
        else:
            self._refused_by = boot_token
        return is_taken

    def _find_namespaces(self) -> bool:
        """Notes the namespaces that are open now; False if none has been open yet."""
        opened = [session.namespace for session in self._stages.sessions]
        if opened and all(opened):
            self._namespaces = tuple(each.fingerprint for each in opened if each is not None)[:MAX_STAGES]
        return bool(self._namespaces)

    def _report(self, is_last: bool) -> ReportRequest:
        counts = self._log.next(self._recorder.totals())
        return ReportRequest(
            reporter=self._id,
            sequence=self._log.sequence,
            engine=self._name,
            version=__version__,
            vllm_version=vllm.__version__,
            transport=self._stages.transport,
            breaker_open=not self._stages.are_open,
            namespaces=self._namespaces,
            computed_tokens=computed_tokens(counts),
            loaded_tokens=int(counts.get("loaded_tokens", 0)),
            load_seconds=counts.get("load_seconds", 0.0),
            saved_seconds=counts.get("saved_seconds", 0.0),
            lost_seconds=counts.get("lost_seconds", 0.0),
            num_requests=int(counts.get("num_requests", 0)),
            last=is_last,
            num_devices=self._num_devices,
        )
