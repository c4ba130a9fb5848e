"""Up: blocks on their way from one tier to the arena.

A lookup that misses says which blocks it wants; they are brought up in their order, in batches, and are there for
whoever asks next. Nobody waits here: who wants to asks again.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import structlog

from kvpool.errors import KVPoolError, OutOfSpaceError
from kvpool.types import BlockRun, PutGrant, PutStatus
from kvpool_server.cache.entry import Group
from kvpool_server.cache.namespaces import Namespace
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.tier_access import Moves
from kvpool_server.tiering.watermark import Watermark
from kvpool_server.tiers.health import Health
from kvpool_server.tiers.tier import Tier, TierError

log = structlog.get_logger()

BATCH_BYTES = 16 << 20
"""Read at once. Smaller ones are there sooner, larger ones read faster."""
BATCHES_AT_ONCE = 2
STALE_S = 10.0
"""Who has not asked for so long has gone."""
ANSWER_GOOD_S = 5.0
"""How long it is believed that a block is there, or not, where that takes asking, or reading."""
MAX_ANSWERS = 1 << 17

BlockKey = tuple[bytes, int, bytes]
"""(fingerprint, group_idx, block_hash)"""


@dataclass(slots=True)
class _Wish:
    """Blocks of one prefix, in its order.

    Args:
        leading: they are of no use behind one that does not come.
    """

    namespace: Namespace
    group_idx: int
    parent_hash: bytes
    block_hashes: list[bytes]
    asked_at: float
    leading: bool


class Promoter:
    """From one tier.

    Args:
        memory: the arena: uint8 [arena_bytes].
        room: where blocks have to be written down before they go; None: nowhere.
    """

    def __init__(
        self,
        pool: Pool,
        memory: npt.NDArray[np.uint8],
        tier: Tier,
        health: Health,
        room: Watermark | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._moves = Moves(pool)
        self._memory = memory
        self._tier = tier
        self._health = health
        self._watermark = room
        self._clock = clock
        self._wishes: deque[_Wish] = deque()
        self._coming: dict[BlockKey, _Wish] = {}
        self._answers: OrderedDict[BlockKey, tuple[bool, float]] = OrderedDict()
        self._searching: set[BlockKey] = set()
        self._work = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._batch_s = 0.0

    # What the loop asks

    def wants(self, namespace: Namespace, group_idx: int, run: Sequence[tuple[bytes, bytes]], leading: bool) -> int:
        """Asks for blocks: of how many it is thought that they come, or may come.

        Args:
            run: (block hash, parent's hash) of each, in prefix order.
            leading: stop at the first that does not come.
        """
        if not self._health.is_available:
            return 0
        now = self._clock()
        hashes = [block_hash for block_hash, _ in run]
        if leading and self._tier.known(namespace, group_idx, hashes[:1]) == [False]:
            return 0  # What most prompts that miss come to, at little cost.
        known = self._tier.known(namespace, group_idx, hashes)
        wish: _Wish | None = None
        pending = 0
        for nth, (block_hash, parent_hash) in enumerate(run):
            key = (namespace.fingerprint, group_idx, block_hash)
            if (coming := self._coming.get(key)) is not None:
                coming.asked_at = now
                pending += 1
                wish = None
                continue
            is_there = self._answer(key, None if known is None else known[nth], now)
            if is_there is None:
                return pending + self._search(namespace, group_idx, hashes[nth:])
            if not is_there:
                if leading:
                    return pending
                wish = None
                continue
            if wish is None:
                wish = _Wish(namespace, group_idx, parent_hash, [], now, leading)
                self._wishes.append(wish)
                self._work.set()
            wish.block_hashes.append(block_hash)
            self._coming[key] = wish
            pending += 1
        return pending

    @property
    def retry_after_ms(self) -> int:
        """When more is likely to be there."""
        return min(50, max(2, int(500 * self._batch_s)))

    def _answer(self, key: BlockKey, known: bool | None, now: float) -> bool | None:
        remembered = self._answers.get(key)
        if remembered is None or now > remembered[1]:
            return known
        # That it is not there, or could not be read, is newer than what a journal or an index says.
        return known if known is not None and remembered[0] else remembered[0]

    def _remember(self, key: BlockKey, is_there: bool) -> None:
        self._answers[key] = (is_there, self._clock() + ANSWER_GOOD_S)
        self._answers.move_to_end(key)
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)

    # Searching, where a tier has to be asked

    def _search(self, namespace: Namespace, group_idx: int, block_hashes: list[bytes]) -> int:
        first = (namespace.fingerprint, group_idx, block_hashes[0])
        if first not in self._searching:
            self._searching.add(first)
            self._start(self._find(namespace, group_idx, block_hashes, first))
        return len(block_hashes)

    async def _find(self, namespace: Namespace, group_idx: int, block_hashes: list[bytes], first: BlockKey) -> None:
        try:
            with self._health.call():
                found = await self._tier.find(namespace, group_idx, block_hashes)
        except TierError:
            found = [False] * len(block_hashes)
        finally:
            self._searching.discard(first)
        for block_hash, is_there in zip(block_hashes, found, strict=True):
            self._remember((namespace.fingerprint, group_idx, block_hash), is_there)

    # Reading

    async def run(self) -> None:
        """Reads, for ever."""
        while True:
            await self._work.wait()
            if self._wishes:
                await self._read_next()
            else:
                self._work.clear()

    async def _read_next(self) -> None:
        wish = self._wishes[0]
        most = max(1, BATCH_BYTES // wish.namespace.groups[wish.group_idx].spec.slot_bytes)
        block_hashes, wish.block_hashes = wish.block_hashes[:most], wish.block_hashes[most:]
        parent_hash, wish.parent_hash = wish.parent_hash, block_hashes[-1]
        if not wish.block_hashes:
            self._wishes.popleft()
        keys = [(wish.namespace.fingerprint, wish.group_idx, block_hash) for block_hash in block_hashes]
        try:
            if self._clock() - wish.asked_at > STALE_S or not self._health.is_available:
                self._tier.counters["dropped_promotions"] += len(keys)
                return
            all_came = await self._read(wish.namespace, BlockRun(wish.group_idx, block_hashes, parent_hash))
            if wish.leading and not all_came:
                self._give_up(wish)
        finally:
            for key in keys:
                self._coming.pop(key, None)

    def _give_up(self, wish: _Wish) -> None:
        """Drops what a wish still waits for."""
        if wish.block_hashes:
            self._tier.counters["dropped_promotions"] += len(wish.block_hashes)
            for block_hash in wish.block_hashes:
                self._coming.pop((wish.namespace.fingerprint, wish.group_idx, block_hash), None)
            self._wishes.remove(wish)
            wish.block_hashes = []

    async def _read(self, namespace: Namespace, run: BlockRun) -> bool:
        group = namespace.groups[run.group_idx]
        size = group.spec.slot_bytes
        if self._watermark is not None:
            await self._watermark.need(size, len(run))
        raising, grant = self._reserve(namespace, group, run)
        if grant is None:
            return False
        granted = [
            block_hash
            for block_hash, status in zip(raising, grant.statuses, strict=True)
            if status == PutStatus.GRANTED
        ]
        if not granted:
            return len(raising) == len(run)
        into = [self._memory[offset : offset + size].data for offset in grant.offsets]
        sums: Sequence[Sequence[int] | None] = [None] * len(granted)
        began_at = self._clock()
        try:
            with self._health.call():
                sums = await self._tier.read(namespace, run.group_idx, granted, into)
        except TierError:
            pass  # `Health` has said so.
        finally:
            raised = self._moves.raise_end(grant.ticket_id, sums)
        self._batch_s = self._clock() - began_at
        self._tier.counters["promoted_blocks"] += raised
        self._tier.counters["missed_promotions"] += len(granted) - raised
        for block_hash, came in zip(granted, sums, strict=True):
            if came is None:
                self._remember((namespace.fingerprint, run.group_idx, block_hash), False)
        return raised == len(granted) and len(raising) == len(run)

    def _reserve(self, namespace: Namespace, group: Group, run: BlockRun) -> tuple[Sequence[bytes], PutGrant | None]:
        """Room for a run, or for its first half, and so on: which blocks, and where; None: for none of them."""
        hashes, count = list(run.block_hashes), len(run)
        grant = None
        while grant is None and count:
            some = BlockRun(run.group_idx, hashes[:count], run.parent_hash)
            try:
                grant = self._moves.raise_start(group, [some])
            except OutOfSpaceError as error:
                count //= 2
                log.debug("there is little room for blocks to come up", tier=self._tier.name, error=str(error))
            except KVPoolError:  # The namespace is closed.
                count = 0
        self._tier.counters["dropped_promotions"] += len(hashes) - count
        for block_hash in hashes[count:]:  # Not to be asked for at once again.
            self._remember((namespace.fingerprint, run.group_idx, block_hash), False)
        return hashes[:count], grant

    def forget(self, namespace: Namespace, group_idx: int, block_hashes: Sequence[bytes]) -> None:
        """Blocks are being removed from the tier: none of them is to come up meanwhile."""
        for block_hash in block_hashes:
            self._remember((namespace.fingerprint, group_idx, block_hash), False)

    def _start(self, call: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
