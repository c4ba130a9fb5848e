"""Replays a trace against the server's own `Pool`, in this process, without bytes and without RPCs.

Each prompt looks its blocks up, as an engine does, and then stores those that missed; a recording has the engines' puts
beside their lookups. A block hits if it and all blocks before it in the prompt are in the pool when the request comes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from benchmarks.replay.references import REFERENCES
from benchmarks.replay.request import Request, num_blocks
from kvpool.protocol.errors import OutOfSpaceError
from kvpool.protocol.namespace import GroupSpec, NamespaceSpec
from kvpool.protocol.types import HASH_BYTES, BlockRun, ShardRange
from kvpool_server.cache.arena import MAX_SLOTS_PER_EXTENT, Arena
from kvpool_server.cache.eviction import DEFAULT_POLICY, POLICIES
from testbed.pool_at_once import PoolAtOnce

SLOT_BYTES = 2 << 20
"""Any size will do: an arena consists of offsets, and no bytes are stored."""
BLOCK_TOKENS = 512
LEASE_MS = TICKET_MS = 10_000
REQUESTS_PER_STEP = 256


def replay(
    requests: Sequence[Request],
    capacity: int,
    policy: str = DEFAULT_POLICY,
    advance: Callable[[], object] = lambda: None,
) -> int:
    """Hits of a pool of `capacity` blocks. Calls `advance` once for each `REQUESTS_PER_STEP` requests.

    A request with more blocks than the pool can hold stores none, because an engine's put of them would fail.
    """
    replayed = ReplayedPool(capacity, policy)
    hits = 0
    for nth, request in enumerate(requests):
        if nth % REQUESTS_PER_STEP == 0:
            advance()
        hits += replayed.play(request)
    return hits


class ReplayedPool:
    """A pool of `capacity` blocks at the times of a trace.

    Attributes:
        pool: the pool.
        now_s: the time of the last request.
    """

    def __init__(self, capacity: int, policy: str):
        self.now_s = 0.0
        self.pool, self._fingerprint = make_pool(capacity, policy, lambda: self.now_s)

    def play(self, request: Request) -> int:
        """Looks up and stores as the request did; returns the leading blocks that hit."""
        if not request.ids:
            return 0
        self.now_s = max(self.now_s, request.at_s)
        run = run_of(request)
        lease_id, leading, num_stored = 0, 0, len(request.stored)
        if not request.is_put:
            found = self.pool.lookup(self._fingerprint, [run], prefix_only=True, lease_ttl_ms=LEASE_MS)
            lease_id, leading = found.lease_id, found.hits[0].num_leading
            if request.hits is not None and leading >= num_stored:
                num_stored = 0  # The recorded pool has had no put either: a put that it had is a request of its own.
        if num_stored:
            put(self.pool, self._fingerprint, BlockRun(0, run.block_hashes[:num_stored], run.parent_hash))
        if lease_id:
            self.pool.release([lease_id])
        return leading

    def look(self, run: BlockRun, ttl_ms: int) -> int:
        """Leading blocks that hit; with a TTL, which is a use of them."""
        found = self.pool.lookup(self._fingerprint, [run], prefix_only=True, lease_ttl_ms=ttl_ms)
        if found.lease_id:
            self.pool.release([found.lease_id])
        return found.hits[0].num_leading

    def put(self, run: BlockRun) -> None:
        """Stores blocks, if they fit."""
        put(self.pool, self._fingerprint, run)


def run_of(request: Request) -> BlockRun:
    """The blocks of a request."""
    parent_hash = b"" if request.parent is None else request.parent.to_bytes(HASH_BYTES, "big")
    return BlockRun(0, [block.to_bytes(HASH_BYTES, "big") for block in request.ids], parent_hash)


def put(pool: PoolAtOnce, fingerprint: bytes, run: BlockRun) -> None:
    """Stores blocks of one shard, without bytes; none if they do not fit."""
    try:
        grant = pool.put_start(fingerprint, [run], ShardRange(0, 1), TICKET_MS)
    except OutOfSpaceError:
        return
    if grant.ticket_id:
        pool.put_end(grant.ticket_id, [0] * len(grant.offsets))


def make_pool(capacity: int, policy: str, clock: Callable[[], float], tenant: str = "") -> tuple[PoolAtOnce, bytes]:
    """A pool of `capacity` blocks, and a namespace of it with blocks of one shard."""
    pool = PoolAtOnce(_arena(capacity), clock, itertools.count(1).__next__, policy=POLICIES[policy])
    group = GroupSpec("full_attention", BLOCK_TOKENS, 8, 128, 128, 1, SLOT_BYTES)
    return pool, pool.open_namespace(NamespaceSpec("replay", (group,), tenant=tenant))[0].fingerprint


def _arena(capacity: int) -> Arena:
    """An arena of `capacity` slots, rounded down to a multiple of its extents."""
    num_extents = -(-capacity // MAX_SLOTS_PER_EXTENT)
    extent_bytes = capacity // num_extents * SLOT_BYTES
    return Arena(num_extents * extent_bytes, extent_bytes)


def policy_ratios(
    requests: Sequence[Request], capacities: Sequence[int], policy: str, advance: Callable[[], object]
) -> list[float]:
    """Hits over all blocks looked up, for each capacity (in blocks)."""
    total = num_blocks(requests)
    return [replay(requests, capacity, policy, advance) / total for capacity in capacities]


def reference_ratios(
    requests: Sequence[Request], capacities: Sequence[int], advance: Callable[[], object]
) -> dict[str, list[float]]:
    """As `policy_ratios`, for each of `REFERENCES`."""
    total = num_blocks(requests)
    ratios: dict[str, list[float]] = {name: [] for name in REFERENCES}
    for name, count in REFERENCES.items():
        for capacity in capacities:
            ratios[name].append(count(requests, capacity) / total)
            advance()
    return ratios


def num_steps(requests: Sequence[Request], num_capacities: int, num_policies: int) -> int:
    """How often `policy_ratios` and `reference_ratios` call `advance` for these policies and capacities."""
    steps_of_one = -(-len(requests) // REQUESTS_PER_STEP)
    return num_capacities * (num_policies * steps_of_one + len(REFERENCES))
