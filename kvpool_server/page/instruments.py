"""What the dashboard reads: the server's numbers, from wherever they are counted."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvpool.reports import EngineState
from kvpool.server_stats import UsageStats
from kvpool.types import PoolStats, Quota
from kvpool_server.cache.steps import Steps
from kvpool_server.history import Key
from kvpool_server.log_events import LogEvents
from kvpool_server.loop_lag import Lag
from kvpool_server.pairs import Pair
from kvpool_server.reports.totals import Totals


@dataclass(frozen=True, slots=True)
class Instruments:
    """All are called on the server's loop, and each takes well below a millisecond.

    Args:
        state: "ok", or why the server does not serve.
        stats: of the pool and its tiers.
        lookup_seconds, loop_lag_seconds: buckets: by upper bound, how many observations were not above it.
        loop_lag: of the last minute.
        moved_bytes: payload that passed through the server, by transport and direction.
        usage: by model and tenant.
        reported: what engines report, by model and tenant.
        engines: those that report.
        quotas: with their use.
        ends: of the server's certificates.
        refused_files: whether watched files cannot be used as they are now.
        events: of the log.
        uptime_s: since the server's start.
    """

    state: Callable[[], str]
    stats: Callable[[], PoolStats]
    lookup_seconds: Callable[[], Mapping[str, float]]
    loop_lag_seconds: Callable[[], Mapping[str, float]]
    loop_lag: Callable[[], Lag]
    moved_bytes: Callable[[], Mapping[tuple[str, str], int]]
    usage: Callable[[], Sequence[UsageStats]]
    reported: Callable[[], Mapping[Pair, Totals]]
    engines: Callable[[], Sequence[EngineState]]
    quotas: Callable[[], Sequence[Quota]]
    ends: Callable[[], Mapping[str, dt.datetime]]
    refused_files: Callable[[], Mapping[str, bool]]
    events: LogEvents
    uptime_s: Callable[[], float]


GAUGES = ("arena_bytes", "free_bytes", "num_entries", "num_incomplete", "num_quarantined", "num_leases", "num_tickets")
COUNTERS = (
    "lookups", "lookup_blocks", "lookup_hits", "put_completed_blocks", "evicted_blocks", "quota_evicted_blocks",
    "removed_blocks", "corrupt_blocks", "out_of_space_puts", "over_quota_puts", "expired_leases", "refused_leases",
    "expired_tickets", "dropped_kv_event_batches",
)  # fmt: skip
TIER_COUNTERS = (
    "promoted_blocks", "missed_promotions", "demoted_blocks", "dropped_demotions", "refused_blocks", "corrupt_blocks",
    "read_bytes", "written_bytes",
)  # fmt: skip
OF_OWNERS = ("lookup_tokens", "hit_tokens", "stored_bytes", "loaded_bytes", "held_bytes")
MAX_OWNERS = 8
"""Models and tenants whose numbers a history keeps apart; it always keeps the sums over all of them."""
OF_REPORTS = ("saved_seconds", "lost_seconds", "loaded_tokens", "num_requests")


def sample(instruments: Instruments) -> Steps[dict[Key, float]]:
    """The numbers that a history keeps, in steps. The series that a history must not lack come first."""
    stats = instruments.stats()
    values: dict[Key, float] = {(name.removeprefix("num_"),): getattr(stats, name) for name in GAUGES}
    values |= {(name,): stats.counters.get(name, 0) for name in COUNTERS}
    yield
    for name, buckets in (
        ("lookup_seconds", instruments.lookup_seconds()),
        ("loop_lag_seconds", instruments.loop_lag_seconds()),
    ):
        values |= {(name, bound): count for bound, count in buckets.items()}
    values |= {("moved_bytes", *way): nbytes for way, nbytes in instruments.moved_bytes().items()}
    yield
    usage = instruments.usage()
    for name in OF_OWNERS:
        values[(name,)] = sum(getattr(owner, name) for owner in usage)
    reported = instruments.reported()
    for name in OF_REPORTS:
        values[(name,)] = sum(getattr(each, name) for each in reported.values())
    for each in reported.values():
        for cause, tokens in each.computed_tokens.items():
            key = ("computed_tokens", cause)
            values[key] = values.get(key, 0) + tokens
    yield
    for tier in stats.tiers:
        values |= {("tier", tier.name, name): tier.counters.get(name, 0) for name in TIER_COUNTERS}
        values |= {("tier", tier.name, "up"): float(tier.up), ("tier", tier.name, "used_bytes"): tier.used_bytes}
    for owner in usage[:MAX_OWNERS]:
        values |= {("owner", owner.model, owner.tenant, name): getattr(owner, name) for name in OF_OWNERS}
    return values
