"""A `PoolService` without a server around it: what a test does not give has no effect."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.types import Offer, PoolStats
from kvpool.value import ValueReport
from kvpool_server.access.authentication import Who
from kvpool_server.data_plane.permits import PermitTable
from kvpool_server.drain import Drain
from kvpool_server.lookup_streams import LookupStreams
from kvpool_server.reports.engines import EngineReports
from kvpool_server.service import PoolService
from kvpool_server.services.chunks import ChunkService
from kvpool_server.services.drain import DrainService
from kvpool_server.services.explanations import ExplanationService
from kvpool_server.services.hints import HintService
from kvpool_server.services.leases import LeaseService
from kvpool_server.services.listings import ListingService
from kvpool_server.services.puts import PutService
from kvpool_server.services.quotas import QuotaService
from kvpool_server.services.region_permits import RegionPermits
from kvpool_server.services.removals import RemovalService
from kvpool_server.services.reports import ReportService
from kvpool_server.services.routing import RoutingService
from kvpool_server.services.served_pool import ServedPool
from kvpool_server.services.sessions import SessionService
from kvpool_server.services.transfers import TransferService
from kvpool_server.tiering.tiered_pool import TieredPool
from kvpool_server.turns import Turns
from kvpool_server.verifier import Verifier


def pool_service(
    tiered: TieredPool,
    memory: npt.NDArray[np.uint8],
    metrics: Any,
    *,
    offer: Offer,
    boot_token: int = 1,
    stats: Callable[[], PoolStats] | None = None,
    permits: PermitTable | None = None,
    who: Who | None = None,
    turns: Turns | None = None,
    drain: Drain | None = None,
) -> PoolService:
    """A service of all RPCs, without a ledger, KV events and values of other arena sizes.

    Args:
        memory: the arena, uint8 [arena_bytes].
        metrics: `RpcMetrics`, or what stands in for them.
        stats: default: the pool's, with its tiers.
        drain: default: one that nobody else knows of.
    """
    pool, run = tiered.pool, (turns or Turns()).run
    served = ServedPool(tiered, boot_token, drain or Drain(tiered, 0, _tell_nobody), run)
    region_permits = None if permits is None else RegionPermits(pool, permits)
    streams = LookupStreams(pool.limits.max_streams)
    verifier = Verifier(pool, memory, run)
    reports = EngineReports(time.monotonic)
    groups = (
        SessionService(served, offer, who),
        LeaseService(served, streams, region_permits, metrics, None),
        PutService(served, region_permits),
        TransferService(served, memory, metrics),
        ChunkService(served, memory, metrics, verifier),
        HintService(served),
        RemovalService(served, verifier),
        ExplanationService(served),
        RoutingService(served, reports),
        ReportService(served, reports, None),
        ListingService(
            served, stats or tiered.stats, reports, lambda _: ValueReport(False, pool.arena.arena_bytes, "")
        ),
        QuotaService(served),
        DrainService(served),
    )
    return PoolService(pool.limits, streams, groups)


async def _tell_nobody() -> None:
    """There is no server whose end could be announced."""
