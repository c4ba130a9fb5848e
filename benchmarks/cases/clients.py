"""What do 1 to 256 clients at once get from one server? First lookups, then whole loads, then small puts and gets.

Each client is a process of its own, as an engine is: threads of one interpreter would wait for its lock, and not for
the server. All begin together, once each has stored what it looks up and has mapped the arena; each does the next call
when the last is answered. A lookup asks for 64 blocks, all hits, with a lease. A load is a lookup of 4 blocks, whose
answer says where they lie, their bytes, and the release. Leases are released as engines do it, without waiting for an
answer. A put and get is the whole life of four new blocks: put, lookup, get, release, remove. Deadlines are a client's
defaults (a second a call), and a call that runs into one is counted.

The server's CPU says what bounds it: its event loop is one thread, which is full at 100 %. Where clients and server
share few cores, calls a second say little of the server, and its CPU a call is the figure to compare.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from queue import Empty
from threading import BrokenBarrierError
from typing import Annotated

import numpy as np
import typer

from benchmarks.harness.measuring import (
    Row,
    at_least,
    at_most,
    percentile,
    progress,
    report,
    server_process,
    until_true,
)
from kvpool import BlockRun, Client, ClientConfig, GroupSpec, NamespaceSpec
from kvpool.protocol.errors import KVPoolError
from kvpool.transport.base import Buffers
from kvpool.transport.segment import MAP_AHEAD

COUNTS = (1, 4, 16, 64, 256)
LOOKUP_BLOCKS, LOAD_BLOCKS = 64, 4
CHUNK_BYTES = 4 << 10
START_S = 120.0
FAIRNESS = 0.5


@dataclass(slots=True)
class Tally:
    """What one client did."""

    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ServerCpu:
    """CPU seconds of a server, of all its threads and of its event loop's thread alone."""

    process: float
    event_loop: float

    @classmethod
    def of(cls, pid: int) -> ServerCpu:
        """What process `pid` has used so far. The event loop runs on the main thread."""
        return cls(_cpu_s(Path(f"/proc/{pid}/stat")), _cpu_s(Path(f"/proc/{pid}/task/{pid}/stat")))

    def __sub__(self, earlier: ServerCpu) -> ServerCpu:
        return ServerCpu(self.process - earlier.process, self.event_loop - earlier.event_loop)


class Caller:
    """One client; blocks are named after it, so that no two clients share any.

    Args:
        number: unique among all clients.
    """

    def __init__(self, endpoint: str, number: int):
        self._client = Client(ClientConfig(endpoint))
        self._number = number
        self._count = LOOKUP_BLOCKS
        self._held = self._run(range(LOOKUP_BLOCKS))
        self._loaded = self._run(range(LOAD_BLOCKS))

    def ready(self) -> bool:
        """Stores what it will look up; False if the server was too busy to answer in time."""
        group = GroupSpec("full_attention", 16, 8, 128, 128, 1, CHUNK_BYTES)
        try:
            self._namespace = self._client.open_namespace(NamespaceSpec("benchmark-clients", (group,)))
            self._client.put(self._namespace, [self._held], _fill)
            found = self._client.lookup(self._namespace, [self._held], lease=False)
        except KVPoolError:
            return False
        return found.hits[0].num_leading == LOOKUP_BLOCKS

    def lookup(self) -> None:
        """Looks up what it holds, and releases it."""
        found = self._client.lookup(self._namespace, [self._held])
        assert found.hits[0].num_leading == LOOKUP_BLOCKS, "not every block was a hit"
        self._client.rpc.release_quietly(found.lease_id)

    def load(self) -> None:
        """Loads the first blocks of what it holds."""
        found = self._client.lookup(self._namespace, [self._loaded], locate=True)
        leased = found.leased(0, 0, LOAD_BLOCKS)
        self._client.get(self._namespace, found.lease_id, [self._loaded], _drain, leased=leased)
        self._client.rpc.release_quietly(found.lease_id)

    def put_and_get(self) -> None:
        """Takes new blocks through their whole life."""
        run = self._run(range(self._count, self._count + LOAD_BLOCKS))
        self._count += LOAD_BLOCKS
        self._client.put(self._namespace, [run], _fill)
        found = self._client.lookup(self._namespace, [run])
        self._client.get(self._namespace, found.lease_id, [run], _drain)
        self._client.release([found.lease_id])
        self._client.admin.remove(self._namespace, [run])

    def close(self) -> None:
        self._client.close()

    def _run(self, indices: Sequence[int]) -> BlockRun:
        return BlockRun(0, [self._number.to_bytes(16, "big") + idx.to_bytes(16, "big") for idx in indices])


WORKS: dict[str, Callable[[Caller], None]] = {
    f"lookups of {LOOKUP_BLOCKS} blocks": Caller.lookup,
    f"loads of {LOAD_BLOCKS} blocks": Caller.load,
    f"puts and gets of {LOAD_BLOCKS} blocks": Caller.put_and_get,
}


def measure(server: tuple[str, int], work: str, num_clients: int, seconds: float) -> tuple[list[Tally], ServerCpu]:
    """Lets clients do one work at once, for as long; a tally each, and what the server's process used meanwhile.

    Args:
        server: endpoint and process.
    """
    endpoint, pid = server
    # A process that has used gRPC cannot be forked; the fork server has imported it, and used nothing.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.harness.measuring", "kvpool"])
    together = context.Barrier(num_clients + 1)
    tallies: Queue[Tally] = context.Queue()
    processes = [
        context.Process(target=_client, args=(endpoint, work, number, seconds, together, tallies), daemon=True)
        for number in range(num_clients)
    ]
    for process in processes:
        process.start()
    try:
        together.wait(2 * START_S)
        before = ServerCpu.of(pid)
        together.wait(START_S + seconds)
        used = ServerCpu.of(pid) - before
        return [tallies.get(timeout=START_S) for _ in processes], used
    except (Empty, BrokenBarrierError):
        raise RuntimeError(f"not all of {num_clients} clients were ready within {START_S:.0f} s, or one died") from None
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _client(endpoint: str, work: str, number: int, seconds: float, together: Barrier, tallies: Queue[Tally]) -> None:
    """A process of one client."""
    tally = Tally()
    caller = Caller(endpoint, number)
    act = WORKS[work]
    until_true(caller.ready, "the server is too busy to begin", START_S)
    until_true(lambda: not _maps_ahead(), "the arena is still being mapped", START_S)
    together.wait(2 * START_S)
    ends_at = time.perf_counter() + seconds
    while (began_at := time.perf_counter()) < ends_at:
        try:
            act(caller)
        except KVPoolError as error:
            tally.errors.append(f"{type(error).__name__}: {error}")
        else:
            tally.seconds.append(time.perf_counter() - began_at)
    together.wait(START_S + seconds)  # Who has ended takes time from those who have not: an arena is unmapped.
    tallies.put(tally)
    caller.close()


def _maps_ahead() -> bool:
    return any(thread.name == MAP_AHEAD for thread in threading.enumerate())


def _cpu_s(stat: Path) -> float:
    user, system = stat.read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def rows_of(work: str, tallies: Sequence[Tally], seconds: float, cpu: ServerCpu) -> list[Row]:
    """What the clients got together, the one that got least, and what the server used for it."""
    what = f"{len(tallies)} client{'s' * (len(tallies) > 1)}, {work}"
    taken = [each for tally in tallies for each in tally.seconds]
    counts = [len(tally.seconds) for tally in tallies]
    rows = [
        Row(f"{what}: per second", len(taken) / seconds, "1/s"),
        Row(f"{what}: p50", statistics.median(taken) * 1e3, "ms"),
        Row(f"{what}: p99", percentile(taken, 99) * 1e3, "ms"),
        at_most(f"{what}: errors, timeouts among them", sum(len(tally.errors) for tally in tallies), "calls", 0),
        Row(f"{what}: server's cores in use", cpu.process / seconds, "cores"),
        Row(f"{what}: of them the event loop", cpu.event_loop / seconds, "cores"),
        Row(f"{what}: server's CPU a call", cpu.process / max(1, len(taken)) * 1e6, "us"),
        Row(f"{what}: event loop's CPU a call", cpu.event_loop / max(1, len(taken)) * 1e6, "us"),
    ]
    if len(tallies) > 1:
        rows.append(at_least(f"{what}: slowest client over mean", min(counts) / statistics.mean(counts), "x", FAIRNESS))
        rows.append(Row(f"{what}: slowest client over fastest", min(counts) / max(counts), "x"))
    return rows


def _fill(indices: Sequence[int], buffers: Buffers) -> None:
    for buffer in buffers:
        buffer[:] = 1


def _drain(indices: Sequence[int], buffers: Buffers) -> None:
    sink = np.empty(CHUNK_BYTES, np.uint8)
    for buffer in buffers:
        sink[:] = buffer


def main(
    clients: Annotated[list[int], typer.Option(help="How many clients at once; repeat for several.")] = list(COUNTS),  # noqa: B006
    seconds: Annotated[float, typer.Option(help="How long each number of clients works.")] = 5.0,
) -> None:
    """Measures and reports."""
    rows: list[Row] = []
    errors: set[str] = set()
    with server_process("256MiB") as server, progress("clients", len(WORKS) * len(clients)) as advance:
        for work in WORKS:
            for num_clients in clients:
                tallies, cpu = measure(server, work, num_clients, seconds)
                rows += rows_of(work, tallies, seconds, cpu)
                errors.update(error for tally in tallies for error in tally.errors)
                advance()
    report(
        "clients",
        rows,
        seconds=seconds,
        chunk_bytes=CHUNK_BYTES,
        errors=sorted(errors)[:10],
        clients="one a process, each with a connection and a stream of lookups of its own",
    )


if __name__ == "__main__":
    typer.run(main)
