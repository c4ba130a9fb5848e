"""What operators read of a server: its counters, its namespaces, and what other sizes of the arena would hit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kvpool import wire
from kvpool.holdings import NamespaceInfo
from kvpool.types import PoolStats
from kvpool.v1 import pool_pb2 as pb
from kvpool.value import ValueReport
from kvpool_server.access.caller import is_visible, own_tenant
from kvpool_server.cache.steps import Steps
from kvpool_server.reports.engines import EngineReports
from kvpool_server.services.served_pool import ServedPool


class ListingService:
    """See the module.

    Args:
        stats: takes a snapshot of the pool and its tiers.
        reports: what engines have reported of namespaces.
        value: what other arena sizes would hit, of a tenant or of all.
    """

    def __init__(
        self,
        served: ServedPool,
        stats: Callable[[], PoolStats],
        reports: EngineReports,
        value: Callable[[str | None], ValueReport],
    ):
        self._tiered = served.tiered
        self._pool = served.pool
        self._boot_token = served.boot_token
        self._run = served.run
        self._stats = stats
        self._reports = reports
        self._value = value

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsResponse:
        return wire.encode_stats(self._stats(), self._boot_token)

    async def ListNamespaces(self, request: pb.ListNamespacesRequest, context: Any) -> pb.ListNamespacesResponse:
        return await self._run(self._list_namespaces(holdings=not request.without_holdings))

    def _list_namespaces(self, holdings: bool) -> Steps[pb.ListNamespacesResponse]:
        reply = pb.ListNamespacesResponse(boot_token=self._boot_token)
        for info in [info for info in self._pool.namespaces(holdings=holdings) if is_visible(info.spec.tenant)]:
            if holdings:
                info = dataclasses.replace(info, tiers=self._tiered.holdings(info.fingerprint))
            info = dataclasses.replace(info, pinned_bytes=self._pool.pins.pinned_bytes(info.fingerprint))
            info = self._with_reports(info)
            reply.namespaces.append(wire.encode_namespace_info(info))
            yield
        return reply

    def _with_reports(self, info: NamespaceInfo) -> NamespaceInfo:
        """The same, with what engines have reported of the namespace."""
        totals = self._reports.of_namespace(info.fingerprint)
        if totals is None:
            return info
        return dataclasses.replace(
            info,
            computed_tokens=dict(totals.computed_tokens),
            saved_seconds=totals.saved_seconds,
            lost_seconds=totals.lost_seconds,
        )

    async def Value(self, request: pb.ValueRequest, context: Any) -> pb.ValueResponse:
        return wire.encode_value(self._value(own_tenant()), self._boot_token)
