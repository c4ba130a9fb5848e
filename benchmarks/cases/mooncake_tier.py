"""How fast does the Mooncake tier move blocks, beside Mooncake's own client, and when does a client have all bytes?

One cluster on this host serves both: a master, and a process that holds the memory. Mooncake's own client puts and gets
from and to registered buffers, in batches of the same bytes as the tier's. The tier is measured with the pool above it,
in one process: down is from the end of a put until every block is written, up from a lookup until every block is in the
arena.

Then a client of a real server whose arena is empty loads prompts from the cluster: as blocks come up, part by part, or
all at once when the last block is up.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import mmap
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated

import numpy as np
import typer

from benchmarks.harness.measuring import (
    Estimate,
    Row,
    alternate,
    at_least,
    gb_per_s,
    kvpool_server,
    ms,
    report,
    speed_ratio,
    time_ratio,
    timed,
    until_true,
)
from benchmarks.harness.traffic import Bytes
from benchmarks.peers.mooncake_store import Store, mooncake_store
from kvpool import BlockRun, GroupSpec, NamespaceSpec
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.rpc import Namespace
from kvpool.protocol.hashing import checksum
from kvpool.protocol.types import Lookup, ShardRange
from kvpool.transport.base import Buffers
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.eviction import DEFAULT_POLICY, POLICIES
from kvpool_server.tiering import demoter
from kvpool_server.tiering.tiered_pool import TieredPool
from kvpool_server.tiers.registry import parse
from kvpool_server.tiers.tier import Tier, TierContext
from testbed.pool_at_once import PoolAtOnce

KIB, MIB = 1 << 10, 1 << 20
BLOCK_BYTES = (256 * KIB, 2 * MIB)
TOTAL_BYTES = 256 * MIB
SEGMENT_BYTES = 3072 * MIB
PROMPT_BYTES, PROMPT_BLOCK_BYTES = 128 * MIB, 2 * MIB
REACH = 0.7
DEADLINE_S = 60.0


def name_of(*what: object) -> bytes:
    """A block hash."""
    return hashlib.sha256(repr(what).encode()).digest()


def spec(block_bytes: int) -> NamespaceSpec:
    """Of blocks of one shard."""
    return NamespaceSpec("benchmark", (GroupSpec("full_attention", 16, 8, 128, 128, 1, block_bytes),))


def pages(nbytes: int) -> Bytes:
    """Page-aligned, random bytes: uint8 [nbytes]."""
    memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    memory[:] = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    return memory


class PoolAboveTier:
    """A pool with a Mooncake tier, in this process, whose blocks go down and come up again.

    Args:
        tier: as in `--tier`.
        memory: the arena: uint8 [TOTAL_BYTES], page-aligned.
    """

    def __init__(self, tier: str, memory: Bytes, block_bytes: int):
        self._loop = asyncio.new_event_loop()
        self._tier = parse(tier).make(TierContext(("127.0.0.1", 0), POLICIES[DEFAULT_POLICY]))
        ids = itertools.count(1)
        self._pool = PoolAtOnce(Arena(memory.nbytes), time.monotonic, lambda: next(ids))
        self._tiered = TieredPool(self._pool, memory, [self._tier])
        self._namespace, _ = self._pool.open_namespace(spec(block_bytes))
        self._memory, self._block_bytes = memory, block_bytes
        self._run = BlockRun(0, [])
        self._rounds = itertools.count()
        self._do(self._tiered.open())

    def down(self) -> float:
        """Seconds until `TOTAL_BYTES` of new blocks are in the tier; it and the arena are empty before."""
        self._do(self._tiered.clear())
        self._settle()
        nth, count = next(self._rounds), TOTAL_BYTES // self._block_bytes
        self._run = BlockRun(0, [name_of(self._block_bytes, nth, idx) for idx in range(count)])
        grant = self._pool.put_start(self._namespace.fingerprint, [self._run], ShardRange(0, 1))
        sums = [checksum(self._memory[offset : offset + self._block_bytes]) for offset in grant.offsets]
        return timed(lambda: self._do(self._store(grant.ticket_id, sums)))

    async def _store(self, ticket_id: int, sums: list[int]) -> None:
        self._pool.put_end(ticket_id, sums)
        while not self._tiered.is_idle:
            await asyncio.sleep(0.001)
        assert not self._tier.counters["dropped_demotions"], "blocks were dropped on their way down"

    def up(self) -> float:
        """Seconds until the blocks that went down last are in the arena, which is empty before."""
        self._pool.clear()
        self._settle()
        return timed(lambda: self._do(self._promote()))

    def _settle(self) -> None:
        """What a server does between calls: the slots of ended leases become free."""
        while self._pool.settle():
            pass

    async def _promote(self) -> None:
        while (found := await self._lookup()) and found.retry_after_ms:
            await asyncio.sleep(found.retry_after_ms / 1e3)
        assert found.hits[0].num_leading == len(self._run), "a block was lost"

    async def _lookup(self) -> Lookup:
        found = await self._tiered.lookup(
            self._namespace.fingerprint, [self._run], prefix_only=True, lease_ttl_ms=10_000
        )
        self._pool.release([found.lease_id])
        return found

    def close(self) -> None:
        self._do(self._tiered.close())
        self._loop.close()

    def _do(self, work: Awaitable[object]) -> None:
        self._loop.run_until_complete(asyncio.wait_for(work, DEADLINE_S))


class Batches:
    """Mooncake's own client, which moves `TOTAL_BYTES` in calls of a tier's batch.

    Args:
        memory: registered: uint8 [TOTAL_BYTES].
    """

    def __init__(self, store: Store, memory: Bytes, block_bytes: int):
        self._store = store
        self._keys = [f"benchmark@{block_bytes}@{nth}" for nth in range(TOTAL_BYTES // block_bytes)]
        self._addresses = [memory.ctypes.data + nth * block_bytes for nth in range(len(self._keys))]
        self._block_bytes = block_bytes

    def put(self) -> float:
        """Seconds of a put into the empty store."""
        self._store.remove_all()
        return timed(lambda: self._each(self._store.put, demoter.PINNED_BYTES))

    def get(self) -> float:
        """Seconds of a get of what was put last."""
        return timed(lambda: self._each(self._store.get, Tier.read_bytes))

    def _each(self, move: Callable[[list[str], list[int], int], None], batch_bytes: int) -> None:
        most = batch_bytes // self._block_bytes
        for first in range(0, len(self._keys), most):
            batch = slice(first, first + most)
            move(self._keys[batch], self._addresses[batch], self._block_bytes)


def measure_tier(store: Store, tiers: Mapping[str, str], rounds: int) -> list[Row]:
    """Rates of tiers, for each size of block, beside Mooncake's own client.

    Args:
        tiers: as in `--tier`, by the name that each has in the rows.
    """
    own, arena = pages(TOTAL_BYTES), pages(TOTAL_BYTES)
    store.register(own)
    measures: dict[tuple[str, str, int], Callable[[], float]] = {}
    with ExitStack() as stack:
        for block_bytes in BLOCK_BYTES:
            alone = Batches(store, own, block_bytes)
            # A put of Mooncake's own client empties the store.
            measures |= {("", "put", block_bytes): alone.put, ("", "get", block_bytes): alone.get}
            for name, tier in tiers.items():
                pool = PoolAboveTier(tier, arena, block_bytes)
                stack.callback(pool.close)
                measures |= {(name, "down", block_bytes): pool.down, (name, "up", block_bytes): pool.up}
        taken = alternate(measures, rounds, what="tier")
    rows = []
    for ours, theirs in (("down", "put"), ("up", "get")):
        for block_bytes in BLOCK_BYTES:
            size = f"blocks of {block_bytes // KIB} KiB"
            alone_s = taken["", theirs, block_bytes]
            rows.append(Row(f"Mooncake's own client, {theirs}, {size}", gb_per_s(TOTAL_BYTES, alone_s), "GB/s"))
            for name in tiers:
                tier_s, what = taken[name, ours, block_bytes], f"{name}, {ours}, {size}"
                rows.append(Row(what, gb_per_s(TOTAL_BYTES, tier_s), "GB/s"))
                ratio = speed_ratio(tier_s, alone_s)
                rows.append(at_least(f"{what}, over Mooncake's own client", ratio, "x", REACH))
    return rows


# A client of a server that has to bring its blocks up


class Loader:
    """A client that loads prompts from a server.

    Args:
        sink: uint8 [PROMPT_BYTES].

    Attributes:
        first_s: seconds until the first part of each prompt was loaded.
    """

    def __init__(self, client: Client, namespace: Namespace, sink: Bytes):
        self._client, self._namespace = client, namespace
        self._sink = sink.reshape(-1, PROMPT_BLOCK_BYTES)
        self.first_s: list[float] = []

    def as_they_come(self, names: Sequence[bytes]) -> float:
        """Seconds of loading a prompt part by part: blocks that are up are loaded while the next come up."""
        return timed(lambda: self._load(names, wait_for_all=False))

    def once_all_are_up(self, names: Sequence[bytes]) -> float:
        """Seconds of waiting for all blocks of a prompt, and then loading them."""
        return timed(lambda: self._load(names, wait_for_all=True))

    def _load(self, names: Sequence[bytes], *, wait_for_all: bool) -> None:
        done = 0
        started = time.perf_counter()
        while done < len(names):
            found = self._client.lookup(self._namespace, [BlockRun(0, names[done:])])
            ready = found.hits[0].num_leading
            if ready and not (wait_for_all and found.retry_after_ms):
                run = BlockRun(0, names[done : done + ready])
                self._client.get(self._namespace, found.lease_id, [run], self._drain_from(done))
                if not done:
                    self.first_s.append(time.perf_counter() - started)
                done += ready
            else:
                assert found.retry_after_ms, "a block was lost"
                time.sleep(found.retry_after_ms / 1e3)
            self._client.release([found.lease_id])

    def _drain_from(self, first: int) -> Callable[[Sequence[int], Buffers], None]:
        def drain(indices: Sequence[int], buffers: Buffers) -> None:
            for idx, buffer in zip(indices, buffers, strict=True):
                self._sink[first + idx] = buffer

        return drain


def put_prompts(endpoint: str, prompts: Sequence[Sequence[bytes]], data: Bytes) -> None:
    """Puts prompts of the same bytes, each once the tier has the one before it: uint8 [PROMPT_BYTES]."""
    payloads = list(data.reshape(-1, PROMPT_BLOCK_BYTES))
    with Client(ClientConfig(endpoint, timeout_ms=20_000, data_timeout_ms=20_000)) as client:
        namespace = client.open_namespace(spec(PROMPT_BLOCK_BYTES))

        def demoted() -> int:
            return client.admin.stats().tiers[0].counters["demoted_blocks"]

        for nth, names in enumerate(prompts, 1):
            client.put_blocks(namespace, BlockRun(0, names), payloads)
            written = nth * len(names)
            until_true(lambda count=written: demoted() == count, "the tier is too slow")


def measure_loads(store: Store, tier: str, transport: str, rounds: int) -> list[Row]:
    """Loads of prompts that only the cluster has, each prompt once."""
    store.remove_all()
    data, warmups = pages(PROMPT_BYTES), 1
    blocks = range(PROMPT_BYTES // PROMPT_BLOCK_BYTES)
    prompts = [[name_of("prompt", nth, idx) for idx in blocks] for nth in range(2 * (rounds + warmups))]
    flags = ("--mooncake-trusted-network", "--tier", tier)
    config = {"transport": transport, "timeout_ms": 20_000, "data_timeout_ms": 20_000}
    with kvpool_server("512MiB", *flags) as endpoint:
        put_prompts(endpoint, prompts, data)
    arena_bytes = (len(prompts) + 1) * PROMPT_BYTES
    with kvpool_server(str(arena_bytes), *flags) as endpoint, Client(ClientConfig(endpoint, **config)) as client:
        loader = Loader(client, client.open_namespace(spec(PROMPT_BLOCK_BYTES)), data)
        fresh = iter(prompts)
        taken = alternate(
            {
                "as they come": lambda: loader.as_they_come(next(fresh)),
                "all": lambda: loader.once_all_are_up(next(fresh)),
            },
            rounds,
            what="loads",
            warmups=warmups,
        )
    first_s = loader.first_s[2 * warmups :: 2]
    size = f"prompt of {PROMPT_BYTES // MIB} MiB from the cluster"
    return [
        Row(f"{size}, loaded as blocks come up", ms(taken["as they come"]), "ms"),
        Row(f"{size}, loaded once all are up", ms(taken["all"]), "ms"),
        Row(f"{size}, until the first part is loaded, as blocks come up", ms(first_s), "ms"),
        Row(f"{size}, as they come over once all are up", time_ratio(taken["as they come"], taken["all"]), "x"),
    ]


def main(
    rounds: Annotated[int, typer.Option(help="Of each measure.")] = 9,
    transport: Annotated[str, typer.Option(help="Of the client that loads prompts, as in ClientConfig.")] = "auto",
    explore: Annotated[
        list[str] | None,
        typer.Option(help="Options of --tier, such as threads=6: only print the rates of such a tier. Repeat."),
    ] = None,
) -> None:
    """Measures, and reports."""
    with mooncake_store(SEGMENT_BYTES) as store:
        tier = f"mooncake:master={store.address}"
        if explore:
            for row in measure_tier(store, {each: f"{tier},{each}" for each in explore}, rounds):
                assert isinstance(row.figure, Estimate)
                print(f"{row.what}: {row.figure.figure:.3g} {row.unit} ({row.figure.low:.3g} to {row.figure.high:.3g})")
            return
        rows = measure_tier(store, {"tier": tier}, rounds)
        rows += measure_loads(store, tier, transport, rounds)
    report("mooncake_tier", rows, rounds=rounds, total_bytes=TOTAL_BYTES, transport=transport)


if __name__ == "__main__":
    typer.run(main)
