"""The one list of judgements of a server: `kvpool stats`, `top`, `doctor` and the dashboard show its findings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from kvpool.doctor.pool_state import pool_state
from kvpool.doctor.server_state import server_state
from kvpool.doctor.window import LOOK_S, SINCE_START, Window, total, window_of
from kvpool.protocol.text import escaped
from kvpool.report.finding import Finding, info, notes, ok, warning
from kvpool.report.quotas import size_text
from kvpool.v1 import pool_pb2 as pb

FULL_SHARE = 0.98
"""Of a quota whose subject has reached it."""
MAX_QUOTAS = 4
MAX_NAME_CHARS = 60
_EVICTED = ("quota_evicted_blocks",)


def judgements(stats: pb.StatsResponse, window: Window | None = None) -> list[Finding]:
    """What a snapshot says about the pool, its tiers and quotas, the server, and the engines that report.

    Args:
        window: None: it is not known which counters grow, so no counter is a problem.
    """
    return [*pool_state(stats, window), *server_state(stats), *_quotas(stats, window), *_engines(stats)]


def judge_twice(snapshot: Callable[[], pb.StatsResponse]) -> tuple[pb.StatsResponse, list[Finding]]:
    """A snapshot and its judgements. If the snapshot alone is not clear, another one is made `LOOK_S` later."""
    before = snapshot()
    window = window_of(before)
    if window is not None or not notes(judgements(before)):
        return before, judgements(before, window)
    time.sleep(LOOK_S)
    now = snapshot()
    return now, judgements(now, window_of(now, before, LOOK_S))


def _quotas(stats: pb.StatsResponse, window: Window | None) -> Iterator[Finding]:
    """Subjects at their quotas, while quotas evict blocks or after they did. A full quota alone is no finding."""
    is_evicting = window is not None and window.grown(_EVICTED) > 0
    if not is_evicting and not total(stats, _EVICTED):
        return
    when = window.when if window is not None and is_evicting else SINCE_START
    full = [quota for quota in stats.quotas if quota.used_bytes >= FULL_SHARE * quota.limit_bytes > 0]
    for quota in full[:MAX_QUOTAS]:
        subject = escaped(quota.subject, MAX_NAME_CHARS)
        text = f"{subject} has reached its quota of {size_text(quota.limit_bytes)}, and quotas evicted blocks {when}"
        fix = "raise the quota if the subject's hit ratio has fallen: `kvpool quota`"
        yield (warning if is_evicting else info)("quotas", text, fix)


def _engines(stats: pb.StatsResponse) -> list[Finding]:
    """Whether the engines that report have the server's release, a fast transport and a closed breaker."""
    found = []
    if away := [each for each in stats.engines if each.breaker_open]:
        text = f"circuit breakers are open, and engines do without the pool because their calls failed: {_names(away)}"
        fix = "engines come back by themselves; if not, look at their logs, their endpoint and the network between"
        found.append(warning("engines", text, fix))
    if slow := [each for each in stats.engines if each.transport.startswith("grpc")]:
        text = f"engines move bytes through gRPC, which is slow: {_names(slow)}"
        found.append(warning("engines", text, "their logs say why the faster transports do not work"))
    if stats.HasField("server"):
        version = stats.server.version
        if others := [each for each in stats.engines if each.version != version]:
            theirs = escaped(others[0].version, MAX_NAME_CHARS)
            text = f"engines have kvpool {theirs}, and the server {escaped(version, MAX_NAME_CHARS)}: {_names(others)}"
            found.append(warning("engines", text, "install the same release on both sides"))
    if found or not stats.engines:
        return found
    return [ok("engines", f"{len(stats.engines)} engines report, and none has a problem")]


def _names(found: Sequence[pb.EngineState]) -> str:
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return escaped(found[0].engine, MAX_NAME_CHARS) + more
