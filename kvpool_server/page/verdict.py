"""What is wrong with a server, in sentences: for the line on top of the dashboard."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from kvpool.holdings import duration_text, escaped
from kvpool.quotas import size_text
from kvpool.types import PoolStats, TierStats
from kvpool_server.history import History, Key
from kvpool_server.page.instruments import Instruments

WINDOW_S = 600.0
"""Faults that are counted show for so long."""
LATE_S = (0.01, 0.1)
"""Lag of the event loop, its 99th percentile: of a warning, and of a fault."""
LATE_WINDOW_S = 60.0
MIN_PROBES = 1_000
"""Probes of the loop before their quantile says something: those of 10 s."""
ENDS_SOON = (dt.timedelta(days=14), dt.timedelta(days=2))
"""Before a certificate's end: of a warning, and of a fault."""
FULL_QUOTA = 0.98
MIN_LOOKED_UP = 1_000
"""Blocks that lookups ask for before finding none of them is a warning."""
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
    stats = instruments.stats()

    def grown(*key: str) -> int:
        return int(history.grown(key, WINDOW_S, values.get(key, 0)))

    found = [
        *_of_state(instruments.state()),
        *_of_blocks(grown),
        *_of_space(grown),
        *_of_holds(grown),
        *_of_lag(values, history),
        *_of_ends(instruments.ends(), now),
        *_of_quotas(instruments, grown),
        *_of_engines(instruments),
        *_of_start(stats),
    ]
    for tier in stats.tiers:
        found += _of_tier(tier, grown)
    return sorted(found, key=lambda finding: finding.level != "fault")


def _of_state(state: str) -> Iterator[Finding]:
    if state != "ok":
        yield Finding("fault", f"The server is {state}: it takes no new calls, and engines compute meanwhile.")


def _of_blocks(grown: Grown) -> Iterator[Finding]:
    if corrupt := grown("corrupt_blocks"):
        yield Finding(
            "fault",
            f"{corrupt:,} blocks were dropped in the last 10 minutes because their bytes had changed. Check the memory "
            "of this host and of the engines' hosts (ECC errors in the kernel's log).",
        )
    looked_up = grown("lookup_blocks")
    if looked_up >= MIN_LOOKED_UP and not grown("lookup_hits"):
        yield Finding(
            "warning",
            f"Lookups asked for {looked_up:,} blocks in the last 10 minutes and found none. If prompts repeat, engines "
            "may use different namespaces: `kvpool namespaces --diff` shows the field.",
        )


def _of_space(grown: Grown) -> Iterator[Finding]:
    if refused := grown("out_of_space_puts"):
        yield Finding(
            "fault",
            f"{refused:,} puts were refused in the last 10 minutes because nothing in the arena could be evicted. "
            "Raise --memory, or look for readers that hold leases for long.",
        )
    if refused := grown("over_quota_puts"):
        yield Finding(
            "warning",
            f"{refused:,} puts were refused in the last 10 minutes because of a quota. Raise it: `kvpool quota`.",
        )


def _of_holds(grown: Grown) -> Iterator[Finding]:
    for name, what, whose in (("expired_leases", "leases", "reader"), ("expired_tickets", "put tickets", "writer")):
        if expired := grown(name):
            yield Finding(
                "warning",
                f"{expired:,} {what} reached their deadline in the last 10 minutes: a {whose} died or stalled. Look at "
                "the engines' logs.",
            )
    if refused := grown("refused_leases"):
        yield Finding(
            "warning",
            f"{refused:,} lookups got no lease in the last 10 minutes because too many leases were live: "
            "readers hold them for long, or --identity-limits gives an identity too few.",
        )


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


def _of_start(stats: PoolStats) -> Iterator[Finding]:
    if stats.prefaulted_bytes < stats.arena_bytes:
        share = stats.prefaulted_bytes / stats.arena_bytes
        yield Finding("warning", f"The arena is being backed with memory ({share:.0%}): stores are slower until it is.")


def _of_tier(tier: TierStats, grown: Grown) -> Iterator[Finding]:
    name = _short(tier.name)
    if not tier.up:
        yield Finding(
            "fault",
            f"Tier {name} is down: no blocks are written to it or promoted from it. Check its storage; the server "
            "tries again by itself.",
        )
    if corrupt := grown("tier", tier.name, "corrupt_blocks"):
        yield Finding(
            "fault",
            f"{corrupt:,} blocks of tier {name} were dropped in the last 10 minutes because their bytes had changed: "
            "without a power cut, a disk is failing.",
        )
    if dropped := grown("tier", tier.name, "dropped_demotions"):
        yield Finding(
            "warning",
            f"{dropped:,} blocks were not written to tier {name} in the last 10 minutes: engines store faster than it "
            "writes. Use faster storage, or write=back.",
        )


def _short(name: str) -> str:
    return escaped(name, MAX_NAME_CHARS)
