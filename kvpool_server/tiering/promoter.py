"""Promotes blocks that lookups miss from tiers to the arena, in prefix order and in batches, for later lookups.

Tenants take turns, so do the namespaces of each, and the prompts of each namespace: a turn is one batch. Blocks behind
a pending block wait in its queue, so that no block is read before its ancestors: a prompt that begins like a pending
one waits for all of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import structlog

from kvpool.protocol.errors import KVPoolError, OutOfSpaceError
from kvpool.protocol.types import BlockRun, PutGrant, PutStatus
from kvpool_server.cache.arena import ZEROED_AT_ONCE
from kvpool_server.cache.entry import Group
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.server_access import commit, reserve
from kvpool_server.cache.steps import Run, Steps
from kvpool_server.tiering.demoter import Watermark
from kvpool_server.tiers.calls import Health
from kvpool_server.tiers.tier import BlockKey, Tier, TierError, keys_of

log = structlog.get_logger()

FIRST_BATCH_BYTES, BATCH_GROWTH = 4 << 20, 4
"""Read in a prefetch's first call: its blocks can be loaded while the next come up. Each batch is so many times the
last."""
MAX_READ_BLOCKS, MAX_ARENA_SHARE = 256, 1 / 8
"""Of one read, at most: blocks, which become readable in one step, and a share of the arena, which it evicts."""
MAX_PENDING, MAX_SEARCHING = 1 << 16, 256
"""Blocks of one tier that are queued, and questions which blocks it has that are under way. More are misses."""
MIN_RETRY_MS, MAX_RETRY_MS = 1, 50
READ_S = 0.25
"""What one read may take, by the tier's rate: another prompt's first blocks wait behind it."""
KEPT = 3 / 4
"""Weight of the reads before each one in the tier's rate; small ones, which take long for their bytes, count little."""
STALE_S = 10.0
"""A prefetch that no lookup has asked for in so long is dropped: its client is gone."""
ANSWER_VALID_S = 5.0
"""How long the answer of a tier's `find` is used, and the failure of a read."""
MAX_ANSWERS = 1 << 17


@dataclass(slots=True)
class _Prefetch:
    """Blocks of one prefix that are to be read, in prefix order.

    Args:
        asked_at: when a lookup last asked for one of them.
        queue: holds it until it has been read, behind what must be read before.
        needs_parent: what precedes them was there or pending; they are dropped if it is not there at their turn.
        batch_bytes: of the next read, if the tier takes as many.
        is_lost: one could not be read, or what precedes them is not there.
    """

    group: Group
    parent_hash: bytes
    block_hashes: list[bytes]
    asked_at: float
    queue: deque[_Prefetch]
    needs_parent: bool
    batch_bytes: int
    is_lost: bool = False


@dataclass(eq=False)
class Promoter:
    """Reads from one tier.

    Args:
        memory: the arena: uint8 [arena_bytes].
        watermark: frees slots, where a tier is written to on eviction; else None.
        on_progress: called when blocks have come up or will not come, or the tier has said which blocks it has.
        is_clearing: whether the blocks of a namespace, by its fingerprint, are being dropped.
    """

    _pool: Pool
    _memory: npt.NDArray[np.uint8]
    _tier: Tier
    _health: Health
    _watermark: Watermark | None
    _clock: Callable[[], float]
    _on_progress: Callable[[], None]
    _run: Run
    _is_clearing: Callable[[bytes], bool]

    def __post_init__(self) -> None:
        self._queues: OrderedDict[str, OrderedDict[bytes, deque[deque[_Prefetch]]]] = OrderedDict()
        """By tenant and fingerprint, one queue for each prompt. None is empty; at each level, the first one is next."""
        self._pending: dict[BlockKey, _Prefetch] = {}
        self._answers: OrderedDict[BlockKey, tuple[bool, float]] = OrderedDict()
        """Whether the tier has a block, and how long that is believed."""
        self._searching: dict[BlockKey, tuple[float, int]] = {}
        self._reading: dict[BlockKey, tuple[float, int]] = {}
        """When each `find` and each `read` began, and its bytes, by its first block."""
        self._work = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._read_s = self._read_bytes = 0.0

    def prefetch(
        self, group: Group, run: Sequence[tuple[bytes, bytes]], behind: Sequence[bytes], prefix_only: bool
    ) -> int:
        """Queues the blocks that the tier has; returns how many are pending, those included that the tier may have.

        Args:
            run: (block hash, parent's hash) of each, in prefix order.
            behind: hashes of what follows the run, which later calls will name.
            prefix_only: stop at the first block that the tier lacks.
        """
        if not self._health.is_available:
            return 0
        now = self._clock()
        hashes = [block_hash for block_hash, _ in run]
        if prefix_only and self._tier.known(group, hashes[:1]) == [False]:
            return 0  # Checked first, because it is cheap and the case of most misses.
        keys = keys_of(group, hashes)
        pending_of = list(map(self._pending.get, keys))
        new = [each for each, pending in zip(hashes, pending_of, strict=True) if pending is None]
        known_of_new = iter(self._tier.known(group, new) or itertools.repeat(None))
        request: _Prefetch | None = None
        before = b""
        queue: deque[_Prefetch] = deque()
        batch_bytes = FIRST_BATCH_BYTES
        num_pending = 0
        for nth, (block_hash, parent_hash) in enumerate(run):
            key = keys[nth]
            if (pending := pending_of[nth]) is not None:
                pending.asked_at = now
                queue, batch_bytes = pending.queue, pending.batch_bytes  # What follows continues its prefix.
                num_pending += 1
                request = None
                continue
            in_tier = self._is_in_tier(key, next(known_of_new), now)
            if in_tier is None:
                if len(self._searching) >= MAX_SEARCHING and key not in self._searching:
                    return num_pending
                has_parent = self._is_in_tier((group.fingerprint, group.idx, parent_hash), None, now)
                self._search(group, [*hashes[nth:], *(behind if has_parent else ())])
                return num_pending + len(hashes) - nth
            if not in_tier or len(self._pending) >= MAX_PENDING:
                if prefix_only:
                    return num_pending
                request = None
                continue
            if request is None or parent_hash != before:
                needs_parent = parent_hash in group.index or (*key[:2], parent_hash) in self._pending
                request = _Prefetch(group, parent_hash, [], now, queue, needs_parent, batch_bytes)
                queue.append(request)
                if len(queue) == 1:
                    self._offer(queue)
            request.block_hashes.append(block_hash)
            self._pending[key], before = request, block_hash
            num_pending += 1
        return num_pending

    def is_pending(self, key: BlockKey) -> bool:
        """Whether a block is to be read, or a question which blocks the tier has begins with it."""
        return key in self._pending or key in self._searching

    @property
    def is_idle(self) -> bool:
        return not self._pending and not self._searching

    @property
    def retry_after_ms(self) -> int:
        """When the next answer or batch is likely to be there, by the tier's rate; the later it is, the less often."""
        now = self._clock()
        calls = [*self._reading.values(), *self._searching.values()]
        due_s = [began_at + nbytes / self._bytes_per_s - now for began_at, nbytes in calls]
        wait_s = min((due if due > 0 else -due / 2 for due in due_s), default=0.0)
        return min(MAX_RETRY_MS, max(MIN_RETRY_MS, math.ceil(1000 * wait_s)))

    @property
    def _bytes_per_s(self) -> float:
        return self._read_bytes / self._read_s if self._read_s else math.inf

    def _is_in_tier(self, key: BlockKey, known: bool | None, now: float) -> bool | None:
        """Whether the tier has a block, by what it knows and what it last answered; None: it has to be asked."""
        remembered = self._answers.get(key)
        if remembered is None or now > remembered[1]:
            return known
        # That a block is absent, or could not be read, is newer than what a journal or an index says.
        return known if known is not None and remembered[0] else remembered[0]

    def _remember(self, key: BlockKey, in_tier: bool) -> None:
        self._answers[key] = (in_tier, self._clock() + ANSWER_VALID_S)
        self._answers.move_to_end(key)
        if len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)

    def _search(self, group: Group, block_hashes: list[bytes]) -> None:
        first = (group.fingerprint, group.idx, block_hashes[0])
        if first not in self._searching:
            self._searching[first] = self._clock(), 0
            task = asyncio.create_task(self._find(group, block_hashes, first), context=Context())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _find(self, group: Group, block_hashes: list[bytes], first: BlockKey) -> None:
        try:
            with self._health.call():
                found = await self._tier.find(group, block_hashes)
        except TierError:
            found = [False] * len(block_hashes)
        finally:
            del self._searching[first]
        for key, in_tier in zip(keys_of(group, block_hashes), found, strict=True):
            self._remember(key, in_tier)
        self._on_progress()

    async def run(self) -> None:
        """Reads queued blocks until it is cancelled; as many of these run as the tier takes reads at once."""
        while True:
            await self._work.wait()
            if self._queues:
                await self._read_next()
            else:
                self._work.clear()

    def _offer(self, queue: deque[_Prefetch]) -> None:
        """Gives a queue its next turn, after the others of its namespace."""
        group = queue[0].group
        of_tenant = self._queues.setdefault(group.tenant, OrderedDict())
        of_tenant.setdefault(group.fingerprint, deque()).append(queue)
        self._work.set()

    async def _read_next(self) -> None:
        tenant, of_tenant = self._queues.popitem(last=False)
        fingerprint, queues = of_tenant.popitem(last=False)
        queue = queues.popleft()
        if queues:
            of_tenant[fingerprint] = queues
        if of_tenant:
            self._queues[tenant] = of_tenant
        request = queue[0]
        group, slot_bytes = request.group, request.group.spec.slot_bytes
        most_bytes = min(self._tier.read_bytes, MAX_ARENA_SHARE * len(self._memory))
        batch_bytes = round(min(request.batch_bytes, most_bytes, max(FIRST_BATCH_BYTES, READ_S * self._bytes_per_s)))
        request.batch_bytes = BATCH_GROWTH * batch_bytes
        request.is_lost |= request.needs_parent and request.parent_hash not in group.index
        is_dropped = request.is_lost or self._clock() - request.asked_at > STALE_S or not self._health.is_available
        most = len(request.block_hashes) if is_dropped else max(1, min(MAX_READ_BLOCKS, batch_bytes // slot_bytes))
        block_hashes, request.block_hashes = request.block_hashes[:most], request.block_hashes[most:]
        run = BlockRun(group.idx, block_hashes, request.parent_hash)
        request.parent_hash, request.needs_parent = block_hashes[-1], True
        keys = keys_of(group, block_hashes)
        grant = None
        try:
            try:
                if is_dropped or self._is_clearing(fingerprint):
                    self._tier.counters["dropped_promotions"] += len(keys)
                    if request.is_lost:
                        self.forget(group, block_hashes)
                else:
                    self._reading[keys[0]] = self._clock(), len(keys) * slot_bytes
                    block_hashes, grant = await self._reserve(group, run)
            finally:  # The next batch has to find the entries of this one, or it would take slots of its own prefix.
                if not request.block_hashes:
                    queue.popleft()
                if queue:
                    self._offer(queue)
            if grant is not None and not await self._read(group, block_hashes, grant):
                request.is_lost |= group.needs_prefix  # Blocks behind one that is missing are of no use.
        finally:
            self._reading.pop(keys[0], None)
            for key in keys:
                self._pending.pop(key, None)
            self._on_progress()

    async def _read(self, group: Group, reserved: Sequence[bytes], grant: PutGrant) -> bool:
        """Reads blocks into the arena; False if any is not readable afterwards."""
        size = group.spec.slot_bytes
        statuses = zip(reserved, grant.statuses, strict=True)
        granted = [block_hash for block_hash, status in statuses if status == PutStatus.GRANTED]
        if not granted:
            return True
        into = [self._memory[offset : offset + size].data for offset in grant.offsets]
        sums: Sequence[Sequence[int] | None] = [None] * len(granted)
        began_at = self._clock()
        try:
            try:
                # Since they were queued: their removal has not reached the tier yet, which would bring them back.
                are_kept = all(self._is_in_tier(key, True, began_at) for key in keys_of(group, granted))
                if self._is_clearing(group.fingerprint) or not are_kept:
                    raise TierError("a block is being dropped")
                with self._health.call():
                    sums = await self._tier.read(group, granted, into)
            except TierError:
                pass  # `Health` has logged what the tier raised.
            unread = [nth for nth, checksums in enumerate(sums) if checksums is None]
            if len(unread) < len(granted):
                self._read_s = KEPT * self._read_s + self._clock() - began_at
                self._read_bytes = KEPT * self._read_bytes + (len(granted) - len(unread)) * size
            if unread and self._pool.arena.has_tenants:
                await self._run(_zero([into[nth] for nth in unread]))
        finally:
            promoted = commit(self._pool, grant.ticket_id, sums)
        self._tier.counters["promoted_blocks"] += promoted
        self._tier.counters["missed_promotions"] += len(granted) - promoted
        self.forget(group, [granted[nth] for nth in unread])
        return promoted == len(granted)

    async def _reserve(self, group: Group, run: BlockRun) -> tuple[list[bytes], PutGrant | None]:
        """Reserves slots for a run or, if there are too few, for its first half, quarter and so on; None: for none."""
        hashes, count = list(run.block_hashes), len(run)
        grant = None
        async with contextlib.nullcontext() if self._watermark is None else self._watermark.room(group, count):
            while grant is None and count:
                some = BlockRun(run.group_idx, hashes[:count], run.parent_hash)
                try:
                    grant = await self._run(reserve(self._pool, group, [some]))
                except OutOfSpaceError as error:
                    count //= 2
                    log.debug("too few free slots to promote blocks", tier=self._tier.name, error=str(error))
                except KVPoolError:  # The namespace is closed.
                    count = 0
        self._tier.counters["dropped_promotions"] += len(hashes) - count
        self.forget(group, hashes[count:])  # The next lookup must not queue them again at once.
        return hashes[:count], grant

    def forget(self, group: Group, block_hashes: Sequence[bytes]) -> None:
        """Prefetches none of these blocks for a while."""
        for key in keys_of(group, block_hashes):
            self._remember(key, False)


def _zero(unread: Sequence[memoryview]) -> Steps[None]:
    """Clears the slots of blocks that were not read, because bytes of another tenant may have come instead.

    So it is if a neighbour's slot was given to another block while this server read it.
    """
    for view in unread:
        for start in range(0, view.nbytes, ZEROED_AT_ONCE):
            part = view[start : start + ZEROED_AT_ONCE]
            part[:] = bytes(part.nbytes)
            yield
