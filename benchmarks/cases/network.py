"""How much of what its wires can carry does kvpool's data port move? Beside bare sockets, in one run.

First one client: 1 to 8 connections of one process, beside as many bare connections whose threads do nothing else; with
checksums on the CPU, and without them, as where a GPU computes them. Then four clients at once, each a process, beside
four bare ones; and two that share the cores, as the ranks of one engine do, beside one alone. Then shared memory beside
threads that copy and sum. CPU seconds a GB are those of the client's process and of the server with its data workers.

A bare server keeps one message, which stays in its cache. "From memory": it keeps the whole batch, as a pool does.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.synchronize import Barrier
from typing import Annotated

import typer
import xxhash

from benchmarks.cases.server import cpu_s
from benchmarks.harness.measuring import (
    Row,
    Series,
    alternate,
    at_least,
    gb_per_s,
    ms,
    report,
    server_process,
    speed_ratio,
    timed,
)
from benchmarks.harness.traffic import Bytes, Traffic, pair
from benchmarks.peers.bare_threads import bare_threads
from kvpool import checksum
from kvpool.transport.base import Buffers
from kvpool.transport.chunk_sums import Checksums
from kvpool.transport.helpers import Helpers, movers_of
from kvpool.transport.shm import ShmTransport
from kvpool_server.data_plane.workers import default_count

MIB = 1 << 20
BLOCK_BYTES = 2 * MIB
BATCH_BYTES = 256 * MIB
DEVICE_BATCH_BYTES = 32 << 20
"""As where a GPU copies and sums."""
CONNECTIONS = (1, 2, 4, 8)
NUM_CLIENTS, CLIENT_CONNECTIONS = 4, 4
NUM_RANKS = 2
COLD_BATCHES = 4
"""Destinations of plain copies, in turns: more than what caches hold."""

TINY_BYTES = 64
WAIT_S = 120.0
BARE_SHARE, SUMMED_SHARE, TOGETHER_SHARE, SHM_SHARE = 0.7, 0.6, 0.6, 0.8


class Blocks(Traffic):
    """One client's blocks, of one shard each.

    Args:
        source, sink: uint8 [num_blocks, BLOCK_BYTES], warm.
        number: keeps the blocks of several clients apart.

    Attributes:
        transport: that the client got.
    """

    def __init__(self, endpoint: str, transport: str, connections: int, source: Bytes, sink: Bytes, number: int = 0):
        settings = {"stream_connections": connections, "data_timeout_ms": 30_000}
        super().__init__(endpoint, transport, source, sink, 1, number, **settings)
        self.transport = self._namespace.transport
        self._sums = [checksum(block) for block in source]

    def put_unsummed(self) -> float:
        """As `put`, where something else has computed the checksums."""
        self._client.admin.remove(self._namespace, [self._run])
        return timed(
            lambda: self._client.put(
                self._namespace, [self._run], self._known, batch_bytes=DEVICE_BATCH_BYTES, fill_sums=True
            )
        )

    def get_unsummed(self) -> float:
        """As `get_without_lookup`, where something else computes the checksums."""
        self._get(self._known, drain_sums=True, batch_bytes=DEVICE_BATCH_BYTES)
        return self.last_get_s

    def _known(self, indices: Sequence[int], buffers: Buffers) -> Checksums:
        return lambda: [self._sums[idx] for idx in indices]


def one_client(endpoint: str, server_pid: int, rounds: int) -> tuple[list[Row], list[Series]]:
    """One client, by connections."""
    rows: list[Row] = []
    source, sink = (each.reshape(-1, BLOCK_BYTES) for each in pair(BATCH_BYTES))
    rates: dict[str, list[float]] = {}
    for count in CONNECTIONS:
        with ExitStack() as stack:
            bare = stack.enter_context(bare_threads(count, BLOCK_BYTES))
            kept = stack.enter_context(bare_threads(count, BLOCK_BYTES, BATCH_BYTES))
            summed, kept_summed = bare.with_sums(), kept.with_sums()
            blocks = Blocks(endpoint, "tcp", count, source, sink)
            stack.callback(blocks.close)
            blocks.check()
            measures: dict[str, Callable[[], float]] = {
                "bare put": lambda bare=bare: timed(lambda: bare.put(source)),  # type: ignore[misc]
                "bare put to memory": lambda bare=kept: timed(lambda: bare.put(source)),  # type: ignore[misc]
                "bare put to memory with sums": lambda bare=kept_summed: timed(lambda: bare.put(source)),  # type: ignore[misc]
                "kvpool put without sums": blocks.put_unsummed,
                "kvpool put": blocks.put,  # Behind the other: a get needs its bytes.
                "bare get": lambda bare=bare: timed(lambda: bare.get(sink)),  # type: ignore[misc]
                "bare get from memory": lambda bare=kept: timed(lambda: bare.get(sink)),  # type: ignore[misc]
                "bare get with sums": lambda bare=summed: timed(lambda: bare.get(sink)),  # type: ignore[misc]
                "kvpool get": blocks.get_without_lookup,
                "kvpool get without sums": blocks.get_unsummed,
            }
            taken = alternate(measures, rounds, what=f"{count} connections")
            for name, seconds in taken.items():
                rate = gb_per_s(BATCH_BYTES, seconds)
                rows.append(Row(f"{count} connections, {name}", rate, "GB/s"))
                rates.setdefault(name, []).append(rate.figure)
            for way in ("put", "get"):
                what = f"{count} connections, {way}: kvpool / bare"
                share = speed_ratio(taken[f"kvpool {way}"], taken[f"bare {way}"])
                without = speed_ratio(taken[f"kvpool {way} without sums"], taken[f"bare {way}"])
                if count == max(CONNECTIONS):
                    rows.append(at_least(what, share, "x", SUMMED_SHARE))
                    rows.append(at_least(f"{what}, without sums", without, "x", BARE_SHARE))
                    memory = f"bare {way} {'to' if way == 'put' else 'from'} memory"
                    fair = speed_ratio(taken[f"kvpool {way} without sums"], taken[memory])
                    rows.append(Row(f"{count} connections, kvpool {way} without sums / {memory}", fair, "x"))
                    rows += cpu_rows(blocks, way, server_pid)
                else:
                    rows += [Row(what, share, "x"), Row(f"{what}, without sums", without, "x")]
    series = [
        Series(name.split()[1], name, "connections", CONNECTIONS, "GB/s", each, limit=name.startswith("bare"))
        for name, each in rates.items()
    ]
    return rows, series


def cpu_rows(blocks: Blocks, way: str, server_pid: int, repeats: int = 5) -> list[Row]:
    """CPU seconds that a GB costs."""
    client_s, server_s = time.process_time(), cpu_s(server_pid)
    for _ in range(repeats):
        blocks.put() if way == "put" else blocks.get_without_lookup()
    gigabytes = repeats * BATCH_BYTES / 1e9
    return [
        Row(f"{way}: CPU of the client", (time.process_time() - client_s) / gigabytes, "s/GB"),
        Row(f"{way}: CPU of the server", (cpu_s(server_pid) - server_s) / gigabytes, "s/GB"),
    ]


def together(endpoint: str, rounds: int) -> list[Row]:
    """Several clients at once, beside as many bare ones."""
    rows: list[Row] = []
    kinds = ("bare", "bare, memory", "kvpool")
    taken = {kind: _together(kind, endpoint, rounds, NUM_CLIENTS, CLIENT_CONNECTIONS) for kind in kinds}
    for nth, way in enumerate(("put", "get")):
        seconds = {kind: [each[nth] for each in pairs] for kind, pairs in taken.items()}
        for kind, each in seconds.items():
            rows.append(Row(f"{NUM_CLIENTS} clients, {kind} {way}", gb_per_s(NUM_CLIENTS * BATCH_BYTES, each), "GB/s"))
        share = speed_ratio(seconds["kvpool"], seconds["bare"])
        rows.append(at_least(f"{NUM_CLIENTS} clients, {way}: kvpool / bare", share, "x", TOGETHER_SHARE))
        fair = speed_ratio(seconds["kvpool"], seconds["bare, memory"])
        rows.append(Row(f"{NUM_CLIENTS} clients, {way}: kvpool / bare, memory", fair, "x"))
    return rows


def ranks(endpoint: str, rounds: int) -> list[Row]:
    """Gets of two clients that share the cores, as the ranks of one engine on a GPU do, over one client's."""
    rows: list[Row] = []
    for kind in ("bare, memory", "kvpool without sums"):
        seconds = {}
        for clients in (1, NUM_RANKS):
            connections = movers_of(len(os.sched_getaffinity(0)), clients)
            seconds[clients] = [got for _, got in _together(kind, endpoint, rounds, clients, connections)]
            what = f"{clients} rank{'s' * (clients > 1)} with {connections} connections each, {kind}, get"
            rows.append(Row(what, gb_per_s(clients * BATCH_BYTES, seconds[clients]), "GB/s"))
        share = speed_ratio(seconds[NUM_RANKS], seconds[1])
        rows.append(Row(f"{NUM_RANKS} ranks, {kind}: a rank's rate over one's alone", share, "x"))
    return rows


def _together(kind: str, endpoint: str, rounds: int, clients: int, connections: int) -> list[tuple[float, float]]:
    """Seconds of each round until the last client has put, and until the last has got."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(clients + 1)
    processes = [
        context.Process(target=_client, args=(kind, endpoint, number, rounds, connections, barrier), daemon=True)
        for number in range(clients)
    ]
    for process in processes:
        process.start()
    seconds = []
    for _ in range(rounds + 1):
        each = []
        for _ in range(2):
            barrier.wait(WAIT_S)
            each.append(timed(lambda: barrier.wait(WAIT_S)))
        seconds.append((each[0], each[1]))
    for process in processes:
        process.join(WAIT_S)
    return seconds[1:]


def _client(kind: str, endpoint: str, number: int, rounds: int, connections: int, barrier: Barrier) -> None:
    """A process of one client."""
    source, sink = (each.reshape(-1, BLOCK_BYTES) for each in pair(BATCH_BYTES))
    with ExitStack() as stack:
        if kind.startswith("bare"):
            memory_bytes = BATCH_BYTES if "memory" in kind else 0
            bare = stack.enter_context(bare_threads(connections, BLOCK_BYTES, memory_bytes))
            acts: list[Callable[[], object]] = [lambda: bare.put(source), lambda: bare.get(sink)]
        else:
            blocks = Blocks(endpoint, "tcp", connections, source, sink, number)
            stack.callback(blocks.close)
            acts = [blocks.put, blocks.get_without_lookup]
            if "without sums" in kind:
                acts = [blocks.put_unsummed, blocks.get_unsummed]
        for _ in range(rounds + 1):
            for act in acts:
                barrier.wait(WAIT_S)
                act()
                barrier.wait(WAIT_S)


def shared_memory(endpoint: str, rounds: int) -> list[Row]:
    """One client through shared memory, beside as many threads that copy and sum."""
    source, sink = (each.reshape(-1, BLOCK_BYTES) for each in pair(BATCH_BYTES))
    blocks = Blocks(endpoint, "shm", 0, source, sink)
    blocks.check()
    assert isinstance(blocks.transport, ShmTransport)
    movers = blocks.transport.num_movers
    team = Helpers(movers - 1)
    cold = pair(COLD_BATCHES * BATCH_BYTES)[1].reshape(COLD_BATCHES, *source.shape)
    turns = itertools.cycle(cold)

    def copy(target: Bytes) -> float:
        def one(idx: int) -> None:
            target[idx] = source[idx]
            xxhash.xxh3_64(target[idx].data).intdigest()

        return timed(lambda: team.share(range(len(source)), one))

    tiny = [each.reshape(-1, TINY_BYTES) for each in pair(TINY_BYTES * len(source))]
    calls = Blocks(endpoint, "shm", 0, tiny[0], tiny[1])
    measures: dict[str, Callable[[], float]] = {
        "copy": lambda: copy(sink),
        "copy to memory": lambda: copy(next(turns)),
        "put": blocks.put,
        "get": blocks.get_without_lookup,
        "put of nothing": calls.put,
        "get of nothing": calls.get_without_lookup,
    }
    taken = alternate(measures, rounds, what="shared memory")
    blocks.close()
    calls.close()
    team.close()
    rows = [
        Row(f"memcpy + xxh3, {movers} threads", gb_per_s(BATCH_BYTES, taken["copy"]), "GB/s"),
        Row(f"memcpy + xxh3, {movers} threads, to memory", gb_per_s(BATCH_BYTES, taken["copy to memory"]), "GB/s"),
    ]
    for way in ("put", "get"):
        rows.append(Row(f"shared memory, {way}", gb_per_s(BATCH_BYTES, taken[way]), "GB/s"))
        share = speed_ratio(taken[way], taken["copy"])
        rows.append(at_least(f"shared memory, {way} / memcpy + xxh3", share, "x", SHM_SHARE))
        nothing = f"shared memory, {way} of as many blocks of {TINY_BYTES} bytes"
        rows.append(Row(nothing, ms(taken[f"{way} of nothing"]), "ms"))
    return rows


def main(
    rounds: Annotated[int, typer.Option(help="Rounds of each measure.")] = 11,
    data_workers: Annotated[int, typer.Option(help="The server's data workers; 0: as many as it takes.")] = 0,
) -> None:
    """Measures and reports."""
    flags = ["--data-workers", str(data_workers)] if data_workers else []
    with server_process("2560MiB", *flags) as (endpoint, pid):
        rows, series = one_client(endpoint, pid, rounds)
        rows += together(endpoint, rounds)
        rows += ranks(endpoint, rounds)
        rows += shared_memory(endpoint, rounds)
    report(
        "network",
        rows,
        series,
        rounds=rounds,
        data_workers=data_workers or default_count(),
        block_bytes=BLOCK_BYTES,
        batch_bytes=BATCH_BYTES,
        bare="loopback; one server process a connection, threads of one client process, nothing but bytes",
    )


if __name__ == "__main__":
    typer.run(main)
