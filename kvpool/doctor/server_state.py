"""Checks of a server's own state: its event loop, and the ends of its certificates."""

from __future__ import annotations

from collections.abc import Iterator

from kvpool.protocol.text import duration_text, escaped
from kvpool.report.finding import Finding, error, ok, warning
from kvpool.v1 import pool_pb2 as pb

LATE_S = (0.01, 0.1)
"""Lag of the event loop, its 99th percentile: of a warning, and of an error."""
SLOW_LAG_S = 0.1
"""The longest lag of a minute that is no warning: every call waits for a pause of the loop."""
ENDS_SOON_S = (14 * 86_400.0, 2 * 86_400.0)
"""Before a certificate's end: of a warning, and of an error."""
_STEPS_MS = tuple(factor * 10.0**power for power in range(6) for factor in (1, 2, 5))
SERVER_CERTIFICATE = "certificate of the server"
_CHECKS = {"server": SERVER_CERTIFICATE, "client_ca": "certificate of the clients' authority"}
MAX_NAME_CHARS = 60


def server_state(stats: pb.StatsResponse) -> Iterator[Finding]:
    """What a snapshot says about the server; nothing if the server is too old to tell."""
    if not stats.HasField("server"):
        return
    for name in stats.server.refused_files:
        shown = escaped(name, MAX_NAME_CHARS)
        yield error(
            f"file of {shown}",
            f"the server cannot use the file of its {shown} as the file is now, and what it held before stays in "
            "force: a revocation may wait",
            "the server's log names the file, the line or mode, and why; mend it, which needs no restart",
        )
    yield _lag(stats.server.loop_lag_p99_seconds, stats.server.loop_lag_max_seconds)
    for name, ends_at in stats.server.certificate_ends.items():
        check = _CHECKS.get(name, f"certificate {escaped(name, MAX_NAME_CHARS)}")
        yield certificate_end(check, ends_at - stats.server.unix_seconds, "replace its file, which needs no restart")


def _lag(p99_s: float, longest_s: float) -> Finding:
    """Args: p99_s: 0 if it is not known."""
    if p99_s <= LATE_S[0] and longest_s <= SLOW_LAG_S:
        return ok("loop lag", f"the server's event loop was at most {longest_s * 1e3:.1f} ms late in the last minute")
    quantile = f", and up to {_step_ms(p99_s):,.0f} ms late at p99" if p99_s else ""
    return (error if p99_s > LATE_S[1] else warning)(
        "loop lag",
        f"in the last minute the server's event loop was up to {_step_ms(longest_s):,.0f} ms late at worst{quantile}",
        "give the server a core of its own; engines that compute on all cores take it away",
    )


def _step_ms(seconds: float) -> float:
    """The next of 1, 2, 5, 10, ... ms: the dashboard's text changes rarely, which screen readers read out each time."""
    return next(step for step in _STEPS_MS if step >= seconds * 1e3 or step == _STEPS_MS[-1])


def certificate_end(check: str, left_s: float, fix: str) -> Finding:
    """Whether a certificate ends soon.

    Args:
        left_s: seconds until its end; negative after it.
        fix: what to do if it does.
    """
    if left_s <= 0:
        return error(check, f"the certificate ended {duration_text(-left_s)} ago", fix)
    text = f"the certificate ends in {duration_text(left_s)}"
    if left_s > ENDS_SOON_S[0]:
        return ok(check, text)
    return (error if left_s <= ENDS_SOON_S[1] else warning)(check, text, fix)
