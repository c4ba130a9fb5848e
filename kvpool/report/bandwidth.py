"""How fast blocks travel between this process and its pool, measured with blocks that belong to no engine.

Each round stores blocks under hashes of its own, loads them back, and removes them, also where the round fails. A rate
counts bytes that have arrived with right checksums: in the pool, or in memory of this process. One thread calls, as a
rank of an engine does.

A round takes at most half of the free memory, so that the pool evicts nothing for it. A pool without free memory evicts
`LEAST_BYTES` at most.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from kvpool.client.block_io import InPlace
from kvpool.client.client import Client
from kvpool.protocol.errors import InvalidRequestError, KVPoolError, OutOfSpaceError
from kvpool.protocol.namespace import MEASUREMENT_MODEL, GroupSpec, NamespaceSpec
from kvpool.protocol.types import HASH_BYTES, BlockRun, ShardRange
from kvpool.protocol.wire import decode_spec
from kvpool.v1 import pool_pb2 as pb

GB = 1e9
HIT_TOKENS = 1_000
"""Of the hit whose cost is computed."""
BLOCK = GroupSpec("full_attention", 16, 8, 128, 128, num_shards=8, chunk_bytes=256 << 10)
"""What is measured in a pool without namespaces: 2 MiB, a block of Llama 3.1 8B in bfloat16."""
LEAST_BYTES = 16 << 20
START_BYTES = 4 << 20
NUM_PINGS = 10
NUM_ROUNDS = 5
ROUND_S = 1.0
"""A round is made of as many blocks as travel one way within this time."""
ROUNDS_S = 15.0
"""No round begins later."""
TIMEOUTS = {"data_timeout_ms": 15_000, "ticket_ttl_ms": 15_000, "lease_ttl_ms": 30_000}
"""Of the client that measures: with these, slow networks can be measured, too."""
REMOVE_TIMEOUT_MS = 20_000
"""Removal waits for tiers, too."""


def shards_of_rank(group: GroupSpec, tp_size: int) -> ShardRange:
    """The shards of a block that the first of `tp_size` ranks loads. Raises InvalidRequestError if so many cannot share
    the group's blocks."""
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
    return min(HIT_TOKENS, group.window_tokens or HIT_TOKENS) * region_bytes // group.block_tokens


def hit_cost(
    measured: dict[str, Any], namespace: pb.NamespaceInfo, tp_size: int, prefill: float | None
) -> dict[str, Any]:
    """What a hit of `HIT_TOKENS` costs one of `tp_size` ranks, its lookup included: the field `hit` of `measure`.

    With `prefill`, the tokens that the engine prefills a second, also what the hit saves.
    """
    groups = decode_spec(namespace.spec).groups
    nbytes = sum(hit_bytes(group, tp_size) for group in groups)
    # Each group's blocks are a get of their own.
    latency_ms = measured["one_block_ms"] + (len(groups) - 1) * measured["round_trip_ms"]
    bytes_per_ms = measured["get_gb_per_s"]["median"] * GB / 1e3
    load_ms = latency_ms + max(0, nbytes - measured["region_bytes"]) / bytes_per_ms
    hit = {"namespace": namespace.fingerprint.hex(), "tokens": HIT_TOKENS, "bytes": nbytes, "load_ms": load_ms}
    hit["pays_below_tokens_per_s"] = HIT_TOKENS / load_ms * 1e3
    if prefill is not None:
        compute_ms = HIT_TOKENS / prefill * 1e3
        hit |= {"compute_ms": compute_ms, "saved_ms": compute_ms - load_ms}
    return hit


def usual_block(client: Client) -> GroupSpec:
    """The largest blocks of the namespace that was used last: a full pool would empty an extent for a new size."""
    used = [info for info in client.admin.namespaces(holdings=False) if info.spec.model != MEASUREMENT_MODEL]
    latest = min(used, key=lambda info: info.idle_seconds, default=None)
    return BLOCK if latest is None else max(decode_spec(latest.spec).groups, key=lambda group: hit_bytes(group, 1))


def measure(
    client: Client,
    wanted_bytes: int,
    block: GroupSpec = BLOCK,
    shards: ShardRange | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Measures puts and gets.

    Args:
        wanted_bytes: that each round moves each way; less where the pool has less room, or is slow.
        block: which blocks travel.
        shards: of each block, that a get reads; all of them by default.

    Returns: the fields of `kvpool ping --bandwidth --json`, which docs/reference/commands.md explains.

    Raises:
        PermissionDeniedError: the caller is no operator; nothing was stored.
        OutOfSpaceError: the pool has no room even for little, or evicted the blocks before they were read.
        TransferError, UnavailableError, PoolTimeoutError: as puts and gets.
    """
    before, whole = client.admin.stats(), ShardRange(0, block.num_shards)
    shards = shards or whole
    block = replace(block, layer_names=(), layer_formats=())  # One namespace for blocks of equal sizes.
    namespace = client.open_namespace(NamespaceSpec(model=MEASUREMENT_MODEL, groups=(block,)))
    region_bytes, memory = shards.count * block.chunk_bytes, np.empty((0, block.slot_bytes), np.uint8)

    def load(run: BlockRun) -> float:
        """Seconds from the lookup until the bytes have arrived."""
        began = clock()
        lease_id = client.lookup(namespace, [run]).lease_id
        try:
            into = InPlace([row[:region_bytes] for row in memory[: len(run)]])
            if not all(client.get(namespace, lease_id, [run], into, shards=shards).present):
                raise OutOfSpaceError("the pool evicted blocks of the measurement before they were read; lower --mib")
            return clock() - began
        finally:
            with suppress(KVPoolError):  # Without the call the lease expires.
                client.release([lease_id])

    def round_of(count: int) -> tuple[float, float, float]:
        """Stores `count` new blocks, loads them, loads one, removes them; the seconds of the first three."""
        nonlocal memory
        if len(memory) < count:
            memory = np.ones((count, block.slot_bytes), np.uint8)
        run = BlockRun(0, [os.urandom(HASH_BYTES) for _ in range(count)])
        try:
            began = clock()
            client.put(namespace, [run], InPlace(list(memory[:count])))
            return clock() - began, load(run), load(BlockRun(0, run.block_hashes[:1]))
        finally:
            with suppress(KVPoolError):  # The pool evicts what stays as any block that is not used.
                client.admin.remove(namespace, [run], timeout_ms=REMOVE_TIMEOUT_MS)

    def ping() -> float:
        began = clock()
        client.admin.ping()
        return clock() - began

    room = max(free_bytes(before) // 2, min(LEAST_BYTES, before.arena_bytes // 2))
    wanted = max(1, min(wanted_bytes // block.slot_bytes, namespace.max_blocks(whole)))
    most = max(1, min(wanted, room // block.slot_bytes))
    count = max(1, min(most, START_BYTES // block.slot_bytes))
    round_of(count)  # Connects, and touches memory for the first time.
    count = max(1, min(most, int(count * ROUND_S / max(round_of(count)[:2]))))
    taken: list[tuple[float, float, float]] = []
    ends_at = clock() + ROUNDS_S
    while len(taken) < NUM_ROUNDS and (not taken or clock() < ends_at):
        taken.append(round_of(count))
    put_s, get_s, one_block_s = zip(*taken, strict=True)
    return {
        "transport": namespace.transport.name,
        "round_trip_ms": 1e3 * median(ping() for _ in range(NUM_PINGS)),
        "one_block_ms": 1e3 * median(one_block_s),
        "put_gb_per_s": _rates(count * block.slot_bytes, put_s),
        "get_gb_per_s": _rates(count * region_bytes, get_s),
        "rounds": len(taken),
        "put_round_bytes": count * block.slot_bytes,
        "get_round_bytes": count * region_bytes,
        "region_bytes": region_bytes,
        "limited_by": "" if count == wanted else "room" if count == most else "time",
        "free_bytes": free_bytes(before),
        "evicted_blocks": client.admin.stats().counters["evicted_blocks"] - before.counters["evicted_blocks"],
    }


def _rates(nbytes: int, seconds: Sequence[float]) -> dict[str, float]:
    """Rates of rounds that moved `nbytes` each, in GB/s."""
    rates = [nbytes / max(each, 1e-9) / GB for each in seconds]
    return {"median": median(rates), "lowest": min(rates), "highest": max(rates)}


def free_bytes(stats: pb.StatsResponse) -> int:
    """Memory that the pool can give to new blocks without evicting any."""
    return max(0, stats.free_bytes - max(0, stats.arena_bytes - stats.prefaulted_bytes))
