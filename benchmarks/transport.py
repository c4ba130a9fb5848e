"""How fast do blocks travel? shm beside memcpy + xxh3 and Mooncake Store; stream beside a bare stream and mooncake.

All in one run, on one machine, one client thread. Puts and gets move 64 MiB; every buffer is warm. A put's blocks are
removed, outside the timing, before the next round. Checksums are on for kvpool (Mooncake has none).
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import valkey
from benchmarks.bare_stream import bare_stream
from benchmarks.harness import Row, alternate, at_least, gb_per_s, kvpool_server, report, speed_ratio, timed
from benchmarks.mooncake_store import Store, addresses, mooncake_store
from benchmarks.sweep import ROUNDS as SWEEP_ROUNDS
from benchmarks.sweep import sweep
from benchmarks.traffic import Bytes, Traffic, copy_and_sum, pair

MIB = 1 << 20
BATCH_BYTES = 64 * MIB
SHM_BLOCK_BYTES = 2 * MIB
STREAM_CHUNK_BYTES = 1 * MIB
ROUNDS = 31
SHARD_COUNTS = (1, 8)
COPY_SHARE = 0.6
TIMES_MOONCAKE = 5.0
STREAM_PUT_GB_S, STREAM_GET_GB_S, BARE_SHARE = 1.0, 1.5, 0.8


def shm_rows(endpoint: str, store: Store, source: Bytes, sink: Bytes) -> list[Row]:
    """Questions 1 and 2: shm beside memcpy + xxh3, and beside Mooncake Store.

    Args:
        store: has both buffers registered.
        source, sink: uint8 [num_blocks, SHM_BLOCK_BYTES], warm.
    """
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
    taken = alternate(measures, ROUNDS, what="shm")
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


def stream_rows(endpoint: str, source: Bytes, sink: Bytes) -> list[Row]:
    """Question 3: stream beside a bare gRPC stream of the same messages, and beside the Transfer Engine over TCP.

    Args:
        source, sink: uint8 [num_chunks, STREAM_CHUNK_BYTES], warm.
    """
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
            what="stream",
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
    source, sink = pair(BATCH_BYTES)
    with kvpool_server("512MiB", "--mooncake", "tcp") as endpoint:
        with mooncake_store(512 * MIB) as store:
            for buffer in (source, sink):
                store.register(buffer)
            rows = shm_rows(endpoint, store, source.reshape(-1, SHM_BLOCK_BYTES), sink.reshape(-1, SHM_BLOCK_BYTES))
            series = sweep(endpoint, store, source, sink)
        chunks = (source.reshape(-1, STREAM_CHUNK_BYTES), sink.reshape(-1, STREAM_CHUNK_BYTES))
        rows += stream_rows(endpoint, *chunks)
    report(
        "transport",
        rows,
        series,
        rounds=ROUNDS,
        batch_bytes=BATCH_BYTES,
        shm_block_bytes=SHM_BLOCK_BYTES,
        stream_chunk_bytes=STREAM_CHUNK_BYTES,
        mooncake="segment in another process, loopback TCP, registered buffers, no checksums",
        valkey=valkey.missing() or f"{valkey.version()}; one client, Unix socket, nothing persisted",
        sweep_rounds=SWEEP_ROUNDS,
        bare="asyncio server and synchronous client, generic handlers, raw bytes, nothing copied or summed",
    )


if __name__ == "__main__":
    main()
