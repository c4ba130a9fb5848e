"""How long does the scheduler wait for a lookup? p50 and p99, all hits, beside Mooncake Store with vLLM's keys.

kvpool: one RPC that also takes a lease; the release is outside the timing. Mooncake: what vLLM's MooncakeStoreConnector
does between the block hashes and the answer: a string key for every block and TP rank, `batch_is_exist`, and the check
that every rank has the block. kvpool is measured alone first, then in alternation with Mooncake.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from benchmarks.harness import (
    Row,
    alternate,
    at_most,
    kvpool_server,
    percentile,
    report,
    speed_ratio,
    timed,
)
from benchmarks.mooncake_store import Store, mooncake_store
from kvpool import BlockRun, Client, ClientConfig, GroupSpec, NamespaceSpec
from kvpool.transport.base import Buffers

REACH_MS = {64: 0.6, 512: 0.8, 8192: 4.0}
ROUNDS = {64: 400, 512: 400, 8192: 100}
PINGS = 400
TP_SIZES = (1, 8)
CHUNK_BYTES = 64
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
PUT_KEYS = 256


class Pool:
    """A pool that holds every block, in a namespace of `num_shards` shards."""

    def __init__(self, endpoint: str, hashes: Sequence[bytes], num_shards: int):
        self._client = Client(ClientConfig(endpoint, timeout_ms=60_000))
        group = GroupSpec("full_attention", 16, 8, 128, 128, num_shards, CHUNK_BYTES)
        self._namespace = self._client.open_namespace(NamespaceSpec(f"benchmark-{num_shards}", (group,)))
        self._client.put(self._namespace, [BlockRun(0, hashes)], _fill)

    def lookup(self, hashes: Sequence[bytes]) -> float:
        """Seconds of one lookup with a lease."""
        run = BlockRun(0, hashes)
        answers = []
        seconds = timed(lambda: answers.append(self._client.lookup(self._namespace, [run])))
        assert answers[0].hits[0].num_leading == len(hashes), "not every block was a hit"
        self._client.release([answers[0].lease_id])
        return seconds

    def ping(self) -> float:
        """Seconds of a call that does nothing."""
        return timed(self._client.ping)

    def close(self) -> None:
        self._client.close()


class MooncakePool:
    """A Mooncake Store that holds every block of every rank under vLLM's keys.

    Source: vLLM, distributed/kv_transfer/kv_connector/v1/mooncake/store, `PoolKey` and `MooncakeStoreWorker.lookup`.
    """

    def __init__(self, store: Store, hashes: Sequence[bytes], tp_size: int):
        self._store = store
        self._prefixes = [f"{MODEL}@tp_rank:{rank}@pcp0@dcp0@pp_rank:0@group:0" for rank in range(tp_size)]
        self._value = np.zeros(1 << 20, np.uint8)
        store.register(self._value)
        keys, _ = self._keys(hashes)
        for start in range(0, len(keys), PUT_KEYS):
            batch = keys[start : start + PUT_KEYS]
            store.put(batch, [self._value.ctypes.data] * len(batch), CHUNK_BYTES)

    def lookup(self, hashes: Sequence[bytes]) -> float:
        """Seconds from the hashes to the set of blocks that every rank has."""
        found: list[set[tuple[int, bytes]]] = []
        seconds = timed(lambda: found.append(self._exist(hashes)))
        assert len(found[0]) == len(hashes), "not every block was a hit"
        return seconds

    def _exist(self, hashes: Sequence[bytes]) -> set[tuple[int, bytes]]:
        keys, meta = self._keys(hashes)
        result = self._store.exist(keys)
        exists: set[tuple[int, bytes]] = set()
        count = len(self._prefixes)
        at = 0
        for group_and_hash in meta:
            if all(result[at + rank] == 1 for rank in range(count)):
                exists.add(group_and_hash)
            at += count
        return exists

    def _keys(self, hashes: Sequence[bytes]) -> tuple[list[str], list[tuple[int, bytes]]]:
        keys: list[str] = []
        meta: list[tuple[int, bytes]] = []
        for block_hash in hashes:
            hash_hex = block_hash.hex()
            for prefix in self._prefixes:
                keys.append(f"{prefix}@{hash_hex}")
            meta.append((0, bytes(block_hash)))
        return keys, meta


def measure(
    pools: Mapping[str, Pool | MooncakePool], hashes: Sequence[bytes], num_blocks: int
) -> dict[str, list[float]]:
    """Seconds of lookups of `num_blocks` blocks, by pool."""
    asked = hashes[:num_blocks]
    measures: dict[str, Callable[[], float]] = {name: partial(pool.lookup, asked) for name, pool in pools.items()}
    return alternate(measures, ROUNDS[num_blocks], shuffled=True)


def rows_of(num_blocks: int, alone: Mapping[str, list[float]], beside: Mapping[str, list[float]]) -> list[Row]:
    """What lookups of `num_blocks` blocks took."""
    rows = []
    for tp_size in TP_SIZES:
        ours, theirs = f"kvpool, TP {tp_size}", f"mooncake, TP {tp_size}"
        what = f"{num_blocks} blocks, TP {tp_size}"
        p50_ms = statistics.median(alone[ours]) * 1e3
        rows.append(at_most(f"{what}: kvpool p50", p50_ms, "ms", REACH_MS[num_blocks]))
        rows.append(Row(f"{what}: kvpool p99", percentile(alone[ours], 99) * 1e3, "ms"))
        rows.append(Row(f"{what}: kvpool p50, beside mooncake", statistics.median(beside[ours]) * 1e3, "ms"))
        rows.append(Row(f"{what}: mooncake p50", statistics.median(beside[theirs]) * 1e3, "ms"))
        rows.append(Row(f"{what}: mooncake p99", percentile(beside[theirs], 99) * 1e3, "ms"))
        rows.append(Row(f"{what}: mooncake / kvpool", speed_ratio(beside[ours], beside[theirs]), "x"))
    return rows


def _fill(indices: Sequence[int], buffers: Buffers) -> None:
    for buffer in buffers:
        buffer[:] = 0


def main() -> None:
    """Measures and reports."""
    hashes = [hashlib.sha256(idx.to_bytes(8, "big")).digest() for idx in range(max(REACH_MS))]
    with kvpool_server("256MiB") as endpoint:
        ours = {f"kvpool, TP {tp_size}": Pool(endpoint, hashes, tp_size) for tp_size in TP_SIZES}
        alone = {num_blocks: measure(ours, hashes, num_blocks) for num_blocks in REACH_MS}
        ping_s = statistics.median(ours[f"kvpool, TP {TP_SIZES[0]}"].ping() for _ in range(PINGS))
        with mooncake_store(256 << 20) as store:
            theirs = {f"mooncake, TP {tp_size}": MooncakePool(store, hashes, tp_size) for tp_size in TP_SIZES}
            beside = {num_blocks: measure({**ours, **theirs}, hashes, num_blocks) for num_blocks in REACH_MS}
        for pool in ours.values():
            pool.close()
    rows = [Row("a call that does nothing (Ping): p50", ping_s * 1e3, "ms")]
    for num_blocks in REACH_MS:
        rows += rows_of(num_blocks, alone[num_blocks], beside[num_blocks])
    report(
        "lookup",
        rows,
        rounds=ROUNDS,
        kvpool="one RPC with a lease; shards a block = TP size; release outside the timing",
        mooncake="keys as vLLM builds them, in the timing; batch_is_exist; no lease asked for",
        beside="alternated with the other store, whose heavy lookups leave cold caches; ratios are of these rounds",
    )


if __name__ == "__main__":
    main()
