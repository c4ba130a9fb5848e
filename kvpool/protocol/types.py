"""Values that the client, the server and the plugin share. Frozen, without behaviour beyond validation.

Bitmaps are plain `int`s: bit i stands for shard i or block i.
"""

from __future__ import annotations

import enum
import itertools
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.protocol.errors import InvalidRequestError

INT_BYTES = 8
NONCE_BYTES, TOKEN_BYTES, PERMIT_BYTES, PERMIT_KEY_BYTES = 16, 16, 28, 32
"""Lengths of what a server gives its clients to reach its arena and its data port."""
HASH_BYTES = 32
"""Length of a block hash and of a namespace fingerprint (SHA-256)."""
MAX_RUNS = 1_024
"""Most runs that a server takes in one request."""
MAX_BATCH_CHUNKS = 65_536
"""Most chunks (blocks x shards) that a server takes in one put or get."""
MAX_DRAIN_MS = 3_600_000
"""Longest deadline of a drain."""


class PutStatus(enum.IntEnum):
    """Answer of `put_start` for one block: to be written, present already, or being written by another client."""

    GRANTED = 0
    PRESENT = 1
    BUSY = 2


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of one prefix in one KV-cache group.

    Args:
        group_idx: KV-cache group, >= 0.
        block_hashes: chained block hashes in prefix order, `HASH_BYTES` each.
        parent_hash: of the block before the first; empty at the start of a prefix. So the pool evicts a prefix's
            deepest blocks first.
    """

    group_idx: int
    block_hashes: Sequence[bytes]
    parent_hash: bytes = b""

    def __len__(self) -> int:
        return len(self.block_hashes)


def in_parts(runs: Sequence[BlockRun], max_blocks: int) -> Iterator[list[BlockRun]]:
    """The runs in parts of at most `max_blocks` blocks and `MAX_RUNS` runs."""
    part: list[BlockRun] = []
    room = max_blocks
    for run in runs:
        at = 0
        while at < len(run):
            if not room or len(part) == MAX_RUNS:
                yield part
                part, room = [], max_blocks
            piece = run
            if at or len(run) > room:
                parent = run.block_hashes[at - 1] if at else run.parent_hash
                piece = BlockRun(run.group_idx, run.block_hashes[at : at + room], parent)
            part.append(piece)
            at, room = at + len(piece), room - len(piece)
    if part:
        yield part


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Shards [start, start + count)."""

    start: int
    count: int

    @property
    def mask(self) -> int:
        return ((1 << self.count) - 1) << self.start

    def check(self, num_shards: int) -> None:
        """Raises InvalidRequestError unless the range lies in [0, num_shards)."""
        if self.count < 1 or self.start < 0 or self.start + self.count > num_shards:
            raise InvalidRequestError(
                f"shards [{self.start}, {self.start + self.count}) are not within the group's {num_shards} shards; "
                "name at least one of them"
            )


@dataclass(frozen=True, slots=True)
class PoolKey:
    """The content address of one chunk."""

    namespace: bytes
    group_idx: int
    block_hash: bytes
    shard: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk with its address, for inline puts and gets: exactly the group's `chunk_bytes`, and their xxh3-64."""

    key: PoolKey
    payload: bytes
    checksum: int
    parent_hash: bytes = b""


class MissCause(enum.IntEnum):
    """Why a lookup has not found a block; the values are those of the contract."""

    NEVER_STORED = 0  # Or the block left longer ago than the server remembers.
    BEING_WRITTEN = 1
    EVICTED = 2
    REMOVED = 3  # Or cleared, by request.
    CORRUPT = 4
    PUT_FAILED = 5  # Its writer gave it up, or was too slow.
    OTHER_NAMESPACE = 6  # Of the same tenant and salt.


@dataclass(frozen=True, slots=True)
class Miss:
    """Blocks of a run, one after the other, that one cause keeps from being found."""

    cause: MissCause
    count: int


class BlockState(enum.IntEnum):
    """Where explained blocks are: in the arena, in a tier alone, or nowhere; the values are those of the contract."""

    COMPLETE = 0
    IN_TIER = 1
    MISSING = 2


MAX_RANGES = 256
"""Ranges of one run in an explanation. The blocks behind them are not explained."""
MAX_MISSES = 8
"""Of one run. Where causes change more often, the last one counts for all blocks that follow."""


@dataclass(frozen=True, slots=True)
class RunHits:
    """Which blocks of one run are complete.

    Args:
        num_leading: complete blocks before the first that is not.
        complete: bitmap over the run; 0 where the lookup was `prefix_only`.
        num_pending: blocks that a tier is promoting; with `prefix_only`, those that follow the leading ones.
        missing: why blocks are missing, from the first missing one to the end of the run; empty if nobody asked.
    """

    num_leading: int
    complete: int = 0
    num_pending: int = 0
    missing: tuple[Miss, ...] = ()


@dataclass(frozen=True, slots=True)
class Slots:
    """Where the complete blocks of one run lie, in order. Integers have 8 bytes, little-endian.

    Args:
        offsets: arena offset of each block's slot.
        checksums: xxh3-64 of each chunk: blocks x the group's shards, block-major.
        permit: to read these whole slots through the data port; empty if the server has no data port.
    """

    offsets: bytes
    checksums: bytes
    permit: bytes = b""


@dataclass(frozen=True, slots=True)
class LeasedSlots:
    """Slots that may be read without another call, until their lease ends.

    Args:
        slots: all that the answer tells of the run, which the permit covers together.
        ends_at: by when they have to be read, monotonic seconds. The lease lasts longer: the client counts from when it
            asked, the server from when it answered.
        start, stop: which of them.
    """

    slots: Slots
    fingerprint: bytes
    boot_token: int
    ends_at: float
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def permitted_offsets(self) -> npt.NDArray[np.uint64]:
        """Arena offsets of all slots that the permit covers."""
        return np.frombuffer(self.slots.offsets, "<u8")

    def located(self, shards: ShardRange) -> Located:
        """As `get` would answer, but for its offsets: they are those of whole slots."""
        offsets = self.permitted_offsets
        sums = np.frombuffer(self.slots.checksums, "<u8").reshape(len(offsets), -1)[self.start : self.stop]
        return Located(
            max(0, int((self.ends_at - time.monotonic()) * 1000)),
            (True,) * len(self),
            tuple(offsets[self.start : self.stop].tolist()),
            tuple(sums[:, shards.start : shards.start + shards.count].ravel().tolist()),
            self.slots.permit,
        )


@dataclass(frozen=True, slots=True)
class Lookup:
    """Answer of a lookup.

    Args:
        hits: one a run.
        lease_id: of the lease on the complete blocks; 0: none.
        retry_after_ms: if a tier is promoting blocks: when to look up again. 0: no tier is.
        slots: one a run; empty if the lookup did not ask for them, has no lease, or is to be repeated.
        fingerprint, boot_token, ends_at: see `LeasedSlots`.
    """

    hits: tuple[RunHits, ...]
    lease_id: int = 0
    lease_ttl_ms: int = 0
    retry_after_ms: int = 0
    slots: tuple[Slots, ...] = ()
    fingerprint: bytes = b""
    boot_token: int = 0
    ends_at: float = 0.0

    def leased(self, nth: int, start: int, stop: int) -> LeasedSlots | None:
        """Where blocks [start, stop) of the nth run lie; None if the answer does not say it of all of them."""
        if not self.slots:
            return None
        hits, slots = self.hits[nth], self.slots[nth]
        if stop > hits.num_leading:
            wanted = (1 << stop) - (1 << start)
            if hits.complete & wanted != wanted:
                return None
            before = (hits.complete & (1 << start) - 1).bit_count()
            start, stop = before, before + stop - start
        return LeasedSlots(slots, self.fingerprint, self.boot_token, self.ends_at, start, stop)


@dataclass(frozen=True, slots=True)
class PutGrant:
    """Answer of `put_start`.

    Args:
        ticket_id: 0 if nothing was granted.
        statuses: one a block, in the order of the request.
        offsets: arena offset of each granted block's region, in the same order.
        permit: to write them through the data port; empty if the server has no data port.
    """

    ticket_id: int
    ticket_ttl_ms: int
    statuses: tuple[PutStatus, ...]
    offsets: tuple[int, ...]
    permit: bytes = b""


@dataclass(frozen=True, slots=True)
class PutReceipt:
    """Answer of `put_end`: how many blocks have these shards now, and how many became readable."""

    num_committed: int
    num_complete: int


@dataclass(frozen=True, slots=True)
class Located:
    """Answer of `get`.

    Args:
        lease_remaining_ms: how long the regions stay untouched.
        present: one a block, in the order of the request.
        offsets: arena offset of each present block's region.
        checksums: xxh3-64 of each chunk: present blocks x shards, block-major.
        permit: to read them through the data port; empty if the server has no data port.
    """

    lease_remaining_ms: int
    present: tuple[bool, ...]
    offsets: tuple[int, ...]
    checksums: tuple[int, ...]
    permit: bytes = b""


def join_located(parts: Sequence[Located]) -> Located:
    """The parts as one, without their permits: each part has a permit of its own."""
    return Located(
        min(part.lease_remaining_ms for part in parts),
        tuple(itertools.chain.from_iterable(part.present for part in parts)),
        tuple(itertools.chain.from_iterable(part.offsets for part in parts)),
        tuple(itertools.chain.from_iterable(part.checksums for part in parts)),
    )


@dataclass(frozen=True, slots=True)
class Existence:
    """Answer of `exists`, with one `RunHits` a run.

    Args:
        usable_tokens: the longest prefix that every group has the blocks for.
        load_seconds: how long engines have waited for loads of so many tokens, on average; 0: not known.
    """

    hits: tuple[RunHits, ...]
    usable_tokens: int
    load_seconds: float


class HintKind(enum.IntEnum):
    """What a client says of a prefix: keep it, it is needed no more, bring it up from a tier."""

    PIN = 1
    EXPIRE = 2
    PREFETCH = 3


MIN_PREFIX = 8
"""Fewest hexadecimal digits of a fingerprint in a quota: fewer could match another namespace by chance."""


@dataclass(frozen=True, slots=True)
class Quota:
    """An upper bound on what a tenant's or a namespace's entries hold of the arena.

    Args:
        subject: "tenant:NAME", or "namespace:" and a fingerprint in lower-case hexadecimal, or its first characters.
        limit_bytes, used_bytes: of their slots. In `set_quotas`, a limit of 0 deletes the quota, and use is ignored.
    """

    subject: str
    limit_bytes: int
    used_bytes: int = 0

    def check(self) -> None:
        """Raises InvalidRequestError unless the subject can be one."""
        kind, _, name = self.subject.partition(":")
        if kind not in ("tenant", "namespace") or not name:
            fix = "" if ":" in self.subject else f"; give tenant:{self.subject}"
            raise InvalidRequestError(
                f"quota subject {self.subject!r} is neither tenant:NAME nor namespace:FINGERPRINT{fix}"
            )
        hexadecimal = f"[0-9a-f]{{{MIN_PREFIX},{2 * HASH_BYTES}}}"
        if kind == "namespace" and not re.fullmatch(hexadecimal, name):
            raise InvalidRequestError(
                f"quota subject {self.subject!r}: give the first {MIN_PREFIX} characters of a fingerprint, or more, as "
                "`kvpool namespaces` shows them"
            )


def check_hash(value: bytes, what: str) -> None:
    """Raises InvalidRequestError unless `value` is a hash of `HASH_BYTES` bytes."""
    if len(value) != HASH_BYTES:
        raise InvalidRequestError(f"{what} has {len(value)} bytes, not {HASH_BYTES}: {value[:HASH_BYTES].hex()!r}")
