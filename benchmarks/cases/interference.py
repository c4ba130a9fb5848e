"""What does a load cost those who work in the same process, as an engine does that decodes?

A thread repeats steps: Python, and calls that give up Python's lock, in turns, as a loop that launches kernels. It runs
alone, beside loads through shared memory, and beside loads over TCP, by connections. The loads are an engine's with a
GPU: bytes go into staging, the device sums them, and its bus takes them in order. A clock stands in for the bus.

Threads that move bytes need cores of their own: on few cores the steps wait for these, and not for the lock. Then the
user CPU time of the loads, without steps beside them, says more: Python's lock is held for most of it.
"""

from __future__ import annotations

import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import numpy as np
import typer

from benchmarks.harness.measuring import Row, at_most, kvpool_server, ms, percentile, progress, report, timed
from kvpool import BlockRun, Client, ClientConfig, GroupSpec, NamespaceSpec, checksum
from kvpool.client.sums import Checksums
from kvpool.transport.base import Buffers

MIB = 1 << 20
BLOCK_BYTES = 2 * MIB
"""16 tokens of an 8B model."""
BATCH_BYTES = 32 * MIB
PUT_BLOCKS = 32
BUS_BYTES_A_S = 25e9
LAUNCHES, LAUNCH_ADDS = 200, 200
"""Of a step: how often it gives up the lock, and what it does in between."""
PERCENT, REACH = 99, 1.2


class Loads:
    """One client's loads of one prompt.

    Args:
        connections: `stream_connections`; 0: as many as the client takes.
    """

    def __init__(self, endpoint: str, transport: str, connections: int, num_blocks: int):
        config = ClientConfig(
            endpoint, transport=transport, stream_connections=connections, data_timeout_ms=30_000, lease_ttl_ms=60_000
        )
        self._client = Client(config)
        group = GroupSpec("full_attention", 16, 8, 128, 128, 1, BLOCK_BYTES)
        self._namespace = self._client.open_namespace(NamespaceSpec("benchmark-interference", (group,)))
        self._hashes = [idx.to_bytes(32, "big") for idx in range(num_blocks)]
        block = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, np.uint8)
        self._sum = checksum(block)
        self._bus_is_free_at = 0.0
        for first in range(0, num_blocks, PUT_BLOCKS):
            run = BlockRun(0, self._hashes[first : first + PUT_BLOCKS])
            self._client.put_blocks(self._namespace, run, [block] * len(run))

    def load(self) -> None:
        """As the connector: the lookup's answer says where the blocks lie."""
        run = BlockRun(0, self._hashes)
        found = self._client.lookup(self._namespace, [run], locate=True)
        self._client.get(
            self._namespace,
            found.lease_id,
            [run],
            self._drain,
            batch_bytes=BATCH_BYTES,
            drain_sums=True,
            leased=found.leased(0, 0, len(run)),
            out_of_process=True,
        )
        self._client.rpc.release_quietly(found.lease_id)

    def _drain(self, indices: Sequence[int], buffers: Buffers) -> Checksums:
        ends_at = max(self._bus_is_free_at, time.monotonic()) + len(buffers) * BLOCK_BYTES / BUS_BYTES_A_S
        self._bus_is_free_at = ends_at

        def wait() -> list[int]:
            time.sleep(max(0.0, ends_at - time.monotonic()))
            return [self._sum] * len(indices)

        return wait

    def close(self) -> None:
        self._client.close()


def step() -> None:
    """Python, and calls that give up the lock, in turns."""
    for _ in range(LAUNCHES):
        total = 0
        for each in range(LAUNCH_ADDS):
            total += each
        time.sleep(0)


@contextmanager
def repeated(act: Callable[[], object]) -> Iterator[list[float]]:
    """Repeats an act on a thread of its own until the end of the block; yields the seconds that each has taken."""
    taken: list[float] = []
    ending = threading.Event()

    def work() -> None:
        while not ending.is_set():
            taken.append(timed(act))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield taken
    finally:
        ending.set()
        thread.join()


def user_s_a_gb(load: Callable[[], None], nbytes: int, repeats: int) -> float:
    """User CPU seconds of this process for each GB that is loaded."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    for _ in range(repeats):
        load()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_utime - before) / (repeats * nbytes / 1e9)


def main(
    mib: Annotated[int, typer.Option(help="MiB of a load.", min=64)] = 2560,
    steps: Annotated[int, typer.Option(help="Steps that count, of each case.", min=10)] = 500,
    connections: Annotated[str, typer.Option(help="Also over so many connections.")] = "8,4,2",
) -> None:
    """Measures and reports."""
    num_blocks = mib * MIB // BLOCK_BYTES
    cases = {"shared memory": ("shm", 0), "TCP": ("tcp", 0)}
    cases |= {f"TCP, {count} connections": ("tcp", int(count)) for count in connections.split(",") if count}
    alone = [timed(step) for _ in range(steps)]
    rows = [Row(f"step alone, p{percent}", ms(alone, percent), "ms") for percent in (50, PERCENT)]
    slowest: dict[str, float] = {}
    with kvpool_server(f"{mib + 512}MiB") as endpoint, progress("cases", len(cases)) as advance:
        for name, (transport, count) in cases.items():
            loads = Loads(endpoint, transport, count, num_blocks)
            loads.load()
            user_s = user_s_a_gb(loads.load, num_blocks * BLOCK_BYTES, repeats=5)
            with repeated(loads.load) as taken:
                beside = [timed(step) for _ in range(steps)]
            loads.close()
            slowest[name] = percentile(beside, PERCENT)
            rate = num_blocks * BLOCK_BYTES / 1e9 / statistics.median(taken)
            rows += [
                Row(f"step beside loads, {name}, p{percent}", ms(beside, percent), "ms") for percent in (50, PERCENT)
            ]
            rows += [Row(f"loads, {name}", rate, "GB/s"), Row(f"loads, {name}: user CPU", user_s * 1e3, "ms/GB")]
            advance()
    share = slowest["TCP"] / slowest["shared memory"]
    rows.append(at_most(f"step beside loads, p{PERCENT}: TCP / shared memory", share, "x", REACH))
    report("interference", rows, load_bytes=num_blocks * BLOCK_BYTES, steps=steps, bus_gb_s=BUS_BYTES_A_S / 1e9)


if __name__ == "__main__":
    typer.run(main)
