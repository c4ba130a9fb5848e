"""Checks of the quotas of a server."""

from __future__ import annotations

from kvpool.doctor.window import SINCE_START, Window, total
from kvpool.protocol.text import escaped
from kvpool.report.finding import Finding, info, warning
from kvpool.report.quotas import size_text
from kvpool.v1 import pool_pb2 as pb

FULL_SHARE = 0.98
MAX_FINDINGS = 4
MAX_NAME_CHARS = 60
_EVICTED = ("quota_evicted_blocks",)


def quotas(stats: pb.StatsResponse, window: Window | None = None) -> list[Finding]:
    """Whether subjects that have reached their quotas evict their own blocks. A quota that is full and lasts is none.

    Args:
        window: None: it is not known which counters grow, so no quota is a problem.
    """
    full = [quota for quota in stats.quotas if quota.used_bytes >= FULL_SHARE * quota.limit_bytes > 0]
    is_evicting = window is not None and window.grown(_EVICTED) > 0
    if not is_evicting and not total(stats, _EVICTED):
        return []
    when = window.when if window is not None and is_evicting else SINCE_START
    found = []
    for quota in full[:MAX_FINDINGS]:
        subject = escaped(quota.subject, MAX_NAME_CHARS)
        text = f"{subject} has reached its quota of {size_text(quota.limit_bytes)}, and quotas evicted blocks {when}"
        fix = "raise the quota if the subject's hit ratio has fallen: `kvpool quota`"
        found.append(warning("quotas", text, fix) if is_evicting else info("quotas", text, fix))
    return found
