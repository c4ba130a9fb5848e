"""A tier whose calls have spans: children of the lookup that asked for the blocks, or of the put that stored them.

Used with `--otel` alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from kvpool.client.tracing import Tracing
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.tiers.tier import Block, BlockKey, Tier, keys_of

MAX_REMEMBERED = 8_192
"""Blocks whose lookup or put is remembered; the oldest is forgotten for another."""


def traced(tier: Tier, tracing: Tracing) -> Tier:
    """The same tier, whose calls have spans."""
    return cast(Tier, _TracedTier(tier, tracing))


class _TracedTier:
    """Wraps the calls that take time; everything else is the tier's own. Belongs to the pool's event loop."""

    def __init__(self, tier: Tier, tracing: Tracing):
        self._tier = tier
        self._tracing = tracing
        self._parents: OrderedDict[BlockKey, str] = OrderedDict()  # The span that last concerned each block.

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    async def find(self, group: Group, block_hashes: Sequence[bytes]) -> list[bool]:
        with self._span("find", group, block_hashes):
            return await self._tier.find(group, block_hashes)

    async def write(self, group: Group, blocks: Sequence[Block]) -> int:
        with self._span("write", group, [block.block_hash for block in blocks]) as span:
            written = await self._tier.write(group, blocks)
            span.set_attribute("kvpool.written_blocks", written)
            return written

    async def read(
        self, group: Group, block_hashes: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[Sequence[int] | None]:
        with self._span("read", group, block_hashes) as span:
            found = await self._tier.read(group, block_hashes, into)
            span.set_attribute("kvpool.read_blocks", len(found) - found.count(None))
            return found

    def known(self, group: Group, block_hashes: Sequence[bytes]) -> list[bool] | None:
        self._remember(group, block_hashes)  # A lookup asks before it prefetches.
        return self._tier.known(group, block_hashes)

    def hold(self, entry: Entry, *, is_there: bool) -> None:
        if is_there:
            self._remember(entry.group, [entry.block_hash])
        self._tier.hold(entry, is_there=is_there)

    def _remember(self, group: Group, block_hashes: Sequence[bytes]) -> None:
        """The current span concerns these blocks; without one, nothing is remembered."""
        if parent := self._tracing.current():
            self._parents.update(dict.fromkeys(keys_of(group, block_hashes), parent))
            while len(self._parents) > MAX_REMEMBERED:
                self._parents.popitem(last=False)

    def _span(self, call: str, group: Group, block_hashes: Sequence[bytes]) -> AbstractContextManager[Any]:
        parent = self._parents.get((group.fingerprint, group.idx, block_hashes[0]), "") if block_hashes else ""
        attributes: dict[str, str | int] = {"kvpool.tier": self._tier.name, "kvpool.blocks": len(block_hashes)}
        return self._tracing.span(f"kvpool.tier.{call}", parent, attributes)
