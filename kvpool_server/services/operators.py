"""The RPCs of operators: Stats, ListNamespaces, Value, Ledger, Explain; ListQuotas, SetQuotas, Remove, Clear, Drain."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable
from typing import Any

import structlog

from kvpool import wire
from kvpool.errors import InvalidRequestError, UnavailableError
from kvpool.explanation_messages import encode_explanation, encode_run
from kvpool.holdings import NamespaceInfo
from kvpool.quotas import beyond_memory
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.caller import check_all_tenants, is_visible, may_see_quota, own_tenant
from kvpool_server.cache.steps import Steps
from kvpool_server.explainer import Explainer
from kvpool_server.services.handlers import Handlers, owner_of
from kvpool_server.tiers.tier import TierError

log = structlog.get_logger()


class OperatorHandlers(Handlers):
    """What operators read of a server, what they set at run time, and what they remove."""

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsResponse:
        return wire.encode_stats(self.stats(), self.boot_token)

    async def ListNamespaces(self, request: pb.ListNamespacesRequest, context: Any) -> pb.ListNamespacesResponse:
        return await self.run(self._list_namespaces(holdings=not request.without_holdings))

    def _list_namespaces(self, holdings: bool) -> Steps[pb.ListNamespacesResponse]:
        reply = pb.ListNamespacesResponse(boot_token=self.boot_token)
        for info in [info for info in self.pool.namespaces(holdings=holdings) if is_visible(info.spec.tenant)]:
            if holdings:
                info = dataclasses.replace(info, tiers=self.tiered.holdings(info.fingerprint))
            info = dataclasses.replace(info, pinned_bytes=self.pool.pins.pinned_bytes(info.fingerprint))
            info = self._with_reports(info)
            reply.namespaces.append(wire.encode_namespace_info(info))
            yield
        return reply

    def _with_reports(self, info: NamespaceInfo) -> NamespaceInfo:
        """The same, with what engines have reported of the namespace."""
        totals = self.reports.of_namespace(info.fingerprint)
        if totals is None:
            return info
        return dataclasses.replace(
            info,
            computed_tokens=dict(totals.computed_tokens),
            saved_seconds=totals.saved_seconds,
            lost_seconds=totals.lost_seconds,
        )

    async def Value(self, request: pb.ValueRequest, context: Any) -> pb.ValueResponse:
        return wire.encode_value(self.value(own_tenant()), self.boot_token)

    async def Ledger(self, request: pb.LedgerRequest, context: Any) -> pb.LedgerResponse:
        if self.ledger is None:
            return pb.LedgerResponse(boot_token=self.boot_token)
        async with self.ledger_turns.slot(owner_of(context).name):
            page = await self.ledger.page(request.since, request.until, own_tenant())
            # In a thread, because a page has up to MAX_LEDGER_ROWS rows.
            return await asyncio.to_thread(wire.encode_ledger, page, self.boot_token)

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        fingerprint = self.fingerprint(request.namespace)
        runs = self.runs(request.runs, self.pool.limits.max_lookup_blocks)
        found = await Explainer(self.tiered, self.run).explain(fingerprint, runs)
        reply = encode_explanation(dataclasses.replace(found, runs=()), self.boot_token)
        for run in found.runs:
            reply.runs.append(encode_run(run))
            await asyncio.sleep(0)  # Other calls do not wait for all runs.
        return reply

    async def ListQuotas(self, request: pb.ListQuotasRequest, context: Any) -> pb.ListQuotasResponse:
        quotas = [quota for quota in self.pool.quotas() if may_see_quota(quota.subject)]
        tenants = filter(is_visible, {namespace.spec.tenant for namespace in self.pool.open_namespaces()})
        budgets = wire.encode_pin_budgets(self.pool.pins.budgets(tenants))
        return pb.ListQuotasResponse(boot_token=self.boot_token, quotas=wire.encode_quotas(quotas), pin_budgets=budgets)

    async def SetQuotas(self, request: pb.SetQuotasRequest, context: Any) -> pb.SetQuotasResponse:
        if len(request.quotas) > (most := self.pool.limits.max_quotas):
            raise InvalidRequestError(f"{len(request.quotas)} quotas in one message; give at most {most}")
        await self.run(self.pool.set_quotas_in_steps(wire.decode_quotas(request.quotas)))
        log.info("quotas set", **{quota.subject: quota.limit_bytes for quota in request.quotas})
        quotas = self.pool.quotas()
        if warning := beyond_memory(quotas, self.pool.arena.arena_bytes):
            log.warning(warning)
        return pb.SetQuotasResponse(boot_token=self.boot_token, quotas=wire.encode_quotas(quotas))

    async def Remove(self, request: pb.RemoveRequest, context: Any) -> pb.RemoveResponse:
        fingerprint, runs = self.fingerprint(request.namespace), self.runs(request.runs)
        removed = await _removed(self.tiered.remove(fingerprint, runs))
        return pb.RemoveResponse(boot_token=self.boot_token, num_removed=removed)

    async def Clear(self, request: pb.ClearRequest, context: Any) -> pb.ClearResponse:
        if not request.namespace:
            check_all_tenants("Clear of all namespaces")
        fingerprint = self.fingerprint(request.namespace) if request.namespace else b""
        removed = await _removed(self.tiered.clear(fingerprint))
        log.info("cleared", namespace=fingerprint.hex()[:12] or "all", blocks=removed)
        return pb.ClearResponse(boot_token=self.boot_token, num_removed=removed)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        if request.boot_token not in (0, self.boot_token):
            raise UnavailableError("the server that was to drain has ended, and another one has taken its place")
        return wire.encode_drain(await self.drain.begin(request.deadline_ms), self.boot_token)


async def _removed(removal: Awaitable[int]) -> int:
    """How many blocks the pool has removed. Raises UnavailableError if a tier has not removed its blocks."""
    try:
        return await removal
    except TierError as error:
        raise UnavailableError(
            f"the blocks were removed from memory, but not from every tier: {error}; repeat the call when the tier "
            "is back"
        ) from None
