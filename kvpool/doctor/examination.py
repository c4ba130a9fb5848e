"""Runs checks beside each other, each within a deadline: no check can hang the command or hide another one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from kvpool.protocol.errors import KVPoolError, PermissionDeniedError
from kvpool.report.finding import Finding, error, warning

DEADLINE_S = 10.0
"""Of one check. A call of a client ends before."""
MAX_TEXT_CHARS = 1_000
Check = Callable[[], Iterable[Finding]]
"""A check returns its findings, and may raise a KVPoolError, which becomes one."""


def examine(checks: Mapping[str, Check], deadline_s: float = DEADLINE_S) -> list[Finding]:
    """Runs all checks at once, each in a thread of its own, which is left behind if the check hangs.

    Args:
        checks: by their names.

    Returns: the findings in the order of the checks, after `deadline_s` at most.
    """
    found: dict[str, list[Finding]] = {}

    def run(name: str, check: Check) -> None:
        found[name] = _findings(name, check)

    threads = {}
    for name, check in checks.items():
        threads[name] = threading.Thread(target=run, args=(name, check), name=f"kvpool-doctor {name}", daemon=True)
        threads[name].start()
    ends_at = time.monotonic() + deadline_s
    findings: list[Finding] = []
    for name, thread in threads.items():
        thread.join(max(0.0, ends_at - time.monotonic()))
        text = f"the check did not end within {deadline_s:g} s"
        late = warning(name, text, "run it again; look at the load of both hosts and the network")
        findings += found.get(name, [late])
    return findings


def _findings(name: str, check: Check) -> list[Finding]:
    try:
        return list(check())
    except PermissionDeniedError as refused:
        fix = "give an operator's certificate or token (--tls, --token-file) to check this, too"
        return [warning(name, str(refused)[:MAX_TEXT_CHARS], fix)]
    except KVPoolError as failed:
        return [error(name, str(failed)[:MAX_TEXT_CHARS], "see the message")]
    except Exception as failed:
        text = f"the check failed: {failed!r}"[:MAX_TEXT_CHARS]
        return [warning(name, text, "the other checks do not depend on it")]
