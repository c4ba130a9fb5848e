"""How fast blocks travel between this process and its pool, measured with blocks that belong to no engine.

Each round stores blocks under hashes of its own, loads them back, and removes them. A rate counts bytes that have
arrived with right checksums: in the pool, or in memory of this process. One thread calls, as a rank of an engine does.

Invariants:
- However the measurement ends, its blocks are removed; where the server cannot be reached any more, they are evicted
  as any block that is not used.
- A round takes at most half of the free memory, so that the pool evicts nothing for it. A pool without free memory
  evicts `LEAST_BYTES` at most, the blocks that it would have evicted next.
- Every call has a deadline; rounds shrink where the pool is slow, and no round begins after `ROUNDS_S`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import numpy.typing as npt

from kvpool.client.block_io import InPlace
from kvpool.client.client import Client
from kvpool.protocol.errors import InvalidRequestError, KVPoolError, OutOfSpaceError, PermissionDeniedError
from kvpool.protocol.namespace import MEASUREMENT_MODEL, GroupSpec, NamespaceSpec
from kvpool.protocol.types import HASH_BYTES, BlockRun, ShardRange
from kvpool.protocol.wire import decode_spec
from kvpool.security.principal import Role
from kvpool.v1 import pool_pb2 as pb

GB = 1e9
HIT_TOKENS = 1_000
"""Of the hit whose cost is computed."""

BLOCK = GroupSpec("full_attention", 16, 8, 128, 128, num_shards=8, chunk_bytes=256 << 10)
"""What is measured if nothing else is asked for: 2 MiB, a block of Llama 3.1 8B in bfloat16."""

LEAST_BYTES = 16 << 20
START_BYTES = 4 << 20
MAX_BUFFER_BYTES = 64 << 20
"""Of the memory that is sent from: more than a core's caches hold."""
NUM_PINGS = 10
NUM_ROUNDS = 5
ROUND_S = 1.0
"""A round is made of as many blocks as travel one way within this time."""
ROUNDS_S = 15.0
TIMEOUTS = {"data_timeout_ms": 15_000, "ticket_ttl_ms": 15_000, "lease_ttl_ms": 30_000}
"""Of the client that measures: with these, slow networks can be measured, too."""
REMOVE_TIMEOUT_MS = 20_000
"""Removal waits for tiers, too."""
_CALLS = frozenset(
    {"Stats", "ListNamespaces", "OpenNamespace", "PutStart", "PutEnd", "Lookup", "Get", "Release", "Remove"}
)
"""What a measurement calls."""
_EVICTED = "the pool evicted blocks of the measurement before they were read; give a smaller --mib"


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one direction in several rounds, in GB/s."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, nbytes: int, seconds: Sequence[float]) -> Rates:
        """The rates of rounds that moved `nbytes` each."""
        rates = [nbytes / max(each, 1e-9) / GB for each in seconds]
        return cls(median(rates), min(rates), max(rates))


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What a measurement found; its fields are those of `kvpool ping --bandwidth --json`.

    Args:
        transport: name of the transport.
        round_trip_ms: median of pings.
        one_block_ms: median time of looking up and loading one block.
        put_gb_per_s, get_gb_per_s: of blocks stored, and of blocks looked up and loaded.
        rounds: without those that warmed up.
        put_round_bytes, get_round_bytes: whole blocks up, one rank's shards of the same blocks down.
        region_bytes: one rank's shards of a block.
        limited_by: why a round moved less than was asked for: "room", "time", or "".
        free_bytes: of the pool's memory before the measurement.
        evicted_blocks: that the pool evicted meanwhile, for whomever.
    """

    transport: str
    round_trip_ms: float
    one_block_ms: float
    put_gb_per_s: Rates
    get_gb_per_s: Rates
    rounds: int
    put_round_bytes: int
    get_round_bytes: int
    region_bytes: int
    limited_by: str
    free_bytes: int
    evicted_blocks: int


@dataclass(frozen=True, slots=True)
class HitCost:
    """What a hit costs: `load_s` seconds for `nbytes` of one rank, which spare the engine `HIT_TOKENS` of prefill."""

    fingerprint: bytes
    nbytes: int
    load_s: float

    @property
    def break_even(self) -> float:
        """Tokens a second: the hit is worth its load where prefill is slower."""
        return HIT_TOKENS / self.load_s


def check_permission(client: Client) -> None:
    """Raises PermissionDeniedError, before anything is stored, if the caller may not call what a measurement does."""
    caller = client.admin.whoami()
    if missing := sorted(_CALLS - {*caller.methods}):
        raise PermissionDeniedError(
            f"{caller.principal} may not call {', '.join(missing)}, which a measurement needs to find room and to "
            f"remove its blocks; --bandwidth needs the role {Role.OPERATOR}: give its certificate (kvpool --tls "
            "pki/operator ping ...) or its token (--token-file); `kvpool ping` alone works with every role"
        )


def shards_of_rank(group: GroupSpec, tp_size: int) -> ShardRange:
    """The shards of a block that the first of `tp_size` ranks loads.

    Raises InvalidRequestError if the group's blocks cannot be divided over so many ranks.
    """
    # Without heads to cut along, each rank has one shard of its own.
    replicas = max(1, tp_size // group.num_kv_heads) if group.num_kv_heads else 1
    count, rest = divmod(group.num_shards * replicas, tp_size)
    if rest or not count or (not group.num_kv_heads and count != 1):
        raise InvalidRequestError(
            f"blocks of the namespace have {group.num_shards} shards, which {tp_size} ranks cannot share; give "
            "--tensor-parallel of an engine of this namespace"
        )
    return ShardRange(0, count)


def hit_bytes(group: GroupSpec, tp_size: int) -> int:
    """Bytes of one group that one rank loads for a hit: all tokens, the last window, or one recurrent state.

    A spec does not tell the chunks of chunked attention: there all tokens are counted, which is an upper bound.
    """
    region_bytes = shards_of_rank(group, tp_size).count * group.chunk_bytes
    if group.kind == "mamba":
        return region_bytes
    tokens = min(HIT_TOKENS, group.window_tokens or HIT_TOKENS)
    return tokens * region_bytes // group.block_tokens


def largest_group(spec: NamespaceSpec, tp_size: int) -> GroupSpec:
    """The group that most bytes of a hit are of."""
    return max(spec.groups, key=lambda group: hit_bytes(group, tp_size))


def hit_cost(measured: Bandwidth, namespace: pb.NamespaceInfo, tp_size: int) -> HitCost:
    """What loading a hit would cost one rank at the measured rates, its lookup included."""
    groups = decode_spec(namespace.spec).groups
    nbytes = sum(hit_bytes(group, tp_size) for group in groups)
    # Each group's blocks are a get of their own.
    latency_s = (measured.one_block_ms + (len(groups) - 1) * measured.round_trip_ms) / 1e3
    load_s = latency_s + max(0, nbytes - measured.region_bytes) / (measured.get_gb_per_s.median * GB)
    return HitCost(namespace.fingerprint, nbytes, load_s)


def usual_block(client: Client) -> GroupSpec:
    """The blocks to measure with where no namespace was named.

    A full pool would empty a whole extent of its arena for a new size of blocks, so there the blocks are those of the
    namespace that was used last.
    """
    if free_bytes(client.admin.stats()) >= 2 * LEAST_BYTES:
        return BLOCK
    used = [info for info in client.admin.namespaces(holdings=False) if info.spec.model != MEASUREMENT_MODEL]
    latest = min(used, key=lambda info: info.idle_seconds, default=None)
    groups = (BLOCK,) if latest is None else decode_spec(latest.spec).groups
    return max(groups, key=lambda group: group.slot_bytes / group.block_tokens)


def measure(
    client: Client,
    wanted_bytes: int,
    block: GroupSpec = BLOCK,
    shards: ShardRange | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Bandwidth:
    """Measures puts and gets.

    Args:
        wanted_bytes: that each round moves each way; less where the pool has less room, or is slow.
        block: which blocks travel.
        shards: of each block, that a get reads; all of them by default.

    Raises:
        OutOfSpaceError: the pool has no room even for little, or evicted the blocks before they were read.
        TransferError, UnavailableError, PoolTimeoutError: as puts and gets.
    """
    before = client.admin.stats()
    whole = ShardRange(0, block.num_shards)
    rounds = _Rounds(client, block, shards or whole, clock)
    wanted = max(1, min(wanted_bytes // block.slot_bytes, rounds.namespace.max_blocks(whole)))
    most = max(1, min(wanted, _room(before) // block.slot_bytes))
    count = rounds.warm_up(most)
    taken: list[tuple[float, float, float]] = []
    ends_at = clock() + ROUNDS_S
    while len(taken) < NUM_ROUNDS and (not taken or clock() < ends_at):
        taken.append(rounds.run(count))
    put_s, get_s, one_block_s = zip(*taken, strict=True)
    put_bytes, get_bytes = count * block.slot_bytes, count * rounds.region_bytes
    return Bandwidth(
        transport=rounds.namespace.transport.name,
        round_trip_ms=1e3 * rounds.round_trip_s(),
        one_block_ms=1e3 * median(one_block_s),
        put_gb_per_s=Rates.of(put_bytes, put_s),
        get_gb_per_s=Rates.of(get_bytes, get_s),
        rounds=len(taken),
        put_round_bytes=put_bytes,
        get_round_bytes=get_bytes,
        region_bytes=rounds.region_bytes,
        limited_by="" if count == wanted else "room" if count == most else "time",
        free_bytes=free_bytes(before),
        evicted_blocks=client.admin.stats().counters["evicted_blocks"] - before.counters["evicted_blocks"],
    )


def free_bytes(stats: pb.StatsResponse) -> int:
    """Memory that the pool can give to new blocks without evicting any."""
    return max(0, stats.free_bytes - max(0, stats.arena_bytes - stats.prefaulted_bytes))


def _room(stats: pb.StatsResponse) -> int:
    """Bytes that a round may store."""
    return max(free_bytes(stats) // 2, min(LEAST_BYTES, stats.arena_bytes // 2))


class _Rounds:
    """Stores, loads and removes blocks of one group."""

    def __init__(self, client: Client, block: GroupSpec, shards: ShardRange, clock: Callable[[], float]):
        self._client = client
        self._clock = clock
        self._block_bytes = block.slot_bytes
        self._shards = shards
        self.region_bytes = shards.count * block.chunk_bytes
        block = replace(block, layer_names=(), layer_formats=())  # One namespace for blocks of equal sizes.
        self.namespace = client.open_namespace(NamespaceSpec(model=MEASUREMENT_MODEL, groups=(block,)))
        size = max(block.slot_bytes, MAX_BUFFER_BYTES // block.slot_bytes * block.slot_bytes)
        self._source = np.frombuffer(np.random.default_rng().bytes(size), np.uint8)
        self._target = np.ones(0, np.uint8)

    def round_trip_s(self) -> float:
        """Median time of a call that does nothing."""
        seconds = []
        for _ in range(NUM_PINGS):
            began = self._clock()
            self._client.admin.ping()
            seconds.append(self._clock() - began)
        return median(seconds)

    def warm_up(self, most: int) -> int:
        """Runs growing rounds; returns how many blocks of `most` take about `ROUND_S` one way."""
        count = max(1, min(most, START_BYTES // self._block_bytes))
        while True:
            put_s, get_s, _ = self.run(count)
            in_time = int(count * ROUND_S / max(put_s, get_s))
            following = max(1, min(most, 4 * count, in_time))
            if following <= count:
                return following
            count = following

    def run(self, count: int) -> tuple[float, float, float]:
        """Stores `count` new blocks, loads them, loads one, removes them; returns the seconds of the first three."""
        run = BlockRun(0, [os.urandom(HASH_BYTES) for _ in range(count)])
        try:
            began = self._clock()
            self._client.put(self.namespace, [run], self._blocks(self._source, len(run), self._block_bytes))
            put_s = self._clock() - began
            get_s, one_block_s = self._load(run), self._load(BlockRun(0, run.block_hashes[:1]))
            self._remove(run)
            return put_s, get_s, one_block_s
        except BaseException:
            with suppress(KVPoolError):  # The round's own error says more.
                self._remove(run)
            raise

    def _remove(self, run: BlockRun) -> None:
        self._client.admin.remove(self.namespace, [run], timeout_ms=REMOVE_TIMEOUT_MS)

    def _load(self, run: BlockRun) -> float:
        """Seconds from the lookup until the bytes have arrived."""
        if (nbytes := len(run) * self.region_bytes) > len(self._target):  # Threads fill it: no two blocks may share.
            self._target = np.ones(nbytes, np.uint8)
        began = self._clock()
        found = self._client.lookup(self.namespace, [run])
        try:
            if found.hits[0].num_leading < len(run):
                raise OutOfSpaceError(_EVICTED)
            into = self._blocks(self._target, len(run), self.region_bytes)
            located = self._client.get(self.namespace, found.lease_id, [run], into, shards=self._shards)
            seconds = self._clock() - began
            if not all(located.present):
                raise OutOfSpaceError(_EVICTED)
            return seconds
        finally:
            with suppress(KVPoolError):  # Without the call the lease expires.
                self._client.release([found.lease_id])

    @staticmethod
    def _blocks(memory: npt.NDArray[np.uint8], count: int, nbytes: int) -> InPlace:
        """Memory of `count` blocks, which take turns."""
        starts = [idx % (len(memory) // nbytes) * nbytes for idx in range(count)]
        return InPlace([memory[start : start + nbytes] for start in starts])
