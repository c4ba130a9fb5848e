"""Which blocks a server that leaves offers to other servers: whole prompts, those that were used last first.

Belongs to the pool's event loop, which gets a turn after each part of the index.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Iterator, Sequence

from kvpool.protocol.types import BlockRun
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.eviction.base import TICK
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.steps import LOOKUP_STEP_BLOCKS
from kvpool_server.tiers.tier import Prompt, Tier

MAX_PREFIXES = 1_024
"""Prefixes that are offered: as many leaves are remembered while the index is visited."""
MAX_RUN_BLOCKS = LOOKUP_STEP_BLOCKS
"""Of a prefix, its first blocks: a peer looks so many up in one step."""


async def hand_over(pool: Pool, tiers: Sequence[Tier]) -> None:
    """Has the tiers that do so hand blocks of the pool over. Cancel it at the deadline."""
    leaves: list[Entry] = []
    for namespace in pool.open_namespaces():
        if namespace.is_measurement or namespace.superseded:
            continue
        for part in itertools.chain.from_iterable(group.index.parts() for group in namespace.groups):
            some = (leaf for entry in part if not entry.children and (leaf := _readable(entry)) is not None)
            leaves = heapq.nlargest(MAX_PREFIXES, itertools.chain(leaves, some), key=lambda leaf: leaf.used)
            await asyncio.sleep(0)
    for tier in tiers:
        if tier.hands_over:
            await tier.hand_over(_prompts(pool, leaves))


def _readable(entry: Entry) -> Entry | None:
    """The last readable block of a prefix, behind which others may just be put; None if clients need it no more."""
    leaf: Entry | None = entry
    while leaf is not None and not leaf.complete:
        leaf = leaf.parent
    return leaf if leaf is not None and leaf.used >= 0 else None


def _prompts(pool: Pool, leaves: Sequence[Entry]) -> Iterator[Prompt]:
    """The prefixes of leaves. One call of the pool uses a prompt's blocks in all groups, which stay together."""
    for _, leaves_of_call in itertools.groupby(leaves, lambda leaf: leaf.used // TICK):
        prompts: list[Prompt] = []
        for leaf in leaves_of_call:
            group, run = leaf.group, _run(leaf)
            if run is None or pool.namespace(group.fingerprint) is None:
                continue
            for prompt in prompts:
                if group not in prompt and next(iter(prompt)).fingerprint == group.fingerprint:
                    prompt[group] = run
                    break
            else:
                prompts.append({group: run})
        yield from prompts


def _run(leaf: Entry) -> BlockRun | None:
    """The blocks up to a leaf that are readable now; None if none is of use."""
    prefix: list[Entry] = []
    entry: Entry | None = leaf
    while entry is not None and entry.live and entry.complete:
        prefix.append(entry)
        entry = entry.parent
    if not prefix or (leaf.group.needs_prefix and prefix[-1].parent_hash):
        return None
    prefix.reverse()
    hashes = [each.block_hash for each in prefix[:MAX_RUN_BLOCKS]]
    return BlockRun(leaf.group.idx, hashes, prefix[0].parent_hash)
