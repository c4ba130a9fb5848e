"""Which tiers, and which servers of them, hold blocks: what `kvpool explain` tells."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from kvpool_server.cache.entry import Group
from kvpool_server.tiers.calls import Health
from kvpool_server.tiers.tier import Tier, TierError

PART_BLOCKS, MAX_FIND_BLOCKS, FIND_S = 1_024, 8_192, 1.0
"""Of questions which blocks a tier has: blocks at a time, in all, and their time."""

Holders = tuple[list[tuple[str, str]], dict[str, dict[str, str]]]
"""The tier that has each block, with the server, empty where none has it; and which tiers and servers did not tell."""


async def holders_of(tiers: Sequence[tuple[Tier, Health]], group: Group, names: Sequence[bytes]) -> Holders:
    """The first tier that has each block.

    A tier that does not know from memory is asked for `MAX_FIND_BLOCKS` blocks, which may take `FIND_S`.
    """
    found, away = [("", "")] * len(names), dict[str, dict[str, str]]()
    for tier, health in tiers:
        left, num_asked, servers = [nth for nth, (name, _) in enumerate(found) if not name], 0, dict[str, str]()
        for at in range(0, len(left), PART_BLOCKS):
            part = left[at : at + PART_BLOCKS]
            asked = [names[nth] for nth in part]
            known: Sequence[bool | str] | None = tier.known(group, asked)
            if known is None and (num_asked := num_asked + len(part)) <= MAX_FIND_BLOCKS:
                known = await _ask(tier, health, group, asked, servers)
            if known is None or servers:
                away[tier.name] = servers
            if known is None:
                break
            for nth, has in itertools.compress(zip(part, known, strict=True), known):
                found[nth] = tier.name, has if isinstance(has, str) else ""
            await asyncio.sleep(0)
    return found, away


async def _ask(tier: Tier, health: Health, *asked: Any) -> Sequence[bool | str] | None:
    """As `Tier.holders`; None if the tier does not answer in time."""
    if not health.is_available:
        return None
    try:
        async with asyncio.timeout(FIND_S):
            with health.call():
                return await tier.holders(*asked)
    except (TierError, TimeoutError):
        return None
