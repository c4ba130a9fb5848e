"""What a tier is: a place under the arena that keeps blocks longer, or for more servers, and takes longer to answer.

A tier decides nothing about the arena: the server has it write blocks and read them back, and a tier may forget any
block at any time. A tier must never return wrong bytes: `read` verifies them with `is_sound` where they lie afterwards.

The event loop calls a tier; work that takes time belongs on threads of the tier's own.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field

from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import BlockRun
from kvpool.transport.segment import Segment
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.eviction import Policy
from kvpool_server.cache.steps import Run, at_once

if TYPE_CHECKING:
    from kvpool.v1 import pool_pb2 as pb

COUNTERS = {
    # Counted by the server
    "demoted_blocks": "Blocks written to the tier.",
    "dropped_demotions": "Blocks not written to the tier because it was slow or unavailable.",
    "promoted_blocks": "Blocks promoted from the tier: hits that the arena alone would have missed.",
    "missed_promotions": "Blocks that were lost or corrupt in the tier when a lookup wanted them.",
    "dropped_promotions": "Blocks not promoted because no lookup wanted them any more, or the arena had no room.",
    # Counted by the tier
    "refused_blocks": "Blocks for which the tier had no room.",
    "corrupt_blocks": "Blocks dropped because their bytes in the tier had changed, as after a power cut.",
    "evicted_blocks": "Blocks evicted from the tier to make room.",
    "unannounced_blocks": "Blocks that the directory of servers was not told of at once: it was slow or away.",
    "read_bytes": "Bytes read from the tier whose checksums matched.",
    "written_bytes": "Bytes written to the tier.",
}
"""What is counted for each tier, with the HELP text of each metric."""
BlockKey = tuple[bytes, int, bytes]
"""(fingerprint, group_idx, block_hash)"""


def keys_of(group: Group, block_hashes: Iterable[bytes]) -> list[BlockKey]:
    """The key of each block."""
    fingerprint, idx = group.fingerprint, group.idx
    return [(fingerprint, idx, block_hash) for block_hash in block_hashes]


class TierError(Exception):
    """A call to a tier has failed; the message names the tier and the failure."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block to be written to a tier.

    Args:
        parent_hash: hash of the block before it; empty at the start of a prefix.
        checksums: xxh3-64 of each of its chunks.
        payload: its chunks, one after the other: uint8 [slot_bytes], contiguous.
    """

    block_hash: bytes
    parent_hash: bytes
    checksums: Sequence[int]
    payload: memoryview


def is_sound(payload: memoryview, checksums: Sequence[int]) -> bool:
    """Whether the chunks of a block, uint8 [slot_bytes], match their checksums."""
    size = payload.nbytes // len(checksums)
    # Unlike `hashing.checksum`, xxh3_64 releases the GIL for large chunks: threads verify beside the event loop.
    return all(
        xxhash.xxh3_64(payload[nth * size :][:size]).intdigest() == expected for nth, expected in enumerate(checksums)
    )


class Tier(ABC):
    """A place under the arena that keeps blocks. One event loop calls `open` first and `close` last.

    Args:
        name: what operators call the tier, for example "file:/mnt/kv".

    Attributes:
        counters: COUNTERS, since the start; the server counts what it moves, the tier the rest.
        writes_at_once, reads_at_once: calls of `write` and of `read` that the server has under way at most.
        read_bytes: of one call of `read`: smaller ones are readable sooner, larger ones read faster.
        keeps: whether blocks are written to it; else it has those of other servers.
        hands_over: whether `hand_over` is to be called when the server drains.
    """

    keeps = True
    hands_over = False
    writes_at_once = 1
    reads_at_once = 2
    read_bytes = 16 << 20

    def __init__(self, name: str):
        self.name = name
        self.counters = dict.fromkeys(COUNTERS, 0)

    @abstractmethod
    async def find(self, group: Group, block_hashes: Sequence[bytes]) -> list[bool]:
        """Whether the tier has each block. Raises TierError."""

    @abstractmethod
    async def write(self, group: Group, blocks: Sequence[Block]) -> int:
        """Stores blocks; returns how many of them the tier has now, also from before. Raises TierError.

        A tier without room evicts blocks, or refuses these: that is no error. The payloads are not read any more once
        the call has returned or raised.
        """

    @abstractmethod
    async def read(
        self, group: Group, block_hashes: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[Sequence[int] | None]:
        """Reads and verifies blocks. Raises TierError.

        Args:
            into: a destination for each block: uint8 [slot_bytes], contiguous; not written any more once the call has
                returned or raised.

        Returns:
            For each block the checksums of the chunks that lie in `into` now; None for a block that is missing or
                corrupt.
        """

    @abstractmethod
    async def remove(self, group: Group, block_hashes: Sequence[bytes]) -> None:
        """Removes blocks. Raises TierError."""

    @abstractmethod
    async def clear(self, fingerprint: bytes = b"") -> None:
        """Removes all blocks of a namespace, or of all namespaces. Raises TierError."""

    async def open(self) -> None:
        """Gets ready. Raises ConfigError if the tier cannot work; nothing is left behind then."""
        return

    async def close(self) -> None:
        """Ends the tier's threads, except those that hang. Idempotent, also after an `open` that failed."""
        return

    async def holders(self, group: Group, block_hashes: Sequence[bytes], away: dict[str, str]) -> Sequence[bool | str]:
        """As `find`, for operators: in the place of True, a tier of other servers names the server that has a block.

        Args:
            away: takes each server that has not said which blocks it has, and why.
        """
        return await self.find(group, block_hashes)

    async def hand_over(self, prompts: Iterator[Prompt]) -> None:
        """Has other servers get prompts of this one, the first first; cancelled at the deadline of the drain."""
        return

    def known(self, group: Group, block_hashes: Sequence[bytes]) -> list[bool] | None:
        """As `find`, at once and from memory; None if only `find` can tell."""
        return None

    def hold(self, entry: Entry, *, is_there: bool) -> None:
        """The arena has a block now, or no longer."""
        return

    def specs(self) -> list[NamespaceSpec]:
        """The namespaces that an open tier has blocks of, oldest first, as far as it knows their specs."""
        return []

    def holdings(self, fingerprint: bytes) -> pb.TierHoldings:
        """What the tier holds of a namespace, as far as this server knows."""
        from kvpool.v1 import pool_pb2 as pb  # Not to be loaded by those who read a tier's options.

        return pb.TierHoldings(tier=self.name)

    def stats(self) -> pb.TierStats:
        """A snapshot, but for `up`, which the server knows."""
        from kvpool.v1 import pool_pb2 as pb

        return pb.TierStats(name=self.name, counters=self.counters)


Prompt = dict[Group, BlockRun]
"""The blocks of a prompt in each group of its namespace."""


class OpenFiles:
    """The open files of all tiers of a server, least recently used first: `most`, and those in use beyond.

    Files are opened and closed outside of the lock: a file system that hangs stops only its own users.

    Attributes:
        files: by owner and the owner's key; only with `lock` held. A file is closed with its last reference.
    """

    def __init__(self, most: int = 256):
        self.most = most
        self.lock = threading.Lock()
        self.files: OrderedDict[tuple[object, object], Any] = OrderedDict()


@dataclass(frozen=True, slots=True)
class TierContext:
    """The server that a tier works for, and what its tiers share.

    Args:
        listen: host and port of the server.
        policy: makes the eviction policy of a tier that evicts by itself.
        handover_s: how long a server of the same name, which this one replaces, may take to stop.
        open_files: bounds the files that all tiers of the server keep open.
        insecure_network: other hosts may be reached without encryption.
        port: of the server; 0 as long as it does not listen.
        boot_token: by which the server's answers name its start.
        arena: the memory in which all that is read lands, for processes that map it; None: not known.
        run: does work on many blocks in steps, between which the server serves other calls.
    """

    listen: tuple[str, int]
    policy: Callable[[], Policy]
    handover_s: float = 0.0
    open_files: OpenFiles = field(default_factory=OpenFiles)
    insecure_network: bool = False
    port: Callable[[], int] = lambda: 0
    boot_token: int = 0
    arena: Callable[[], Segment | None] = lambda: None
    run: Run = at_once


class TierOptions(BaseModel):
    """Base of each kind's options. A field is an option of `--tier`; its description is the option's documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    EXAMPLE: ClassVar[str]
    """A minimal `--tier`, for errors and help."""
    PLACE: ClassVar[str] = ""
    """The option that stands first, without its name; empty: none does."""

    write: Literal["through", "back"] = Field(
        "through", description="through writes a block when it is stored; back writes it before its eviction"
    )
    key_file: str = Field(
        "", description="file with the key that authenticates blocks; servers that share the tier have the same"
    )

    @property
    @abstractmethod
    def tier_name(self) -> str:
        """What operators call the tier."""

    @abstractmethod
    def make(self, context: TierContext) -> Tier:
        """The tier, not opened yet. Raises ConfigError if a package or a device is missing."""
