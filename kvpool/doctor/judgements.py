"""The one list of judgements of a server: `kvpool stats`, `top`, `doctor` and the dashboard show its findings."""

from __future__ import annotations

from kvpool.doctor.engines import engines
from kvpool.doctor.pool_state import pool_state
from kvpool.doctor.quotas import quotas
from kvpool.doctor.server_state import server_state
from kvpool.doctor.window import Window
from kvpool.report.finding import Finding
from kvpool.v1 import pool_pb2 as pb


def judgements(stats: pb.StatsResponse, window: Window | None = None) -> list[Finding]:
    """What a snapshot says about the pool, its tiers and quotas, the server, and the engines that report.

    Args:
        window: None: it is not known which counters grow, so no counter is a problem.
    """
    return [*pool_state(stats, window), *server_state(stats), *quotas(stats, window), *engines(stats)]
