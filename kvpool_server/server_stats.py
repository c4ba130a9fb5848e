"""How this server is doing, for `Stats`; the same numbers as on /metrics."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Mapping

from kvpool.server_stats import ServerStats
from kvpool.version import __version__
from kvpool_server.loop_lag import LoopLag
from kvpool_server.metrics import RpcMetrics
from kvpool_server.usage import Usage


def server_stats(
    started: float,
    metrics: RpcMetrics,
    lag: LoopLag,
    usage: Usage,
    http_port: int = 0,
    ends: Mapping[str, dt.datetime] | None = None,
    refused_files: Mapping[str, bool] | None = None,
) -> ServerStats:
    """A snapshot.

    Args:
        started: `time.monotonic` at the server's start.
        http_port: 0 if HTTP is off.
        ends: of the server's certificates, by name.
        refused_files: whether watched files cannot be used as they are now.
    """
    late = lag.last_minute()
    bounds, rpcs = metrics.rpcs()
    return ServerStats(
        version=__version__,
        uptime_seconds=time.monotonic() - started,
        unix_seconds=time.time(),
        loop_lag_p50_seconds=late.p50,
        loop_lag_p99_seconds=late.p99,
        loop_lag_max_seconds=late.longest,
        rpc_seconds_bounds=bounds,
        rpcs=rpcs,
        transfers=metrics.transfers(),
        usage=usage.by_model_and_tenant(),
        http_port=http_port,
        certificate_ends={name: ends_at.timestamp() for name, ends_at in (ends or {}).items()},
        refused_files=tuple(name for name, is_refused in (refused_files or {}).items() if is_refused),
    )
