"""Quotas and pin budgets: an operator's settings at run time."""

from __future__ import annotations

from typing import Any

import structlog

from kvpool import wire
from kvpool.errors import InvalidRequestError
from kvpool.quotas import beyond_memory
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.caller import is_visible, may_see_quota
from kvpool_server.services.served_pool import ServedPool

log = structlog.get_logger()


class QuotaService:
    """See the module."""

    def __init__(self, served: ServedPool):
        self._pool = served.pool
        self._boot_token = served.boot_token
        self._run = served.run

    async def ListQuotas(self, request: pb.ListQuotasRequest, context: Any) -> pb.ListQuotasResponse:
        quotas = [quota for quota in self._pool.quotas() if may_see_quota(quota.subject)]
        tenants = filter(is_visible, {namespace.spec.tenant for namespace in self._pool.open_namespaces()})
        budgets = wire.encode_pin_budgets(self._pool.pins.budgets(tenants))
        return pb.ListQuotasResponse(
            boot_token=self._boot_token, quotas=wire.encode_quotas(quotas), pin_budgets=budgets
        )

    async def SetQuotas(self, request: pb.SetQuotasRequest, context: Any) -> pb.SetQuotasResponse:
        if len(request.quotas) > (most := self._pool.limits.max_quotas):
            raise InvalidRequestError(f"{len(request.quotas)} quotas in one message; give at most {most}")
        await self._run(self._pool.set_quotas_in_steps(wire.decode_quotas(request.quotas)))
        log.info("quotas set", **{quota.subject: quota.limit_bytes for quota in request.quotas})
        quotas = self._pool.quotas()
        if warning := beyond_memory(quotas, self._pool.arena.arena_bytes):
            log.warning(warning)
        return pb.SetQuotasResponse(boot_token=self._boot_token, quotas=wire.encode_quotas(quotas))
