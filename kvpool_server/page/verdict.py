"""What is wrong with a server, in sentences: for the line on top of the dashboard."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from kvpool.doctor.finding import Level as Severity
from kvpool.doctor.finding import problems
from kvpool.doctor.pool_state import INCOMPLETE, pool_state
from kvpool.doctor.window import RECENT_S, Window
from kvpool.holdings import duration_text, escaped
from kvpool.quotas import size_text
from kvpool.types import PoolStats
from kvpool_server.history import History, Key
from kvpool_server.page.instruments import Instruments

WINDOW_S = RECENT_S
"""Faults that are counted show for so long."""
LATE_S = (0.01, 0.1)
"""Lag of the event loop, its 99th percentile: of a warning, and of a fault."""
LATE_WINDOW_S = 60.0
MIN_PROBES = 1_000
"""Probes of the loop before their quantile says something: those of 10 s."""
ENDS_SOON = (dt.timedelta(days=14), dt.timedelta(days=2))
"""Before a certificate's end: of a warning, and of a fault."""
FULL_QUOTA = 0.98
MAX_NAME_CHARS = 60

Level = Literal["ok", "warning", "fault"]
Grown = Callable[..., int]


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence or two: what is wrong, and what to do."""

    level: Level
    text: str


def findings(
    instruments: Instruments, values: Mapping[Key, float], history: History, now: dt.datetime
) -> list[Finding]:
    """What is wrong, faults first; empty if nothing is.

    Args:
        values: the sample of now.
    """

    def grown(*key: str) -> int:
        return int(history.grown(key, WINDOW_S, values.get(key, 0)))

    found = [
        *_of_state(instruments.state()),
        *_of_pool(instruments.stats(), grown),
        *_of_lag(values, history),
        *_of_ends(instruments.ends(), now),
        *_of_quotas(instruments, grown),
        *_of_engines(instruments),
    ]
    return sorted(found, key=lambda finding: finding.level != "fault")


def _of_state(state: str) -> Iterator[Finding]:
    if state != "ok":
        yield Finding("fault", f"The server is {state}: it takes no new calls, and engines compute meanwhile.")


def _of_pool(stats: PoolStats, grown: Grown) -> Iterator[Finding]:
    """What `kvpool stats` says, over ten minutes."""
    window = Window(lambda key: grown(*key), "in the last 10 minutes")
    for found in problems(pool_state(stats, window)):
        if found.check != INCOMPLETE:  # A page asks so often that it would find blocks between the puts of two ranks.
            text, fix = _sentence(f"{_short(found.check)}: {found.text}"), _sentence(found.fix)
            yield Finding("fault" if found.level is Severity.ERROR else "warning", f"{text} {fix}")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _of_lag(values: Mapping[Key, float], history: History) -> Iterator[Finding]:
    name = "loop_lag_seconds"
    buckets = {key[1]: history.grown(key, LATE_WINDOW_S, value) for key, value in values.items() if key[0] == name}
    total = buckets.get("+Inf", 0.0)
    late_s = min((float(bound) for bound, count in buckets.items() if count >= 0.99 * total), default=0.0)
    if total >= MIN_PROBES and late_s > LATE_S[0]:
        shown = "5 s and more" if late_s == float("inf") else f"up to {late_s * 1_000:,.0f} ms"
        yield Finding(
            "fault" if late_s > LATE_S[1] else "warning",
            f"The event loop was late in the last minute ({shown} at p99): requests wait. Look for other processes on "
            "the server's cores, or raise its share of CPU.",
        )


def _of_ends(ends: Mapping[str, dt.datetime], now: dt.datetime) -> Iterator[Finding]:
    for name, ends_at in ends.items():
        left = ends_at - now
        if left <= ENDS_SOON[0]:
            whose = "The server's certificate" if name == "server" else "The certificate of the clients' authority"
            when = f"ends in {duration_text(left.total_seconds())}" if left.total_seconds() > 0 else "has ended"
            level: Level = "fault" if left <= ENDS_SOON[1] else "warning"
            yield Finding(level, f"{whose} {when}: replace its file, which needs no restart.")


def _of_quotas(instruments: Instruments, grown: Grown) -> Iterator[Finding]:
    if not grown("quota_evicted_blocks"):
        return  # A quota that is full and lasts is no fault.
    for quota in instruments.quotas():
        if quota.limit_bytes and quota.used_bytes >= FULL_QUOTA * quota.limit_bytes:
            yield Finding(
                "warning",
                f"{_short(quota.subject)} has reached its quota of {size_text(quota.limit_bytes)}: its new blocks "
                "evict its own. Raise it if its hit ratio has fallen: `kvpool quota`.",
            )


def _of_engines(instruments: Instruments) -> Iterator[Finding]:
    away = [engine for engine in instruments.engines() if engine.breaker_open]
    if away:
        which = _short(away[0].engine) + (f" and {len(away) - 1} more" if len(away) > 1 else "")
        yield Finding(
            "warning",
            f"Engines do without the pool because their calls failed ({which}): their circuit breakers are open. They "
            "come back by themselves; if not, look at their logs and the network between.",
        )


def _short(name: str) -> str:
    return escaped(name, MAX_NAME_CHARS)
