"""A tier whose calls have spans: children of the lookup that asked for the blocks, or of the put that stored them.

Used with `--otel` alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvpool.holdings import TierHoldings
from kvpool.namespace import NamespaceSpec
from kvpool.tracing import Tracing
from kvpool.types import TierStats
from kvpool_server.cache.entry import Entry, Observer
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.tiers.tier import Block, Tier

MAX_REMEMBERED = 8_192
"""Blocks whose lookup or put is remembered; the oldest is forgotten for another."""

Key = tuple[bytes, int, bytes]


class SpansOfBlocks(Observer):
    """Which span last concerned each block. Belongs to the pool's event loop."""

    def __init__(self, tracing: Tracing):
        self._tracing = tracing
        self._parents: OrderedDict[Key, str] = OrderedDict()

    def remember(self, fingerprint: bytes, group_idx: int, block_hashes: Sequence[bytes]) -> None:
        """The current span concerns these blocks; without one, nothing is remembered."""
        if parent := self._tracing.current():
            for block_hash in block_hashes:
                self._parents[fingerprint, group_idx, block_hash] = parent
            while len(self._parents) > MAX_REMEMBERED:
                self._parents.popitem(last=False)

    def parent(self, namespace: PoolNamespace, group_idx: int, block_hash: bytes) -> str:
        return self._parents.get((namespace.fingerprint, group_idx, block_hash), "")

    def stored(self, entry: Entry) -> None:
        self.remember(entry.group.fingerprint, entry.group.idx, [entry.block_hash])


class TracedTier(Tier):
    """See the module.

    Args:
        spans: of the blocks of one server.
    """

    def __init__(self, tier: Tier, tracing: Tracing, spans: SpansOfBlocks):
        self._tier = tier
        self._tracing = tracing
        self._spans = spans
        self.name = tier.name
        self.counters = tier.counters
        self.writes_at_once, self.reads_at_once = tier.writes_at_once, tier.reads_at_once

    def _attributes(self, num_blocks: int) -> dict[str, str | int]:
        return {"kvpool.tier": self.name, "kvpool.blocks": num_blocks}

    async def find(self, namespace: PoolNamespace, group_idx: int, block_hashes: Sequence[bytes]) -> list[bool]:
        parent = self._spans.parent(namespace, group_idx, block_hashes[0]) if block_hashes else ""
        with self._tracing.span("kvpool.tier.find", parent, self._attributes(len(block_hashes))):
            return await self._tier.find(namespace, group_idx, block_hashes)

    async def write(self, namespace: PoolNamespace, group_idx: int, blocks: Sequence[Block]) -> int:
        parent = self._spans.parent(namespace, group_idx, blocks[0].block_hash) if blocks else ""
        with self._tracing.span("kvpool.tier.write", parent, self._attributes(len(blocks))) as span:
            written = await self._tier.write(namespace, group_idx, blocks)
            span.set_attribute("kvpool.written_blocks", written)
            return written

    async def read(
        self, namespace: PoolNamespace, group_idx: int, block_hashes: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[Sequence[int] | None]:
        parent = self._spans.parent(namespace, group_idx, block_hashes[0]) if block_hashes else ""
        with self._tracing.span("kvpool.tier.read", parent, self._attributes(len(block_hashes))) as span:
            found = await self._tier.read(namespace, group_idx, block_hashes, into)
            span.set_attribute("kvpool.read_blocks", len(found) - found.count(None))
            return found

    async def remove(self, namespace: PoolNamespace, group_idx: int, block_hashes: Sequence[bytes]) -> None:
        await self._tier.remove(namespace, group_idx, block_hashes)

    async def clear(self, fingerprint: bytes = b"") -> None:
        await self._tier.clear(fingerprint)

    async def open(self) -> None:
        await self._tier.open()

    async def close(self) -> None:
        await self._tier.close()

    def known(self, namespace: PoolNamespace, group_idx: int, block_hashes: Sequence[bytes]) -> list[bool] | None:
        self._spans.remember(namespace.fingerprint, group_idx, block_hashes)  # A lookup asks before it prefetches.
        return self._tier.known(namespace, group_idx, block_hashes)

    def specs(self) -> list[NamespaceSpec]:
        return self._tier.specs()

    def holdings(self, fingerprint: bytes) -> TierHoldings:
        return self._tier.holdings(fingerprint)

    def stats(self) -> TierStats:
        return self._tier.stats()
