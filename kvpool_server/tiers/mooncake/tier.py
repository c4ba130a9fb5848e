"""A Mooncake Store cluster: servers on many hosts share it, and what one has put there any other brings up.

One object a block, `kvpool/<fingerprint>/<group_idx>/<block hash>` in hex: the slot's bytes, and a trailer that says
whose they are (`trailer.py`). Mooncake's master knows where objects lie, evicts them, and is asked through a process of
this server (`store.py`), which is started again, with its segment empty, when it has died. A master that has died is
found again by Mooncake itself; what the cluster held is lost then.

Bytes are staged in both directions, and verified once they lie in the arena: a transfer that Mooncake has given up may
go on writing for as long as its peer lives, and neither a slot nor what has been verified may be written to then.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import structlog

from kvpool.errors import ConfigError
from kvpool.holdings import TierHoldings
from kvpool.types import TierStats
from kvpool_server.cache.namespaces import Namespace
from kvpool_server.tiers.mooncake.memo import Memo
from kvpool_server.tiers.mooncake.store import LANE_BYTES, Lane, Store, StoreError
from kvpool_server.tiers.mooncake.trailer import pack, trailer_bytes, verify
from kvpool_server.tiers.mooncake.worker import Order
from kvpool_server.tiers.threads import Threads
from kvpool_server.tiers.tier import Block, Tier, TierError

log = structlog.get_logger()

T = TypeVar("T")
U = TypeVar("U")

MAX_KEYS = 1024
"""Of one call: Mooncake's puts of 4,096 keys at once fail over TCP."""
MIN_SEGMENT_BYTES = 16 << 20
CLOSE_S = 2.0

IS_THERE = 1
NO_SPACE = -200
TOO_SMALL = -600
NOT_READY = -703
NOT_FOUND = -704
RPC_FAILED = -900
"""And everything below: the master has not answered."""


class MooncakeTier(Tier):
    """See the module.

    Args:
        order: the master, and what this server gives.
        threads: calls at once.
    """

    def __init__(self, order: Order, threads: int = 2):
        self.name = f"mooncake:{order.master}"
        self.counters: Counter[str] = Counter()
        self._order = order
        self._num_threads = threads
        self._memo = Memo()
        self._threads: Threads | None = None
        self._store: Store | None = None
        self._starting = threading.Lock()
        self._is_closed = False

    # Start and end

    async def open(self) -> None:
        if 0 < self._order.segment_bytes < MIN_SEGMENT_BYTES:
            raise ConfigError(
                f"tier {self.name}: segment = {self._order.segment_bytes} bytes, and Mooncake takes no less than "
                "16MiB; give more, or 0 for none"
            )
        self._threads = Threads(self._num_threads, "kvpool-tier-mooncake")
        try:
            await self._threads.call(self._running)
        except TierError as error:
            await self.close()
            raise ConfigError(
                f"tier {error}; start mooncake_master first, and give its host and rpc_port as master="
            ) from None

    async def close(self) -> None:
        self._is_closed = True
        store, self._store = self._store, None
        if store is not None:
            await asyncio.to_thread(store.end)
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.close(CLOSE_S)

    def _running(self) -> Store:
        """The process, started if need be; for the tier's threads. Raises TierError."""
        with self._starting:
            if self._is_closed:
                raise TierError(f"{self.name} is closed")
            if self._store is not None and self._store.alive:
                return self._store
            if self._store is not None:
                log.error("Mooncake's client has died and is started again", tier=self.name)
                self._store.end()
            try:
                store = Store(self._order, self._num_threads)
            except (StoreError, OSError) as error:
                raise TierError(f"{self.name}: {error}") from None
            if self._is_closed:
                store.end()
                raise TierError(f"{self.name} is closed")
            self._store = store
            return store

    # What is there

    def known(self, namespace: Namespace, group_idx: int, block_hashes: Sequence[bytes]) -> list[bool] | None:
        """All True for what was written, found or read a moment ago; else only the master knows."""
        there = all(self._memo.has((namespace.fingerprint, group_idx, block_hash)) for block_hash in block_hashes)
        return [True] * len(block_hashes) if there else None

    async def find(self, namespace: Namespace, group_idx: int, block_hashes: Sequence[bytes]) -> list[bool]:
        keys = _keys(namespace, group_idx, block_hashes)
        codes: list[int] = []
        for part in _parts(keys, MAX_KEYS):
            codes += await self._call(self._ask, "exist", part)
        self._check(codes)
        for block_hash, code in zip(block_hashes, codes, strict=True):
            key = (namespace.fingerprint, group_idx, block_hash)
            if code == IS_THERE:
                self._memo.saw(key)
            else:
                self._memo.forget(key)
        return [code == IS_THERE for code in codes]

    # Down

    async def write(self, namespace: Namespace, group_idx: int, blocks: Sequence[Block]) -> int:
        there = await self.find(namespace, group_idx, [block.block_hash for block in blocks])
        new = {block.block_hash: block for block, is_there in zip(blocks, there, strict=True) if not is_there}
        slot_bytes = namespace.groups[group_idx].spec.slot_bytes
        most = self._most(namespace, group_idx)
        if not most:
            self.counters["refused_blocks"] += len(new)
            return sum(there)
        written = 0
        for part in _parts(list(new.values()), most):
            keys = _keys(namespace, group_idx, [block.block_hash for block in part])
            codes = await self._call(self._put, keys, part)
            self._check(codes)
            for block, code in zip(part, codes, strict=True):
                if code == 0:
                    written += 1
                    self._memo.saw((namespace.fingerprint, group_idx, block.block_hash), slot_bytes)
            self.counters["written_bytes"] += codes.count(0) * slot_bytes
            if refused := Counter(code for code in codes if code):
                self.counters["refused_blocks"] += refused.total()
                # No room is for the cluster to see to; anything else is a segment, or a network, that has gone.
                tell = log.debug if set(refused) == {NO_SPACE} else log.warning
                tell("Mooncake has not taken blocks", tier=self.name, codes=dict(refused))
        return sum(there) + written

    def _put(self, keys: Sequence[str], blocks: Sequence[Block]) -> list[int]:
        with self._running().lane() as lane:
            nbytes = blocks[0].payload.nbytes
            size = nbytes + trailer_bytes(len(blocks[0].checksums))
            offsets = [nth * size for nth in range(len(blocks))]
            for offset, key, block in zip(offsets, keys, blocks, strict=True):
                lane.memory[offset : offset + nbytes] = np.frombuffer(block.payload, np.uint8)
                trailer = pack(key, nbytes, block.checksums)
                lane.memory[offset + nbytes : offset + size] = np.frombuffer(trailer, np.uint8)
            return lane.ask("put", keys, offsets, [size] * len(keys))

    # Up

    async def read(
        self, namespace: Namespace, group_idx: int, block_hashes: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[Sequence[int] | None]:
        most = self._most(namespace, group_idx)
        if not most:
            return [None] * len(block_hashes)
        num_shards = namespace.groups[group_idx].spec.num_shards
        found: list[Sequence[int] | None] = []
        for part in _parts(list(zip(block_hashes, into, strict=True)), most):
            hashes = [block_hash for block_hash, _ in part]
            reading = _Reading(_keys(namespace, group_idx, hashes), [view for _, view in part], num_shards)
            try:
                codes = await self._call(self._get, reading)
            finally:
                reading.give_up()  # A thread may still be at it, if this task was cancelled.
            self._check(codes)
            self._note(namespace, group_idx, hashes, reading)
            await self._drop_corrupt(reading)
            found += reading.found
        return found

    def _get(self, reading: _Reading) -> list[int]:
        with self._running().lane() as lane:
            size = reading.object_bytes
            offsets = [nth * size for nth in range(len(reading.keys))]
            codes = lane.ask("get", reading.keys, offsets, [size] * len(reading.keys))
            for nth, code in enumerate(codes):
                reading.take(nth, code, lane, offsets[nth])
            return codes

    def _note(self, namespace: Namespace, group_idx: int, block_hashes: Sequence[bytes], reading: _Reading) -> None:
        for block_hash, sums, view in zip(block_hashes, reading.found, reading.views, strict=True):
            key = (namespace.fingerprint, group_idx, block_hash)
            if sums is None:
                self._memo.forget(key)
            else:
                self._memo.saw(key)
                self.counters["read_bytes"] += view.nbytes

    async def _drop_corrupt(self, reading: _Reading) -> None:
        if reading.corrupt:
            self.counters["corrupt_blocks"] += len(reading.corrupt)
            log.error("objects are not what was stored, and are removed", tier=self.name, blocks=len(reading.corrupt))
            self._check(await self._call(self._ask, "remove", reading.corrupt))

    # Forgetting

    async def remove(self, namespace: Namespace, group_idx: int, block_hashes: Sequence[bytes]) -> None:
        self._memo.forget_each((namespace.fingerprint, group_idx, block_hash) for block_hash in block_hashes)
        for part in _parts(_keys(namespace, group_idx, block_hashes), MAX_KEYS):
            self._check(await self._call(self._ask, "remove", part))

    async def clear(self, fingerprint: bytes = b"") -> None:
        self._memo.forget_all(fingerprint)
        prefix = f"kvpool/{fingerprint.hex()}/" if fingerprint else "kvpool/"
        self._check(await self._call(self._ask, "clear", [f"^{re.escape(prefix)}"]))

    # State

    def holdings(self, fingerprint: bytes) -> TierHoldings:
        """What this server has put there and not found gone since, of the latest blocks it has to do with.

        What the cluster has evicted meanwhile is among it; what other servers have put there is not.
        """
        return TierHoldings(self.name, self._memo.num_own[fingerprint], self._memo.own_bytes[fingerprint])

    def stats(self) -> TierStats:
        """As `holdings`, of all namespaces. How large the cluster is only its master knows."""
        return TierStats(
            self.name,
            size_bytes=0,
            used_bytes=sum(list(self._memo.own_bytes.values())),  # A copy: a scrape asks from another thread.
            num_entries=sum(list(self._memo.num_own.values())),
            counters=dict(self.counters),
        )

    # Helpers

    def _ask(self, what: str, keys: Sequence[str]) -> list[int]:
        with self._running().lane() as lane:
            return lane.ask(what, keys)

    async def _call(self, function: Callable[..., T], *args: object) -> T:
        if self._threads is None:
            raise TierError(f"{self.name} is closed")
        try:
            return await self._threads.call(function, *args)
        except StoreError as error:
            raise TierError(f"{self.name}: {error}") from None

    def _check(self, codes: Sequence[int]) -> None:
        """Raises TierError if the master has not answered."""
        if (worst := min(codes, default=0)) <= RPC_FAILED:
            raise TierError(f"{self.name}: the master does not answer (code {worst})")

    def _most(self, namespace: Namespace, group_idx: int) -> int:
        """Blocks that go through a lane at once; 0: not even one."""
        spec = namespace.groups[group_idx].spec
        return min(MAX_KEYS, LANE_BYTES // (spec.slot_bytes + trailer_bytes(spec.num_shards)))


class _Reading:
    """Blocks that are being read: a thread brings them, unless who wants them has gone.

    Attributes:
        found: checksums of each that came.
        corrupt: keys of objects that are not what was stored.
    """

    def __init__(self, keys: Sequence[str], views: Sequence[memoryview], num_shards: int):
        self.keys = keys
        self.views = views
        self.object_bytes = views[0].nbytes + trailer_bytes(num_shards)
        self.found: list[Sequence[int] | None] = [None] * len(keys)
        self.corrupt: list[str] = []
        self._num_shards = num_shards
        self._lock = threading.Lock()
        self._is_over = False

    def take(self, nth: int, code: int, lane: Lane, offset: int) -> None:
        """Copies a block from where it was staged, and verifies what lies in its view then."""
        if code == TOO_SMALL or (code >= 0 and code != self.object_bytes):
            self.corrupt.append(self.keys[nth])
        if code != self.object_bytes:
            return
        view = self.views[nth]
        staged = lane.memory[offset : offset + code]
        with self._lock:
            if self._is_over:
                return
            np.frombuffer(view, np.uint8)[:] = staged[: view.nbytes]
            self.found[nth] = verify(self.keys[nth], view, self._num_shards, staged[view.nbytes :].tobytes())
        if self.found[nth] is None:
            self.corrupt.append(self.keys[nth])

    def give_up(self) -> None:
        """No view is touched from now on."""
        with self._lock:
            self._is_over = True


def _keys(namespace: Namespace, group_idx: int, block_hashes: Sequence[bytes]) -> list[str]:
    prefix = f"kvpool/{namespace.fingerprint.hex()}/{group_idx}/"
    return [prefix + block_hash.hex() for block_hash in block_hashes]


def _parts(items: Sequence[U], most: int) -> Iterator[Sequence[U]]:
    for start in range(0, len(items), most):
        yield items[start : start + most]
