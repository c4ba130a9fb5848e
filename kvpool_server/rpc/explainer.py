"""Answers `Explain`: what the pool and its tiers know of a prompt's blocks, as far as the caller may know it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.types import BlockRun, BlockState
from kvpool.protocol.wire import message_of
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.caller import own_tenant
from kvpool_server.cache.departures import EvictedFor
from kvpool_server.cache.explanations import BlockRange, RunExplanation, add_range, most_ranges
from kvpool_server.cache.steps import Run
from kvpool_server.tiering.tiered_pool import TieredPool

MAX_RUNS = 64
"""As many as a model has groups."""


async def explain(pool: TieredPool, run_steps: Run, fingerprint: bytes, runs: Sequence[BlockRun]) -> pb.ExplainResponse:
    """The answer to the running call. Raises InvalidRequestError for too many runs, and as a lookup."""
    if len(runs) > MAX_RUNS:
        raise InvalidRequestError(f"{len(runs)} runs to explain; give at most {MAX_RUNS}, one a group")
    steps = pool.pool.explanations.explain_in_steps(fingerprint, runs, _told_to(own_tenant()))
    found = await run_steps(steps)
    memory, away, most = found.memory, dict[str, None](), most_ranges(len(runs))
    reply = pb.ExplainResponse(elsewhere=[message_of(each, pb.NamespaceMatch) for each in found.elsewhere])
    for run, each in zip(runs, found.runs, strict=True):
        names = [
            name
            for part in each.ranges
            if part.state is BlockState.MISSING
            for name in run.block_hashes[part.first : part.stop]
        ]
        tiers, silent = await pool.tiers_of(found.namespace, run.group_idx, names) if names else ([], [])
        away.update(dict.fromkeys(silent))
        ranges: list[BlockRange] = []
        for part in _with_tiers(each, tiers):
            add_range(ranges, part)
            if len(ranges) > most:
                break
        reply.runs.append(message_of(each, pb.RunExplanation, ranges=map(_encoded, ranges[:most])))
        await asyncio.sleep(0)  # Other calls get their turn between two runs.
    if memory.num_departures:
        reply.remembered_seconds = max(memory.oldest_seconds, 1)
        reply.half_remembered_seconds = max(memory.half_seconds, 1)
    reply.tiers_away.extend(away)
    return reply


def _encoded(part: BlockRange) -> pb.BlockRange:
    whose = part.evicted_for
    return message_of(part, pb.BlockRange, evicted_for=whose and message_of(whose, pb.EvictedFor))


def _with_tiers(run: RunExplanation, tiers: Sequence[str]) -> Iterator[BlockRange]:
    """The ranges of a run, given the tier of each of its missing blocks, in order."""
    if not any(tiers):
        yield from run.ranges
        return
    left = iter(tiers)
    for part in run.ranges:
        if part.state is not BlockState.MISSING:
            yield part
            continue
        first = part.first
        for tier, members in itertools.groupby(itertools.islice(left, part.count)):
            count = sum(1 for _ in members)
            state = BlockState.IN_TIER if tier else BlockState.MISSING
            yield replace(part, first=first, count=count, state=state, tier=tier)
            first += count


def _told_to(tenant: str | None) -> Callable[[EvictedFor], EvictedFor] | None:
    """What callers of a tenant may know of whom a block was evicted for: no other tenant's name. None: all."""
    if tenant is None:
        return None

    def told(whose: EvictedFor) -> EvictedFor:
        return whose if whose.tenant == tenant else EvictedFor(is_hidden=True)

    return told
