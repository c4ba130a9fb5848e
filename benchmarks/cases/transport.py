"""How fast do blocks travel? shm beside memcpy + xxh3 and Mooncake Store; tcp and grpc beside bare sockets, a bare gRPC
stream, Mooncake Store and the Transfer Engine.

All in one run, on one machine, one client thread. Puts and gets move 64 MiB; every buffer is warm. A put's blocks are
removed, outside the timing, before the next round. Checksums are on for kvpool (Mooncake has none).
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable

import typer

from benchmarks.cases.sweep import ROUNDS as SWEEP_ROUNDS
from benchmarks.cases.sweep import sweep
from benchmarks.harness.measuring import (
    WITHIN_NOISE,
    Row,
    alternate,
    at_least,
    gb_per_s,
    kvpool_server,
    met,
    report,
    speed_ratio,
    timed,
)
from benchmarks.harness.traffic import Bytes, Traffic, copy_and_sum, pair
from benchmarks.peers import iperf, valkey
from benchmarks.peers.bare_socket import bare_socket
from benchmarks.peers.bare_stream import bare_stream
from benchmarks.peers.mooncake_store import Store, mooncake_store
from testbed.mooncake import BEST_SETTINGS

MIB = 1 << 20
BATCH_BYTES = 64 * MIB
SHM_BLOCK_BYTES = 2 * MIB
NETWORK_CHUNK_BYTES = 1 * MIB
ROUNDS = 31
SHARD_COUNTS = (1, 8)
COPY_SHARE = 0.6
TIMES_MOONCAKE = 5.0
TCP_TIMES_MOONCAKE = 2.0
IPERF_SHARE, IPERF_CORES = 0.7, 16
GRPC_PUT_GB_S, GRPC_GET_GB_S, BARE_SHARE = 1.0, 1.5, 0.8


def shm_rows(endpoint: str, store: Store, source: Bytes, sink: Bytes) -> list[Row]:
    """Questions 1 and 2: shm beside memcpy + xxh3, and beside Mooncake Store.

    Args:
        store: has both buffers registered.
        source, sink: uint8 [num_blocks, SHM_BLOCK_BYTES], warm.
    """
    mooncake_put, mooncake_get = store.measures(source, sink)
    measures: dict[str, Callable[[], float]] = {"mooncake put": mooncake_put, "mooncake get": mooncake_get}
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


def network_rows(endpoint: str, grpc_endpoint: str, store: Store, source: Bytes, sink: Bytes) -> list[Row]:
    """Questions 3 and 4: tcp beside one bare socket and Mooncake's TCP; grpc beside a bare gRPC stream.

    Args:
        grpc_endpoint: of a server without a data port.
        store: has both buffers registered.
        source, sink: uint8 [num_chunks, NETWORK_CHUNK_BYTES], warm.
    """
    store_put, store_get = store.measures(source, sink)
    traffics = {
        "tcp": Traffic(endpoint, "tcp", source, sink, num_shards=1),
        "grpc": Traffic(grpc_endpoint, "grpc", source, sink, num_shards=1),
        "mooncake transport, TCP": Traffic(endpoint, "mooncake", source, sink, num_shards=1),
    }
    with bare_socket(NETWORK_CHUNK_BYTES) as plain, bare_stream(NETWORK_CHUNK_BYTES) as bare:
        measures: dict[str, Callable[[], float]] = {
            "bare socket put": lambda: timed(lambda: plain.put(source)),
            "bare socket get": lambda: timed(lambda: plain.get(sink)),
            "bare gRPC stream put": lambda: timed(lambda: bare.put(len(source))),
            "bare gRPC stream get": lambda: timed(lambda: bare.get(len(source))),
            "Mooncake Store, TCP put": store_put,
            "Mooncake Store, TCP get": store_get,
        }
        for name, traffic in traffics.items():
            traffic.check()
            measures |= {f"{name} put": traffic.put, f"{name} get": traffic.get_without_lookup}
        taken = alternate(measures, ROUNDS, what="network")
    for traffic in traffics.values():
        traffic.close()

    rows = [Row(name, gb_per_s(BATCH_BYTES, each), "GB/s") for name, each in taken.items()]
    for way, bound in (("put", GRPC_PUT_GB_S), ("get", GRPC_GET_GB_S)):
        ours, through_grpc = taken[f"tcp {way}"], taken[f"grpc {way}"]
        ratio = speed_ratio(ours, taken[f"Mooncake Store, TCP {way}"])
        rows.append(at_least(f"tcp {way} / Mooncake Store, TCP", ratio, "x", TCP_TIMES_MOONCAKE))
        rows.append(Row(f"tcp {way} / bare socket", speed_ratio(ours, taken[f"bare socket {way}"]), "x"))
        rows.append(Row(f"tcp {way} / grpc", speed_ratio(ours, through_grpc), "x"))
        rate = gb_per_s(BATCH_BYTES, through_grpc)
        share = speed_ratio(through_grpc, taken[f"bare gRPC stream {way}"])
        reach = f">= {bound} GB/s, or {BARE_SHARE} of bare"
        verdicts = (met(rate, bound.__le__), met(share, BARE_SHARE.__le__))
        either = next((each for each in (True, WITHIN_NOISE) if each in verdicts), False)
        rows.append(Row(f"grpc {way} / bare", share, "x", reach, either))
    return rows


def iperf_rows(rows: list[Row], samples: list[float]) -> list[Row]:
    """How tcp compares with iperf3; a target only where there are cores for many connections.

    Args:
        samples: of iperf3, taken before and after tcp.
    """
    limit = statistics.mean(samples)
    added = [Row("iperf3, one connection", limit, "GB/s")]
    for way in ("put", "get"):
        share = next(row.figure for row in rows if row.what == f"tcp {way}") * (1 / limit)
        name = f"tcp {way} / iperf3"
        many = len(os.sched_getaffinity(0)) >= IPERF_CORES
        added.append(at_least(name, share, "x", IPERF_SHARE) if many else Row(name, share, "x"))
    return added


def main() -> None:
    """Measures and reports."""
    source, sink = pair(BATCH_BYTES)
    with (
        kvpool_server("512MiB", "--mooncake", "tcp", "--mooncake-trusted-network") as endpoint,
        mooncake_store(512 * MIB) as store,
    ):
        for buffer in (source, sink):
            store.register(buffer)
        rows = shm_rows(endpoint, store, source.reshape(-1, SHM_BLOCK_BYTES), sink.reshape(-1, SHM_BLOCK_BYTES))
        series = sweep(endpoint, store, source, sink)
        chunks = (source.reshape(-1, NETWORK_CHUNK_BYTES), sink.reshape(-1, NETWORK_CHUNK_BYTES))
        with kvpool_server("512MiB", "--data-listen", "") as grpc_endpoint:
            if without := iperf.missing():
                print(f"iperf3 is left out: {without}", flush=True)
            samples = [] if without else [iperf.iperf3_gb_s()]
            rows += network_rows(endpoint, grpc_endpoint, store, *chunks)
            if samples:
                rows += iperf_rows(rows, [*samples, iperf.iperf3_gb_s()])
    report(
        "transport",
        rows,
        series,
        rounds=ROUNDS,
        batch_bytes=BATCH_BYTES,
        shm_block_bytes=SHM_BLOCK_BYTES,
        network_chunk_bytes=NETWORK_CHUNK_BYTES,
        mooncake="segment in another process, loopback TCP, registered buffers, no checksums; "
        + ", ".join(f"{name}={value}" for name, value in BEST_SETTINGS.items()),
        valkey=valkey.missing() or f"{valkey.version()}; one client, Unix socket, nothing persisted",
        sweep_rounds=SWEEP_ROUNDS,
        bare="asyncio server and synchronous client, generic handlers, raw bytes, nothing copied or summed",
    )


if __name__ == "__main__":
    typer.run(main)
