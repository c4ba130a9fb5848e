"""What lies under the arena: how fast is the file tier beside its disk, how long is a restart, does a tier slow puts?

The tier's disk is that of `--directory`. Rates of the disk alone are those of as many threads that read and write files
of the same size in requests of 1 MiB, past the page cache; buffered writes are timed with the flush that they put off,
and buffered reads with an empty page cache. The tier that stands still is Mooncake's, with a stopped master.

`--restore ENTRIES` is the process that restores a journal of so many blocks.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.harness.measuring import (
    Row,
    alternate,
    at_most,
    estimate,
    gb_per_s,
    kvpool_server,
    ms,
    process,
    progress,
    report,
    speed_ratio,
    time_ratio,
    timed,
    until_true,
    wait_until,
)
from kvpool import BlockRun, GroupSpec, NamespaceSpec
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.rpc import Namespace
from kvpool.protocol.hashing import checksum
from kvpool_server.cache.entry import Record
from kvpool_server.cache.eviction import DEFAULT_POLICY, POLICIES
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.tiers.file import journal
from kvpool_server.tiers.file.directory import Directory
from kvpool_server.tiers.file.extents import Disk
from kvpool_server.tiers.file.own_blocks import Journal
from kvpool_server.tiers.file.tier import FileOptions, FileTier
from kvpool_server.tiers.tier import Block, TierContext
from testbed.mooncake import master_command
from testbed.ports import free_port, is_listening

KIB, MIB = 1 << 10, 1 << 20
BLOCK_BYTES = (64 * KIB, MIB)
TOTAL_BYTES = 256 * MIB
BATCH_BYTES = 16 * MIB
REQUEST_BYTES = MIB
THREADS = 4
RESTORED_ENTRIES = 1_000_000
RESTORE_REACH_S = 10.0
PUT_BLOCKS, PUT_BLOCK_BYTES = 64, 256 * KIB
PUTS_IN_ARENA = 8
PROMPT_BLOCKS, PROMPT_BLOCK_BYTES = 256, 256 * KIB
DEADLINE_S = 600.0


def name_of(*what: object) -> bytes:
    """A block hash."""
    return hashlib.sha256(repr(what).encode()).digest()


def spec(block_bytes: int) -> NamespaceSpec:
    """Of blocks of one shard."""
    return NamespaceSpec("benchmark", (GroupSpec("full_attention", 16, 8, 128, 128, 1, block_bytes),))


class Pages:
    """Memory as the arena's: page-aligned, random bytes."""

    def __init__(self, nbytes: int):
        self.memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self.memory[:] = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)

    def views(self, size: int) -> list[memoryview]:
        return [self.memory[start : start + size].data for start in range(0, len(self.memory), size)]


# The disk, and the tier on it


def disk_alone(directory: Path, pages: Pages) -> tuple[Callable[[], float], Callable[[], float]]:
    """Writes and reads `TOTAL_BYTES` with some threads; seconds."""
    path = directory / "alone"
    views = pages.views(REQUEST_BYTES)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)

    def each(move: Callable[[int, list[memoryview], int], int]) -> float:
        def part(nth: int) -> None:
            for at in range(nth * REQUEST_BYTES, TOTAL_BYTES, THREADS * REQUEST_BYTES):
                assert move(fd, [views[at // REQUEST_BYTES % len(views)]], at) == REQUEST_BYTES

        with ThreadPoolExecutor(THREADS) as threads:
            return timed(lambda: list(threads.map(part, range(THREADS))))

    return lambda: each(os.pwritev), lambda: each(os.preadv)


def make_tier(path: Path, size: int, **options: Any) -> FileTier:
    """A file tier in the directory `one`."""
    context = TierContext(("127.0.0.1", 0), POLICIES[DEFAULT_POLICY])
    return FileOptions(path=path, size=size, name="one", create=True, **options).make(context)


class TierRun:
    """A file tier, and blocks that go down and up."""

    def __init__(self, directory: Path, pages: Pages, block_bytes: int, *, direct: bool):
        self._root = directory / f"tier-{block_bytes}-{direct}"
        self._direct = direct
        self._blocks = block_bytes
        self._views = pages.views(block_bytes)
        self._sums = [[checksum(view)] for view in self._views]
        self._namespace = PoolNamespace(spec(block_bytes), spec(block_bytes).fingerprint())
        self._loop = asyncio.new_event_loop()
        self._tier = make_tier(self._root, 2 * TOTAL_BYTES, threads=THREADS, io="direct" if direct else "buffered")
        self._loop.run_until_complete(self._tier.open())
        self._round = 0

    def write(self) -> float:
        """Seconds; what was there before goes."""
        self._loop.run_until_complete(self._tier.clear())
        self._round += 1
        seconds = timed(lambda: self._loop.run_until_complete(self._write()))
        if not self._direct:
            seconds += timed(self._flush)
        return seconds

    def read(self) -> float:
        """Seconds, of what was last written."""
        if not self._direct:
            self._forget_pages()
        return timed(lambda: self._loop.run_until_complete(self._read()))

    def close(self) -> None:
        self._loop.run_until_complete(self._tier.close())
        self._loop.close()
        shutil.rmtree(self._root)

    def _batches(self) -> Iterator[list[bytes]]:
        per = BATCH_BYTES // self._blocks
        for start in range(0, TOTAL_BYTES // self._blocks, per):
            yield [name_of(self._round, start + nth) for nth in range(per)]

    async def _write(self) -> None:
        for names in self._batches():
            parents = [b"", *names]
            blocks = list(map(Block, names, parents, self._sums, self._views))
            assert await self._tier.write(self._namespace.groups[0], blocks) == len(names)

    async def _read(self) -> None:
        for names in self._batches():
            found = await self._tier.read(self._namespace.groups[0], names, self._views[: len(names)])
            assert all(found), "a block was lost"

    def _flush(self) -> None:
        for path in self._root.rglob("extent-*"):
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def _forget_pages(self) -> None:
        for path in self._root.rglob("extent-*"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_disk(directory: Path, rounds: int) -> list[Row]:
    """Rates of the tier, for each size of block and kind of I/O, beside the disk's."""
    pages = Pages(BATCH_BYTES)
    alone_write, alone_read = disk_alone(directory, pages)
    measures: dict[tuple[str, int, bool] | str, Callable[[], float]] = {"write": alone_write, "read": alone_read}
    with ExitStack() as stack:
        for block_bytes in BLOCK_BYTES:
            for direct in (True, False):
                tier = TierRun(directory, pages, block_bytes, direct=direct)
                stack.callback(tier.close)
                measures["write", block_bytes, direct] = tier.write
                measures["read", block_bytes, direct] = tier.read
        taken = alternate(measures, rounds, what="disk", warmups=1)
    rows = [Row(f"disk alone, {kind}", gb_per_s(TOTAL_BYTES, taken[kind]), "GB/s") for kind in ("write", "read")]
    for kind in ("write", "read"):
        for block_bytes in BLOCK_BYTES:
            for direct in (True, False):
                seconds = taken[kind, block_bytes, direct]
                what = f"file tier, {kind}, blocks of {block_bytes // KIB} KiB, {'direct' if direct else 'buffered'}"
                rows.append(Row(what, gb_per_s(TOTAL_BYTES, seconds), "GB/s"))
                rows.append(Row(f"{what}, over the disk", speed_ratio(seconds, taken[kind]), "x"))
    return rows


# A restart


def write_journal(directory: Path, entries: int) -> int:
    """A journal of so many blocks, in prefixes of 256; the size of a tier that holds them."""
    block_bytes = 2 * MIB
    size = entries * block_bytes * 2
    tier = make_tier(directory, size)
    asyncio.run(_open_and_close(tier))
    inventory = Journal(Directory.open_root(directory / "one", None), Disk()).load()
    fingerprint, per_extent = spec(block_bytes).fingerprint(), inventory.extent_bytes // block_bytes
    inventory.specs[fingerprint] = spec(block_bytes)
    records = inventory.groups.setdefault((fingerprint, 0), {})
    parent = b""
    for nth in range(entries):
        block_hash = name_of(nth)
        extent, slot = divmod(nth, per_extent)
        offset = extent * inventory.extent_bytes + slot * block_bytes
        records[block_hash] = Record(block_hash, parent if nth % 256 else b"", offset, array("Q", [(1 << 63) + nth]))
        parent = block_hash
    with (directory / "one" / journal.FILE_NAME).open("wb") as file:
        file.writelines(inventory.encode())
    return size


async def _open_and_close(tier: FileTier) -> float:
    started = time.perf_counter()
    await tier.open()
    seconds = time.perf_counter() - started
    await tier.close()
    return seconds


def restore(directory: Path, entries: int, size: int) -> float:
    """Seconds until a tier is open."""
    tier = make_tier(directory, size)
    seconds = asyncio.run(_open_and_close(tier))
    assert tier.stats().num_entries == entries, "blocks were lost"
    return seconds


def measure_restore(directory: Path) -> list[Row]:
    """How long a server of a million blocks takes to come back."""
    size = write_journal(directory / "restore", RESTORED_ENTRIES)
    with progress("restore", 3) as advance:
        taken = []
        for _ in range(3):
            command = [sys.executable, "-m", "benchmarks.cases.tiers", f"--directory={directory / 'restore'}"]
            command += [f"--restore={RESTORED_ENTRIES}", f"--size={size}"]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
            taken.append(float(done.stdout.split()[-1]))
            advance()
    return [at_most("restart, 1,000,000 blocks, until the tier is open", estimate(taken), "s", RESTORE_REACH_S)]


# Servers


def measure_puts(directory: Path, rounds: int) -> list[Row]:
    """Puts into a full arena without a tier, above one that keeps up or does not, and above one that stands still."""
    memory = str(PUTS_IN_ARENA * PUT_BLOCKS * PUT_BLOCK_BYTES)
    payloads = Pages(PUT_BLOCKS * PUT_BLOCK_BYTES).views(PUT_BLOCK_BYTES)
    with ExitStack() as stack:
        endpoints = {
            "no tier": stack.enter_context(kvpool_server(memory)),
            "file tier": stack.enter_context(
                kvpool_server(memory, "--tier", f"file:{directory / 'puts'},size=2GiB,name=one,create=yes")
            ),
            "a tier that stands still": stack.enter_context(_server_on_a_stopped_master(memory)),
        }
        clients = {
            name: stack.enter_context(Client(ClientConfig(endpoint, timeout_ms=20_000)))
            for name, endpoint in endpoints.items()
        }
        opened = {name: client.open_namespace(spec(PUT_BLOCK_BYTES)) for name, client in clients.items()}
        count = [0]

        def put(name: str) -> float:
            count[0] += 1
            run = BlockRun(0, [name_of(name, count[0], nth) for nth in range(PUT_BLOCKS)])
            return timed(lambda: clients[name].put_blocks(opened[name], run, payloads))

        measures: dict[str, Callable[[], float]] = {name: (lambda name=name: put(name)) for name in clients}
        taken = alternate(measures, rounds, what="puts", shuffled=True, warmups=PUTS_IN_ARENA)  # They fill the arena.
        stats = {name: client.admin.stats() for name, client in clients.items()}
    assert all(each.counters["evicted_blocks"] >= rounds * PUT_BLOCKS for each in stats.values())
    rows = [Row(f"put of 16 MiB, {name}", ms(each), "ms") for name, each in taken.items()]
    for name, bound in (("file tier", 0.0), ("a tier that stands still", 1.1)):
        ratio, what = time_ratio(taken[name], taken["no tier"]), f"put, {name} over none"
        rows.append(at_most(what, ratio, "x", bound) if bound else Row(what, ratio, "x"))
        dropped = stats[name].tiers[0].counters.get("dropped_demotions", 0)
        rows.append(Row(f"blocks dropped on their way, {name}", dropped, "blocks"))
    return rows


@contextmanager
def _server_on_a_stopped_master(memory: str) -> Iterator[str]:
    port = free_port()
    with process(master_command(port)) as master:
        wait_until(lambda: is_listening(port), "mooncake_master", master)
        tier = "--tier", f"mooncake:master=127.0.0.1:{port},segment=64MiB"
        with kvpool_server(memory, "--mooncake-trusted-network", *tier) as endpoint:
            master.send_signal(signal.SIGSTOP)
            try:
                yield endpoint
            finally:
                master.send_signal(signal.SIGCONT)


def measure_warm(directory: Path, rounds: int) -> list[Row]:
    """A prompt of 64 MiB, from the arena and from the tier of a server that has just started."""
    flags = ("--tier", f"file:{directory / 'warm'},size=2GiB,name=one,create=yes")
    nbytes = PROMPT_BLOCKS * PROMPT_BLOCK_BYTES
    payloads = Pages(nbytes).views(PROMPT_BLOCK_BYTES)
    run = BlockRun(0, [name_of("prompt", nth) for nth in range(PROMPT_BLOCKS)])
    with kvpool_server("512MiB", *flags) as endpoint, Client(ClientConfig(endpoint)) as client:
        client.put_blocks(client.open_namespace(spec(PROMPT_BLOCK_BYTES)), run, payloads)
        until_true(lambda: client.admin.stats().tiers[0].num_entries == PROMPT_BLOCKS, "the tier is too slow")
    up, get = [], []
    with progress("warm", rounds) as advance:
        for _ in range(rounds):
            with kvpool_server("512MiB", *flags) as endpoint, Client(ClientConfig(endpoint)) as client:
                namespace = client.open_namespace(spec(PROMPT_BLOCK_BYTES))
                up.append(timed(functools.partial(_bring_up, client, namespace, run)))
                _get(client, namespace, run)  # Maps the arena.
                get.append(timed(functools.partial(_get, client, namespace, run)))
            advance()
    return [
        Row("64 MiB prompt after a restart, from lookup until it is in the arena", ms(up), "ms"),
        Row("64 MiB prompt after a restart, up", gb_per_s(nbytes, up), "GB/s"),
        Row("64 MiB prompt in the arena, lookup and get", ms(get), "ms"),
    ]


def _bring_up(client: Client, namespace: Namespace, run: BlockRun) -> None:
    found = client.lookup(namespace, [run])
    while found.retry_after_ms:
        time.sleep(found.retry_after_ms / 1e3)
        client.release([found.lease_id])
        found = client.lookup(namespace, [run])
    assert found.hits[0].num_leading == PROMPT_BLOCKS
    client.release([found.lease_id])


def _get(client: Client, namespace: Namespace, run: BlockRun) -> None:
    lease_id = client.lookup(namespace, [run]).lease_id
    assert all(block is not None for block in client.get_blocks(namespace, lease_id, run))
    client.release([lease_id])


def main(
    directory: Annotated[
        Path | None, typer.Option(help="On the disk to be measured; a temporary one by default.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Of each measure.")] = 7,
    restore_entries: Annotated[int, typer.Option("--restore", help="Only restore so many, and print the time.")] = 0,
    size: Annotated[int, typer.Option(help="Of the tier that is restored.")] = 0,
) -> None:
    """Measures, and reports."""
    if restore_entries:
        assert directory is not None
        print(restore(directory, restore_entries, size))
        return
    with tempfile.TemporaryDirectory(prefix="kvpool-tiers-", dir=directory) as made:
        place = Path(made)
        rows = [
            *measure_disk(place, rounds),
            *measure_restore(place),
            *measure_warm(place, rounds),
            *measure_puts(place, 3 * rounds),
        ]
    report(
        "tiers",
        rows,
        rounds=rounds,
        threads=THREADS,
        total_bytes=TOTAL_BYTES,
        put_blocks=PUT_BLOCKS,
        put_block_bytes=PUT_BLOCK_BYTES,
    )


if __name__ == "__main__":
    typer.run(main)
