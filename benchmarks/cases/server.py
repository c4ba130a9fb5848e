"""What does a server cost, beside its arena? CPU time while idle, a lookup, and a gigabyte put and got; and memory.

CPU time is that of all processes of the server, user and system, from /proc/PID/stat; the clients' is not in it. Each
figure is of one loop that is long enough for the kernel's ticks of 10 ms. Memory is PSS (/proc/PID/smaps_rollup)
without what is shared memory: RSS would count the arena in the server and again in each data worker and engine.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.measuring import Row, progress, report, server_process
from benchmarks.harness.traffic import Traffic, pair
from kvpool import BlockRun, Client, ClientConfig, GroupSpec, NamespaceSpec

MEMORY = "512MiB"
BLOCKS, BLOCK_BYTES = 256, 256 << 10
BATCH_BYTES = BLOCKS * BLOCK_BYTES
LOOKUP_BLOCKS = 64
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def family(pid: int) -> Iterator[int]:
    """A process, its children, theirs, and so on."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # The thread has ended.
            for child in children.read_text().split():
                yield from family(int(child))


def cpu_s(pid: int) -> float:
    """CPU seconds so far of a server, its workers among them."""
    ticks = 0
    for each in family(pid):
        with contextlib.suppress(OSError):  # The process has ended.
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks * TICK_S


def own_bytes(pid: int) -> int:
    """PSS of one process without shared memory, of which the arena is nearly all."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    fields = dict(line.split(":") for line in rollup.splitlines()[1:])
    return (int(fields["Pss"].split()[0]) - int(fields["Pss_Shmem"].split()[0])) << 10


def cpu_of(pid: int, work: Callable[[], object], times: int) -> float:
    """CPU seconds of the server for one `work`."""
    work()
    before = cpu_s(pid)
    for _ in range(times):
        work()
    return (cpu_s(pid) - before) / times


def lookups(endpoint: str) -> Callable[[], object]:
    """A lookup of blocks that are all there, with a lease, and its release."""
    client = Client(ClientConfig(endpoint))
    group = GroupSpec("full_attention", 16, 8, 128, 128, 1, 4096)
    namespace = client.open_namespace(NamespaceSpec("benchmark-lookups", (group,)))
    run = BlockRun(0, [idx.to_bytes(32, "little") for idx in range(LOOKUP_BLOCKS)])
    client.put_blocks(namespace, run, [bytes(4096)] * LOOKUP_BLOCKS)

    def look() -> None:
        found = client.lookup(namespace, [run])
        assert found.hits[0].num_leading == LOOKUP_BLOCKS
        client.release([found.lease_id])

    return look


def main(
    idle_s: Annotated[float, typer.Option(help="How long to look at an idle server.")] = 10.0,
    rounds: Annotated[int, typer.Option(help="Batches put and got; a hundred lookups for each.")] = 64,
) -> None:
    """Measures and reports."""
    rows: list[Row] = []
    source, sink = (each.reshape(BLOCKS, BLOCK_BYTES) for each in pair(BATCH_BYTES))
    with server_process(MEMORY) as (endpoint, pid), progress("server", 6) as advance:
        before = cpu_s(pid)
        time.sleep(idle_s)
        rows.append(Row("idle, share of one core", 100 * (cpu_s(pid) - before) / idle_s, "%"))
        advance()
        each_s = cpu_of(pid, lookups(endpoint), 100 * rounds)
        rows.append(Row(f"CPU, lookup of {LOOKUP_BLOCKS} blocks with a lease, and its release", each_s * 1e6, "us"))
        advance()
        for transport in ("shm", "tcp"):
            traffic = Traffic(endpoint, transport, source, sink, num_shards=1)
            traffic.check()
            for name, work in (("put", traffic.put), ("get", traffic.get)):
                each_s = cpu_of(pid, work, rounds)
                rows.append(Row(f"CPU, {name} through {transport}", each_s * 1e9 / BATCH_BYTES * 1e3, "ms/GB"))
                advance()
            traffic.close()
        server, *workers = family(pid)
        rows.append(Row("memory of the server process, PSS beside the arena", own_bytes(server) / 2**20, "MiB"))
        rows.append(Row("memory of a data worker, PSS beside the arena", own_bytes(workers[0]) / 2**20, "MiB"))
    report("server", rows, memory=MEMORY, idle_s=idle_s, rounds=rounds, block_bytes=BLOCK_BYTES, blocks_a_batch=BLOCKS)


if __name__ == "__main__":
    typer.run(main)
