"""How fast do blocks travel? shm beside memcpy + xxh3 and Mooncake Store; stream beside a bare stream and mooncake.

All in one run, on one machine, one client thread. Puts and gets move 64 MiB; every buffer is warm. A put's blocks are
removed, outside the timing, before the next round. Checksums are on for kvpool (Mooncake has none).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.bare_stream import bare_stream
from benchmarks.harness import Row, alternate, at_least, gb_per_s, kvpool_server, report, speed_ratio, timed
from benchmarks.mooncake_store import Store, addresses, mooncake_store
from kvpool import BlockRun, Client, ClientConfig, GroupSpec, NamespaceSpec, checksum
from kvpool.transport.base import Buffers

MIB = 1 << 20
BATCH_BYTES = 64 * MIB
SHM_BLOCK_BYTES = 2 * MIB
STREAM_CHUNK_BYTES = 1 * MIB
ROUNDS = 31
SHARD_COUNTS = (1, 8)
COPY_SHARE = 0.6
TIMES_MOONCAKE = 5.0
STREAM_PUT_GB_S, STREAM_GET_GB_S, BARE_SHARE = 1.0, 1.5, 0.8

Bytes = npt.NDArray[np.uint8]


class Traffic:
    """One batch of blocks that goes to the pool and back.

    Args:
        source, sink: uint8 [num_blocks, block_bytes], warm.
        num_shards: chunks in a block.
        transport: "shm", "stream" or "mooncake".
    """

    def __init__(self, endpoint: str, transport: str, source: Bytes, sink: Bytes, num_shards: int):
        num_blocks, block_bytes = source.shape
        group = GroupSpec("full_attention", 16, 8, 128, 128, num_shards, block_bytes // num_shards)
        spec = NamespaceSpec(f"benchmark-{transport}-{num_shards}", (group,))
        self._client = Client(ClientConfig(endpoint, transport=transport))
        self._namespace = self._client.open_namespace(spec)
        self._run = BlockRun(0, [idx.to_bytes(32, "big") for idx in range(num_blocks)])
        self._source, self._sink = source, sink
        self.last_get_s = 0.0

    def put(self) -> float:
        """Seconds of one put into an empty pool."""
        self._client.remove(self._namespace, [self._run])
        return timed(lambda: self._client.put(self._namespace, [self._run], self._fill))

    def get(self) -> float:
        """Seconds of lookup, get and release; `last_get_s` is the get's part."""
        started = time.perf_counter()
        found = self._client.lookup(self._namespace, [self._run])
        looked_up = time.perf_counter()
        self._client.get(self._namespace, found.lease_id, [self._run], self._drain)
        self.last_get_s = time.perf_counter() - looked_up
        self._client.release([found.lease_id])
        return time.perf_counter() - started

    def check(self) -> None:
        """Asserts that what was put is what comes back."""
        self._sink[:] = 0
        self.put()
        self.get()
        assert np.array_equal(self._source, self._sink), "the pool returned other bytes"

    def close(self) -> None:
        self._client.close()

    def _fill(self, indices: Sequence[int], buffers: Buffers) -> None:
        for idx, buffer in zip(indices, buffers, strict=True):
            buffer[:] = self._source[idx]

    def _drain(self, indices: Sequence[int], buffers: Buffers) -> None:
        for idx, buffer in zip(indices, buffers, strict=True):
            self._sink[idx] = buffer


def copy_and_sum(source: Bytes, sink: Bytes, chunk_bytes: int) -> None:
    """The least that a verified copy costs: memcpy of each block, then xxh3 of each of its chunks."""
    for there, here in zip(source, sink, strict=True):
        here[:] = there
        for at in range(0, len(here), chunk_bytes):
            checksum(here[at : at + chunk_bytes])


def pair(num_blocks: int, block_bytes: int) -> tuple[Bytes, Bytes]:
    """A random source and a touched sink."""
    source = np.random.default_rng(0).integers(0, 256, (num_blocks, block_bytes), np.uint8)
    return source, np.ones_like(source)


def shm_rows(endpoint: str, store: Store) -> list[Row]:
    """Questions 1 and 2: shm beside memcpy + xxh3, and beside Mooncake Store."""
    source, sink = pair(BATCH_BYTES // SHM_BLOCK_BYTES, SHM_BLOCK_BYTES)
    for buffer in (source, sink):
        store.register(buffer)
    keys = [f"benchmark@{idx}" for idx in range(len(source))]
    froms, intos = addresses(source, SHM_BLOCK_BYTES), addresses(sink, SHM_BLOCK_BYTES)

    def mooncake_put() -> float:
        store.remove_all()
        return timed(lambda: store.put(keys, froms, SHM_BLOCK_BYTES))

    measures: dict[str, Callable[[], float]] = {
        "mooncake put": mooncake_put,
        "mooncake get": lambda: timed(lambda: store.get(keys, intos, SHM_BLOCK_BYTES)),
    }
    traffics = [Traffic(endpoint, "shm", source, sink, num_shards) for num_shards in SHARD_COUNTS]
    for num_shards, traffic in zip(SHARD_COUNTS, traffics, strict=True):
        traffic.check()
        chunk_bytes = SHM_BLOCK_BYTES // num_shards
        measures[f"copy {num_shards}"] = lambda size=chunk_bytes: timed(lambda: copy_and_sum(source, sink, size))  # type: ignore[misc]
        measures[f"put {num_shards}"] = traffic.put
        measures[f"lookup + get + release {num_shards}"] = traffic.get
        measures[f"get {num_shards}"] = lambda traffic=traffic: traffic.last_get_s  # type: ignore[misc]
    taken = alternate(measures, ROUNDS)
    for traffic in traffics:
        traffic.close()

    rows = [Row(f"{name}, loopback TCP", gb_per_s(BATCH_BYTES, taken[name]), "GB/s") for name in list(measures)[:2]]
    for num_shards in SHARD_COUNTS:
        copy = taken[f"copy {num_shards}"]
        rows.append(Row(f"memcpy + xxh3, {num_shards} shards", gb_per_s(BATCH_BYTES, copy), "GB/s"))
        for name in ("put", "get", "lookup + get + release"):
            ours = taken[f"{name} {num_shards}"]
            what = f"shm {name}, {num_shards} shards"
            rows.append(Row(what, gb_per_s(BATCH_BYTES, ours), "GB/s"))
            rows.append(at_least(f"{what} / memcpy + xxh3", speed_ratio(ours, copy), "x", COPY_SHARE))
            theirs = taken["mooncake put" if name == "put" else "mooncake get"]
            rows.append(at_least(f"{what} / mooncake", speed_ratio(ours, theirs), "x", TIMES_MOONCAKE))
    return rows


def stream_rows(endpoint: str) -> list[Row]:
    """Question 3: stream beside a bare gRPC stream of the same messages, and beside the Transfer Engine over TCP."""
    source, sink = pair(BATCH_BYTES // STREAM_CHUNK_BYTES, STREAM_CHUNK_BYTES)
    traffic = Traffic(endpoint, "stream", source, sink, num_shards=1)
    engine = Traffic(endpoint, "mooncake", source, sink, num_shards=1)
    for each in (traffic, engine):
        each.check()
    with bare_stream(STREAM_CHUNK_BYTES) as bare:
        taken = alternate(
            {
                "bare put": lambda: timed(lambda: bare.put(len(source))),
                "put": traffic.put,
                "bare get": lambda: timed(lambda: bare.get(len(source))),
                "whole get": traffic.get,
                "get": lambda: traffic.last_get_s,
                "mooncake put": engine.put,
                "whole mooncake get": engine.get,
                "mooncake get": lambda: engine.last_get_s,
            },
            ROUNDS,
        )
    traffic.close()
    engine.close()
    rows = []
    for name, bound in (("put", STREAM_PUT_GB_S), ("get", STREAM_GET_GB_S)):
        rate = gb_per_s(BATCH_BYTES, taken[name])
        share = speed_ratio(taken[name], taken[f"bare {name}"])
        reach = f">= {bound} GB/s, or {BARE_SHARE} of bare"
        rows.append(Row(f"bare gRPC stream {name}", gb_per_s(BATCH_BYTES, taken[f"bare {name}"]), "GB/s"))
        rows.append(Row(f"stream {name}", rate, "GB/s", reach, rate >= bound or share >= BARE_SHARE))
        rows.append(Row(f"stream {name} / bare", share, "x"))
        rows.append(Row(f"mooncake transport {name}, TCP", gb_per_s(BATCH_BYTES, taken[f"mooncake {name}"]), "GB/s"))
        ratio = speed_ratio(taken[f"mooncake {name}"], taken[name])
        rows.append(Row(f"mooncake transport {name} / stream", ratio, "x"))
    return rows


def main() -> None:
    """Measures and reports."""
    with kvpool_server("512MiB", "--mooncake", "tcp") as endpoint:
        with mooncake_store(512 * MIB) as store:
            rows = shm_rows(endpoint, store)
        rows += stream_rows(endpoint)
    report(
        "transport",
        rows,
        rounds=ROUNDS,
        batch_bytes=BATCH_BYTES,
        shm_block_bytes=SHM_BLOCK_BYTES,
        stream_chunk_bytes=STREAM_CHUNK_BYTES,
        mooncake="segment in another process, loopback TCP, registered buffers, no checksums",
        bare="asyncio server and synchronous client, generic handlers, raw bytes, nothing copied or summed",
    )


if __name__ == "__main__":
    main()
