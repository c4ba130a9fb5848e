"""What a tier is: a place under the arena that keeps blocks longer, or for more servers, and takes longer to answer.

The event loop calls it; what takes time is done by threads of the tier's own. A tier never decides what the pool holds:
it is told to keep blocks and asked for them, and may forget any of them at any time.

What it must not do is give wrong bytes: `read` verifies what it has read, where it lies then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.holdings import TierHoldings
from kvpool.namespace import NamespaceSpec
from kvpool.types import TierStats
from kvpool_server.cache.namespaces import Namespace

COUNTERS = (
    "demoted_blocks",
    "dropped_demotions",
    "refused_blocks",
    "promoted_blocks",
    "missed_promotions",
    "dropped_promotions",
    "corrupt_blocks",
    "evicted_blocks",
    "read_bytes",
    "written_bytes",
)
"""What is counted of every tier."""


class TierError(Exception):
    """A tier cannot do what it is there for; the message names the tier and what is wrong."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block on its way down.

    Args:
        parent_hash: of the block before it; empty at the start of a prefix.
        checksums: xxh3-64 of each of its chunks.
        payload: its chunks, one after the other: uint8 [slot_bytes], contiguous.
    """

    block_hash: bytes
    parent_hash: bytes
    checksums: Sequence[int]
    payload: memoryview


class Tier(ABC):
    """See the module. Called by one event loop; `open` first, `close` last.

    Attributes:
        name: what operators call it, for example "file:/mnt/kv".
        counters: since the start.
    """

    name: str
    counters: Counter[str]

    @abstractmethod
    async def open(self) -> None:
        """Gets ready. Raises ConfigError where it cannot; nothing is left behind then."""

    @abstractmethod
    def known(self, namespace: Namespace, group_idx: int, block_hashes: Sequence[bytes]) -> list[bool] | None:
        """Which of these blocks are there, without waiting; None if that cannot be said without asking somebody."""

    @abstractmethod
    async def find(self, namespace: Namespace, group_idx: int, block_hashes: Sequence[bytes]) -> list[bool]:
        """Which of these blocks are there. Raises TierError."""

    @abstractmethod
    async def write(self, namespace: Namespace, group_idx: int, blocks: Sequence[Block]) -> int:
        """Keeps blocks; returns how many are there now, those that were there already among them.

        The payloads are not touched any more once it has returned or raised.

        Raises:
            TierError: the tier has failed.
        """

    @abstractmethod
    async def read(
        self, namespace: Namespace, group_idx: int, block_hashes: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[Sequence[int] | None]:
        """Reads blocks, and verifies them.

        Args:
            into: where each goes: uint8 [slot_bytes], contiguous; not touched any more once it has returned or raised.

        Returns:
            For each the checksums of its chunks, which are those of what is in `into` now; None for one that is not
            there, or no longer what was stored.

        Raises:
            TierError: the tier has failed.
        """

    @abstractmethod
    async def remove(self, namespace: Namespace, group_idx: int, block_hashes: Sequence[bytes]) -> None:
        """Forgets blocks that others must not read again. Raises TierError."""

    @abstractmethod
    async def clear(self, fingerprint: bytes = b"") -> None:
        """Forgets all blocks of a namespace, or of all. Raises TierError."""

    def specs(self) -> list[NamespaceSpec]:
        """Of the namespaces whose blocks it holds, oldest first, where it knows them. Good once it is open."""
        return []

    @abstractmethod
    def holdings(self, fingerprint: bytes) -> TierHoldings:
        """What it holds of a namespace, as far as this server knows."""

    @abstractmethod
    def stats(self) -> TierStats:
        """A snapshot."""

    @abstractmethod
    async def close(self) -> None:
        """Ends its threads, as far as they end. Idempotent, also after an `open` that failed."""
