"""What is wrong with a server, in sentences: for the line on top of the dashboard."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from kvpool.doctor.finding import Level as Severity
from kvpool.doctor.finding import problems
from kvpool.doctor.judgements import judgements
from kvpool.doctor.pool_state import INCOMPLETE
from kvpool.doctor.window import RECENT_S, Window
from kvpool.holdings import escaped
from kvpool.server_stats import ServerStats
from kvpool.types import PoolStats
from kvpool.version import __version__
from kvpool_server.history import History, Key
from kvpool_server.page.instruments import Instruments

WINDOW_S = RECENT_S
"""Faults that are counted show for so long."""
MAX_NAME_CHARS = 60

Level = Literal["ok", "warning", "fault"]


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
    window = Window(lambda key: int(history.grown(key, WINDOW_S, values.get(key, 0))), "in the last 10 minutes")
    found = [*_of_state(instruments.state()), *_judged(_snapshot(instruments, now), window)]
    return sorted(found, key=lambda finding: finding.level != "fault")


def _of_state(state: str) -> Iterator[Finding]:
    if state != "ok":
        yield Finding("fault", f"The server is {state}: it takes no new calls, and engines compute meanwhile.")


def _snapshot(instruments: Instruments, now: dt.datetime) -> PoolStats:
    """What `Stats` would answer, as far as it is judged."""
    lag = instruments.loop_lag()
    server = ServerStats(
        version=__version__,
        unix_seconds=now.timestamp(),
        loop_lag_p50_seconds=lag.p50,
        loop_lag_p99_seconds=lag.p99,
        loop_lag_max_seconds=lag.longest,
        certificate_ends={name: ends_at.timestamp() for name, ends_at in instruments.ends().items()},
        refused_files=tuple(name for name, is_refused in instruments.refused_files().items() if is_refused),
    )
    return replace(
        instruments.stats(), server=server, engines=tuple(instruments.engines()), quotas=tuple(instruments.quotas())
    )


def _judged(stats: PoolStats, window: Window) -> Iterator[Finding]:
    """What `kvpool stats` says, over ten minutes."""
    for found in problems(judgements(stats, window)):
        if found.check != INCOMPLETE:  # A page asks so often that it would find blocks between the puts of two ranks.
            text, fix = _sentence(f"{escaped(found.check, MAX_NAME_CHARS)}: {found.text}"), _sentence(found.fix)
            yield Finding("fault" if found.level is Severity.ERROR else "warning", f"{text} {fix}")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
