"""What engines report of their requests, and the ledger of what tenants have used and saved."""

from __future__ import annotations

import asyncio
from typing import Any

from kvpool import wire
from kvpool.errors import InvalidRequestError
from kvpool.reports import MAX_STAGES
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.caller import own_tenant
from kvpool_server.cache.namespaces import unknown_namespace
from kvpool_server.reports.engines import EngineReports
from kvpool_server.reports.usage_ledger import UsageLedger
from kvpool_server.services.served_pool import ServedPool


class ReportService:
    """The RPCs Report and Ledger.

    Args:
        reports: gets what engines report.
        ledger: None: there is none.
    """

    def __init__(self, served: ServedPool, reports: EngineReports, ledger: UsageLedger | None):
        self._pool = served.pool
        self._boot_token = served.boot_token
        self._reader = served.reader
        self._reports = reports
        self._ledger = ledger

    async def Report(self, request: pb.ReportRequest, context: Any) -> pb.ReportResponse:
        if not 1 <= (count := len(request.namespaces)) <= MAX_STAGES:
            raise InvalidRequestError(f"{count} namespaces in one report; give 1 to {MAX_STAGES}")
        fingerprints = [self._reader.namespace(name) for name in request.namespaces]
        first = self._pool.namespace(fingerprints[0])
        if first is None:
            raise unknown_namespace(fingerprints[0])
        report, spec = wire.decode_report(request), first.spec
        counted = self._reports.report(report, spec.tenant, spec.model)
        return pb.ReportResponse(boot_token=self._boot_token, counted=counted)

    async def Ledger(self, request: pb.LedgerRequest, context: Any) -> pb.LedgerResponse:
        if self._ledger is None:
            return pb.LedgerResponse(boot_token=self._boot_token)
        page = await self._ledger.page(request.since, request.until, own_tenant())
        # In a thread, because a page has up to MAX_LEDGER_ROWS rows.
        return await asyncio.to_thread(wire.encode_ledger, page, self._boot_token)
