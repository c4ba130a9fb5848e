"""Runs checks beside each other, each within a deadline: no check can hang the command or hide another one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvpool.protocol.errors import KVPoolError, PermissionDeniedError
from kvpool.report.finding import Finding, Level, error, warning

DEADLINE_S = 10.0
"""Of one check. A call of a client ends before."""
MAX_TEXT_CHARS = 1_000
_ABOUT_ROLES = "give an operator's certificate or token (--tls, --token-file) to check this, too"


@dataclass(frozen=True, slots=True)
class Check:
    """A check by name; `run` returns its findings, and may raise a KVPoolError, which becomes one."""

    name: str
    run: Callable[[], Sequence[Finding]]


def examine(checks: Iterable[Check], deadline_s: float = DEADLINE_S) -> list[Finding]:
    """Runs all checks at once; returns their findings in the order of the checks, after `deadline_s` at most."""
    running = [_Running(check) for check in checks]
    ends_at = time.monotonic() + deadline_s
    findings: list[Finding] = []
    for each in running:
        each.thread.join(max(0.0, ends_at - time.monotonic()))
        found = each.findings
        if found is None:
            text = f"the check did not end within {deadline_s:g} s"
            found = [warning(each.check.name, text, "run it again; look at the load of both hosts and the network")]
        findings += found
    return findings


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether something does not work."""
    return any(finding.level is Level.ERROR for finding in findings)


class _Running:
    """A check in a thread of its own, which is left behind if it hangs."""

    def __init__(self, check: Check):
        self.check = check
        self.findings: list[Finding] | None = None
        self.thread = threading.Thread(target=self._run, name=f"kvpool-doctor {check.name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            found = list(self.check.run())
        except PermissionDeniedError as refused:
            found = [warning(self.check.name, str(refused)[:MAX_TEXT_CHARS], _ABOUT_ROLES)]
        except KVPoolError as failed:
            found = [error(self.check.name, str(failed)[:MAX_TEXT_CHARS], "see the message")]
        except Exception as failed:
            text = f"the check failed: {failed!r}"[:MAX_TEXT_CHARS]
            found = [warning(self.check.name, text, "the other checks do not depend on it")]
        self.findings = found
