"""A `PoolService` without a server around it: what a test does not give has no effect."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry

from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.authentication import Who
from kvpool_server.data_plane.permits import PermitTable
from kvpool_server.observability.metrics import RpcMetrics
from kvpool_server.reports.engines import EngineReports
from kvpool_server.rpc.drain import Drain
from kvpool_server.rpc.grpc_server import PoolService
from kvpool_server.rpc.turns import Turns
from kvpool_server.tiering.tiered_pool import TieredPool


def pool_service(
    tiered: TieredPool,
    memory: npt.NDArray[np.uint8],
    metrics: Any = None,
    *,
    offer: pb.PingResponse,
    boot_token: int = 1,
    stats: Callable[[], pb.StatsResponse] | None = None,
    permits: PermitTable | None = None,
    who: Who | None = None,
    turns: Turns | None = None,
    drain: Drain | None = None,
) -> PoolService:
    """A service of all RPCs, without a ledger, KV events and values of other arena sizes.

    Args:
        memory: the arena, uint8 [arena_bytes].
        metrics: `RpcMetrics`; by default some that nobody reads.
        stats: default: the pool's, with its tiers, and nothing of the server.
        drain: default: one that nobody else knows of.
    """
    return PoolService(
        tiered=tiered,
        memory=memory,
        boot_token=boot_token,
        drain=drain or Drain(tiered, 0, _tell_nobody),
        turns=turns or Turns(),
        metrics=metrics or RpcMetrics(CollectorRegistry()),
        offer=offer,
        stats=stats or (lambda: _stats(tiered)),
        reports=EngineReports(time.monotonic),
        value=lambda _: pb.ValueResponse(enabled=False, arena_bytes=tiered.pool.arena.arena_bytes, policy=""),
        permits=permits,
        who=who,
    )


def _stats(tiered: TieredPool) -> pb.StatsResponse:
    stats = tiered.stats()
    stats.server.SetInParent()
    return stats


async def _tell_nobody() -> None:
    """There is no server whose end could be announced."""
