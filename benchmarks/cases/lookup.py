"""How long does the scheduler wait for a lookup? p50 and p99, all hits, beside Mooncake Store with vLLM's keys.

The pool holds a million entries (`--entries`), of which every lookup asks for some.

kvpool: one RPC that also takes a lease; the release is outside the timing. Mooncake: what vLLM's MooncakeStoreConnector
does between the block hashes and the answer: a string key for every block and TP rank, `batch_is_exist`, and the check
that every rank has the block. kvpool is measured alone first, then in alternation with Mooncake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated

import numpy as np
import typer

from benchmarks.harness.measuring import (
    Row,
    alternate,
    at_least,
    at_most,
    kvpool_server,
    ms,
    progress,
    report,
    speed_ratio,
    timed,
)
from benchmarks.peers.mooncake_store import Store, mooncake_store
from kvpool import BlockRun, Client, ClientConfig, GroupSpec, NamespaceSpec, checksum
from kvpool.transport.base import Buffers
from kvpool.transport.chunk_sums import Checksums
from kvpool_server.cache.arena import MIN_SLOT_BYTES

REACH_MS = {64: 0.35, 512: 0.6, 8192: 3.0, 65_536: 20.0}
P99_REACH = 3
TIMES_MOONCAKE, MOONCAKE_FROM_BLOCKS = 4.0, 8192
ROUNDS = {64: 1000, 512: 1000, 8192: 400, 65_536: 100}
BESIDE_ROUNDS = {64: 400, 512: 200, 8192: 50, 65_536: 10}
PING = "Ping, a call of its own"
ONE_BLOCK = "a lookup of one block"
HASH_BYTES = 32
TP_SIZES = (1, 8)
CHUNK_BYTES = 128
"""Not less: an extent has a bounded number of slots, and smaller ones would leave a part of it empty."""
ROOM_MIB = 256
MOONCAKE_BYTES = 1 << 30
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
_ZEROS_SUM = checksum(np.zeros(CHUNK_BYTES, np.uint8))


class Pool:
    """A client of a pool that holds every block, in a namespace of `num_shards` shards."""

    def __init__(self, endpoint: str, hashes: Sequence[bytes], num_shards: int):
        self._client = Client(ClientConfig(endpoint, timeout_ms=60_000))
        group = GroupSpec("full_attention", 16, 8, 128, 128, num_shards, CHUNK_BYTES)
        self._namespace = self._client.open_namespace(NamespaceSpec(f"benchmark-{num_shards}", (group,)))
        self.put(hashes)

    def put(self, hashes: Sequence[bytes]) -> None:
        """Stores blocks of zeros, as few in a request as the server asks for."""
        most = self._namespace.max_batch_blocks
        with progress("entries", len(hashes) // most + 1) as advance:
            for first in range(0, len(hashes), most):
                run = BlockRun(0, hashes[first : first + most])
                self._client.put(self._namespace, [run], self._fill, fill_sums=True)
                advance()

    def lookup(self, hashes: Sequence[bytes]) -> float:
        """Seconds of one lookup with a lease."""
        run = BlockRun(0, hashes)
        answers = []
        seconds = timed(lambda: answers.append(self._client.lookup(self._namespace, [run])))
        assert answers[0].hits[0].num_leading == len(hashes), "not every block was a hit"
        self._client.release([answers[0].lease_id])
        return seconds

    def num_entries(self) -> int:
        """In the whole pool."""
        return self._client.admin.stats().num_entries

    def ping(self) -> float:
        """Seconds of a call that does nothing."""
        return timed(self._client.admin.ping)

    def close(self) -> None:
        self._client.close()

    def _fill(self, indices: Sequence[int], buffers: Buffers) -> Checksums:
        for buffer in buffers:
            buffer[:] = 0
        sums = [_ZEROS_SUM] * (len(buffers) * self._namespace.group(0).num_shards)
        return lambda: sums


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
        store.put(keys, [self._value.ctypes.data] * len(keys), CHUNK_BYTES)

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
    pools: Mapping[str, Pool | MooncakePool], hashes: Sequence[bytes], rounds: Mapping[int, int]
) -> dict[int, dict[str, list[float]]]:
    """Seconds of lookups, by number of blocks and pool, of a lookup of one block, and of a call that does nothing.

    Lookups are messages of one long-lived stream. Ping is a unary call: setting that up costs more than a small lookup.

    Args:
        rounds: by number of blocks.
    """
    taken = {}
    pinged = next(pool for pool in pools.values() if isinstance(pool, Pool))
    for num_blocks, count in rounds.items():
        asked = hashes[:num_blocks]
        measures: dict[str, Callable[[], float]] = {name: partial(pool.lookup, asked) for name, pool in pools.items()}
        measures[PING] = pinged.ping
        measures[ONE_BLOCK] = partial(pinged.lookup, hashes[:1])
        taken[num_blocks] = alternate(measures, count, what=f"lookups of {num_blocks:,} blocks", shuffled=True)
    return taken


def rows_of(num_blocks: int, alone: Mapping[str, list[float]], beside: Mapping[str, list[float]]) -> list[Row]:
    """What lookups of `num_blocks` blocks took."""
    rows = []
    for tp_size in TP_SIZES:
        ours, theirs = f"kvpool, TP {tp_size}", f"mooncake, TP {tp_size}"
        what = f"{num_blocks} blocks, TP {tp_size}"
        rows.append(at_most(f"{what}: kvpool p50", ms(alone[ours]), "ms", REACH_MS[num_blocks]))
        rows.append(at_most(f"{what}: kvpool p99", ms(alone[ours], 99), "ms", P99_REACH * REACH_MS[num_blocks]))
        rows.append(Row(f"{what}: kvpool p50, beside mooncake", ms(beside[ours]), "ms"))
        rows.append(Row(f"{what}: mooncake p50", ms(beside[theirs]), "ms"))
        rows.append(Row(f"{what}: mooncake p99", ms(beside[theirs], 99), "ms"))
        ratio, name = speed_ratio(beside[ours], beside[theirs]), f"{what}: mooncake / kvpool"
        far = num_blocks >= MOONCAKE_FROM_BLOCKS
        rows.append(at_least(name, ratio, "x", TIMES_MOONCAKE) if far else Row(name, ratio, "x"))
    return rows


def random_hashes(count: int, seed: int) -> list[bytes]:
    """As many block hashes, spread as real ones are."""
    drawn = np.random.default_rng(seed).bytes(count * HASH_BYTES)
    return [drawn[at : at + HASH_BYTES] for at in range(0, len(drawn), HASH_BYTES)]


def main(entries: Annotated[int, typer.Option(help="Entries in the pool.", min=200_000)] = 1_000_000) -> None:
    """Measures and reports."""
    hashes = random_hashes(max(REACH_MS), seed=0)
    with kvpool_server(f"{(entries * MIN_SLOT_BYTES >> 20) + ROOM_MIB}MiB") as endpoint:
        ours = {f"kvpool, TP {tp_size}": Pool(endpoint, hashes, tp_size) for tp_size in TP_SIZES}
        filled = ours[f"kvpool, TP {TP_SIZES[0]}"]
        more = random_hashes(entries - len(ours) * len(hashes), seed=1)
        filled_in_s = timed(lambda: filled.put(more))
        assert filled.num_entries() == entries, "the pool did not keep every entry"
        alone = measure(ours, hashes, ROUNDS)
        with mooncake_store(MOONCAKE_BYTES) as store:
            theirs = {f"mooncake, TP {tp_size}": MooncakePool(store, hashes, tp_size) for tp_size in TP_SIZES}
            beside = measure({**ours, **theirs}, hashes, BESIDE_ROUNDS)
        for pool in ours.values():
            pool.close()
    rows = [Row(f"{what}: p50", ms(alone[min(ROUNDS)][what]), "ms") for what in (PING, ONE_BLOCK)]
    for num_blocks in REACH_MS:
        rows += rows_of(num_blocks, alone[num_blocks], beside[num_blocks])
    report(
        "lookup",
        rows,
        entries=entries,
        filled_in_s=round(filled_in_s, 1),
        rounds=ROUNDS,
        rounds_beside_mooncake=BESIDE_ROUNDS,
        kvpool="one RPC with a lease; shards a block = TP size; release outside the timing",
        mooncake="keys as vLLM builds them, in the timing; batch_is_exist; no lease asked for",
        beside="alternated with the other store, whose heavy lookups leave cold caches; ratios are of these rounds",
    )


if __name__ == "__main__":
    typer.run(main)
