"""What do loads and stores cost those who work in the same process, as an engine does that decodes?

A thread repeats steps: Python, and calls that give up Python's lock, in turns, as a loop that launches kernels. It runs
alone, and beside a thread that loads and one that stores: through shared memory, over TCP, and over TCP with TLS, the
bytes moved by processes of their own, as in an engine with a GPU, or by threads of this one. Bytes go through staging,
the device sums them, and its bus takes them in order; a clock stands in for the bus.

What moves bytes needs cores of its own: on few cores the steps wait for these, and not for the lock.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.harness.measuring import Row, at_most, ms, percentile, progress, report, server_process, timed
from kvpool import BlockRun, Client, ClientConfig, GroupSpec, NamespaceSpec, checksum
from kvpool.security.certificates import Authority
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool.security.tls import TlsFiles
from kvpool.transport.base import Buffers
from kvpool.transport.chunk_sums import Checksums

MIB = 1 << 20
BLOCK_BYTES = 2 * MIB
"""16 tokens of an 8B model."""
BATCH_BYTES = 32 * MIB
STORE_BLOCKS = 32
BUS_BYTES_A_S = 25e9
LAUNCHES, LAUNCH_ADDS = 1_000, 100
"""Of a step: how often it gives up the lock, and what it does in between."""
WARM_S = 3.0
"""Until the processes that move bytes have started."""
PERCENT, REACH = 99, 1.2


class Link:
    """One client that loads a prompt again and again, and stores new blocks.

    Args:
        out_of_process: whether processes of their own move its bytes.
    """

    def __init__(self, endpoint: str, transport: str, tls: TlsFiles | None, out_of_process: bool, num_blocks: int):
        self._client = Client(
            ClientConfig(endpoint, transport=transport, tls=tls, data_timeout_ms=30_000, lease_ttl_ms=60_000)
        )
        group = GroupSpec("full_attention", 16, 8, 128, 128, 1, BLOCK_BYTES)
        self._namespace = self._client.open_namespace(NamespaceSpec("benchmark-interference", (group,)))
        self._out_of_process = out_of_process
        self._prompt = [idx.to_bytes(32, "big") for idx in range(num_blocks)]
        self._names = itertools.count(num_blocks)
        self._block = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, np.uint8)
        self._sum = checksum(self._block)
        self.prompt_bytes, self.store_bytes = num_blocks * BLOCK_BYTES, STORE_BLOCKS * BLOCK_BYTES
        for first in range(0, num_blocks, STORE_BLOCKS):
            run = BlockRun(0, self._prompt[first : first + STORE_BLOCKS])
            self._client.put_blocks(self._namespace, run, [self._block] * len(run))

    def load(self) -> None:
        """As the connector: the lookup's answer says where the blocks lie."""
        run = BlockRun(0, self._prompt)
        found = self._client.lookup(self._namespace, [run], locate=True)
        self._client.get(
            self._namespace,
            found.lease_id,
            [run],
            self._bus(),
            batch_bytes=BATCH_BYTES,
            drain_sums=True,
            leased=found.leased(0, 0, len(run)),
            out_of_process=self._out_of_process,
        )
        self._client.rpc.release_quietly(found.lease_id)

    def store(self) -> None:
        """Blocks that nobody has stored."""
        run = BlockRun(0, [next(self._names).to_bytes(32, "big") for _ in range(STORE_BLOCKS)])
        bus = self._bus()
        self._client.put(
            self._namespace,
            [run],
            bus,
            batch_bytes=BATCH_BYTES,
            fill_sums=True,
            out_of_process=self._out_of_process,
        )

    def _bus(self) -> Callable[[Sequence[int], Buffers], Checksums]:
        """What copies buffers, one after the other. It copies none, so that what is stored is never loaded."""
        is_free_at = 0.0

        def copy(indices: Sequence[int], buffers: Buffers) -> Checksums:
            nonlocal is_free_at
            is_free_at = ends_at = max(is_free_at, time.monotonic()) + len(buffers) * BLOCK_BYTES / BUS_BYTES_A_S

            def wait() -> list[int]:
                time.sleep(max(0.0, ends_at - time.monotonic()))
                return [self._sum] * len(indices)

            return wait

        return copy

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


def main(
    mib: Annotated[int, typer.Option(help="MiB of a load.", min=64)] = 320,
    steps: Annotated[int, typer.Option(help="Steps that count, of each case.", min=10)] = 200,
) -> None:
    """Measures and reports."""
    num_blocks = mib * MIB // BLOCK_BYTES
    alone = [timed(step) for _ in range(steps)]
    rows = [Row(f"step alone, p{percent}", ms(alone, percent), "ms") for percent in (50, PERCENT)]
    with ExitStack() as stack:
        authority = Authority.create(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        operator = TlsFiles.in_directory(authority.issue_principal(Principal(ALL_TENANTS, Role.OPERATOR)))
        server = TlsFiles.in_directory(authority.issue_server([]))
        flags = ["--tls-cert", server.cert, "--tls-key", server.key, "--tls-client-ca", server.ca]
        memory = f"{mib + 1024}MiB"
        plain, _ = stack.enter_context(server_process(memory))
        sealed, _ = stack.enter_context(server_process(memory, *flags, tls=operator))
        cases = {
            "shared memory": (plain, "shm", None, False),
            "TCP": (plain, "tcp", None, True),
            "TCP with TLS": (sealed, "tcp", operator, True),
            "TCP, in the same process": (plain, "tcp", None, False),
            "TCP with TLS, in the same process": (sealed, "tcp", operator, False),
        }
        slowest: dict[str, float] = {}
        advance = stack.enter_context(progress("cases", len(cases)))
        for name, case in cases.items():
            link = Link(*case, num_blocks)
            with repeated(link.load) as loads, repeated(link.store) as stores:
                time.sleep(WARM_S)
                loads.clear()
                stores.clear()
                beside = [timed(step) for _ in range(steps)]
                moved = len(loads) * link.prompt_bytes / sum(loads), len(stores) * link.store_bytes / sum(stores)
            link.close()
            slowest[name] = percentile(beside, PERCENT)
            rows += [Row(f"step beside {name}, p{percent}", ms(beside, percent), "ms") for percent in (50, PERCENT)]
            rows += [Row(f"loads, {name}", moved[0] / 1e9, "GB/s"), Row(f"stores, {name}", moved[1] / 1e9, "GB/s")]
            advance()
    for name in ("TCP", "TCP with TLS"):
        share = slowest[name] / slowest["shared memory"]
        rows.append(at_most(f"step beside {name} / shared memory, p{PERCENT}", share, "x", REACH))
    report("interference", rows, load_bytes=num_blocks * BLOCK_BYTES, steps=steps, bus_gb_s=BUS_BYTES_A_S / 1e9)


if __name__ == "__main__":
    typer.run(main)
