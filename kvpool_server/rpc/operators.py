"""The RPCs of operators: Stats, ListNamespaces, Value, Ledger, Explain; ListQuotas, SetQuotas, Remove, Clear, Drain."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import structlog

from kvpool.protocol import wire
from kvpool.protocol.errors import InvalidRequestError, UnavailableError
from kvpool.protocol.text import beyond_memory
from kvpool.protocol.types import BlockState, Quota
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.caller import check_all_tenants, is_visible, may_see_quota, own_tenant
from kvpool_server.cache.departures import EvictedFor
from kvpool_server.cache.explanations import BlockRange, RunExplanation, add_range, most_ranges
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.cache.steps import Steps
from kvpool_server.process.runtime import FLOW
from kvpool_server.rpc.handlers import Handlers, owner_of
from kvpool_server.rpc.turns import whole
from kvpool_server.sharing.fair_slots import FairSlots
from kvpool_server.tiers.tier import TierError

log = structlog.get_logger()

MAX_RUNS = 64
"""Of `Explain`: as many as a model has groups."""
MAX_REMOVALS, MAX_WAITING = 8, 64
"""Calls of `Remove` and `Clear` under way, each of another caller, and those of one caller that wait for their turn."""


class OperatorHandlers(Handlers):
    """What operators read of a server, what they set at run time, and what they remove."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._removals = FairSlots(MAX_REMOVALS, 1, MAX_WAITING)
        self._ledger_turns = FairSlots(1, 1)

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsResponse:
        return self.stats()

    async def ListNamespaces(self, request: pb.ListNamespacesRequest, context: Any) -> pb.ListNamespacesResponse:
        return await self.run(self._list_namespaces(holdings=not request.without_holdings))

    def _list_namespaces(self, holdings: bool) -> Steps[pb.ListNamespacesResponse]:
        reply = pb.ListNamespacesResponse(boot_token=self.boot_token)
        for namespace in [each for each in self.pool.open_namespaces() if is_visible(each.spec.tenant)]:
            reply.namespaces.append(self._info(namespace, holdings))
            yield
        return reply

    def _info(self, namespace: PoolNamespace, holdings: bool) -> pb.NamespaceInfo:
        """What the pool, its tiers and engines know of a namespace."""
        fingerprint, now = namespace.fingerprint, self.pool.clock()
        info = pb.NamespaceInfo(
            fingerprint=fingerprint,
            spec=wire.encode_spec(namespace.spec.listed()),
            lookup_blocks=namespace.lookup_blocks,
            lookup_hits=namespace.lookup_hits,
            age_seconds=now - namespace.opened_at,
            idle_seconds=now - namespace.used_at,
            superseded=namespace.superseded,
            opened_by=namespace.opened_by,
            pinned_bytes=self.pool.pins.pinned_bytes(fingerprint),
        )
        if holdings:
            info.num_entries, info.nbytes = namespace.held_blocks, namespace.complete_bytes
            info.tiers.extend(self.tiered.holdings(fingerprint))
        if (totals := self.reports.of_namespace(fingerprint)) is not None:
            info.computed_tokens.update(totals.computed_tokens)
            info.saved_seconds, info.lost_seconds = totals.saved_seconds, totals.lost_seconds
        return info

    async def Value(self, request: pb.ValueRequest, context: Any) -> pb.ValueResponse:
        reply = self.value(own_tenant())
        reply.boot_token = self.boot_token
        return reply

    async def Ledger(self, request: pb.LedgerRequest, context: Any) -> pb.LedgerResponse:
        reply = pb.LedgerResponse()
        if self.ledger is not None:
            async with self._ledger_turns.slot(owner_of(context).name):
                reply = await self.ledger.page(request.since, request.until, own_tenant())
        reply.boot_token = self.boot_token
        return reply

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        fingerprint = self.fingerprint(request.namespace)
        runs = self.runs(request.runs, self.pool.limits.max_lookup_blocks)
        if len(runs) > MAX_RUNS:
            raise InvalidRequestError(f"{len(runs)} runs to explain; give at most {MAX_RUNS}, one a group")
        steps = self.pool.explanations.explain_in_steps(fingerprint, runs, _told_to(own_tenant()))
        found = await self.run(steps)
        reply = pb.ExplainResponse(boot_token=self.boot_token)
        reply.elsewhere.extend(wire.message_of(each, pb.NamespaceMatch) for each in found.elsewhere)
        away, most = dict[str, None](), most_ranges(len(runs))
        sees_servers = own_tenant() is None
        for run, each in zip(runs, found.runs, strict=True):
            missing = [part for part in each.ranges if part.state is BlockState.MISSING]
            names = [name for part in missing for name in run.block_hashes[part.first : part.stop]]
            group = found.namespace.groups[run.group_idx]
            places, silent = await self.tiered.tiers_of(group, names) if names else ([], {})
            away.update(dict.fromkeys(silent))
            if sees_servers:
                reply.servers_away.update(item for servers in silent.values() for item in servers.items())
            else:
                places = [(tier, "") for tier, _ in places]
            ranges: list[BlockRange] = []
            for part in _with_tiers(each, places):
                add_range(ranges, part)
                if len(ranges) > most:
                    break
            reply.runs.append(wire.message_of(each, pb.RunExplanation, ranges=map(_encoded, ranges[:most])))
            await asyncio.sleep(0)  # Other calls get their turn between two runs.
        if found.memory.num_departures:
            reply.remembered_seconds = max(found.memory.oldest_seconds, 1)
            reply.half_remembered_seconds = max(found.memory.half_seconds, 1)
        reply.tiers_away.extend(away)
        return reply

    async def ListQuotas(self, request: pb.ListQuotasRequest, context: Any) -> pb.ListQuotasResponse:
        quotas = [quota for quota in self.pool.quotas() if may_see_quota(quota.subject)]
        tenants = filter(is_visible, {namespace.spec.tenant for namespace in self.pool.open_namespaces()})
        budgets = [wire.message_of(each, pb.PinBudget) for each in self.pool.pins.budgets(tenants)]
        return pb.ListQuotasResponse(boot_token=self.boot_token, quotas=wire.encode_quotas(quotas), pin_budgets=budgets)

    @whole
    async def SetQuotas(self, request: pb.SetQuotasRequest, context: Any) -> pb.SetQuotasResponse:
        if len(request.quotas) > (most := self.pool.limits.max_quotas):
            raise InvalidRequestError(f"{len(request.quotas)} quotas in one message; give at most {most}")
        wanted = [wire.value_of(Quota, each) for each in request.quotas]
        await self.run(self.pool.set_quotas_in_steps(wanted))
        log.info("quotas set", **{quota.subject: quota.limit_bytes for quota in request.quotas})
        quotas = self.pool.quotas()
        if warning := beyond_memory(quotas, self.pool.arena.arena_bytes):
            log.warning(warning)
        return pb.SetQuotasResponse(boot_token=self.boot_token, quotas=wire.encode_quotas(quotas))

    @whole
    async def Remove(self, request: pb.RemoveRequest, context: Any) -> pb.RemoveResponse:
        fingerprint, runs = self.fingerprint(request.namespace), self.runs(request.runs)
        async with self._removals.slot(FLOW.get()):
            removed = await _removed(self.tiered.remove(fingerprint, runs))
        return pb.RemoveResponse(boot_token=self.boot_token, num_removed=removed)

    @whole
    async def Clear(self, request: pb.ClearRequest, context: Any) -> pb.ClearResponse:
        if not request.namespace:
            check_all_tenants("Clear of all namespaces")
        fingerprint = self.fingerprint(request.namespace) if request.namespace else b""
        async with self._removals.slot(FLOW.get()):
            removed = await _removed(self.tiered.clear(fingerprint))
        log.info("cleared", namespace=fingerprint.hex()[:12] or "all", blocks=removed)
        return pb.ClearResponse(boot_token=self.boot_token, num_removed=removed)

    @whole
    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        if request.boot_token not in (0, self.boot_token):
            raise UnavailableError("the server that was to drain has ended, and another one has taken its place")
        reply = await self.drain.begin(request.deadline_ms)
        reply.boot_token = self.boot_token
        return reply


async def _removed(removal: Awaitable[int]) -> int:
    """How many blocks the pool has removed. Raises UnavailableError if a tier has not removed its blocks."""
    try:
        return await removal
    except TierError as error:
        raise UnavailableError(
            f"the blocks were removed from memory, but not from every tier: {error}; repeat the call when the tier "
            "is back"
        ) from None


def _encoded(part: BlockRange) -> pb.BlockRange:
    whose = part.evicted_for
    return wire.message_of(part, pb.BlockRange, evicted_for=whose and wire.message_of(whose, pb.EvictedFor))


def _with_tiers(run: RunExplanation, places: Sequence[tuple[str, str]]) -> Iterator[BlockRange]:
    """The ranges of a run, given the tier and server of each of its missing blocks, in order."""
    if not any(tier for tier, _ in places):
        yield from run.ranges
        return
    left = iter(places)
    for part in run.ranges:
        if part.state is not BlockState.MISSING:
            yield part
            continue
        first = part.first
        for (tier, server), members in itertools.groupby(itertools.islice(left, part.count)):
            count = sum(1 for _ in members)
            state = BlockState.IN_TIER if tier else BlockState.MISSING
            yield replace(part, first=first, count=count, state=state, tier=tier, server=server)
            first += count


def _told_to(tenant: str | None) -> Callable[[EvictedFor], EvictedFor] | None:
    """What callers of a tenant may know of whom a block was evicted for: no other tenant's name. None: all."""
    if tenant is None:
        return None
    return lambda whose: whose if whose.tenant == tenant else EvictedFor(is_hidden=True)
