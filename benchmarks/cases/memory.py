"""How much memory does the server need for each entry, beside the arena? Bytes (PSS), at a million entries or more.

A child process builds the pool over an arena of offsets (2 MiB slots without memory) and fills it with complete blocks,
in prefixes of 256. `--shards NUM_SHARDS` runs that child.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.measuring import at_most, progress, report
from kvpool import BlockRun, GroupSpec, NamespaceSpec, ShardRange
from kvpool_server.cache.arena import EXTENTS_PER_ARENA, Arena
from testbed.pool_at_once import PoolAtOnce

CHAIN_BLOCKS = 256
SLOT_BYTES = 2 << 20
SHARD_COUNTS = (1, 8)
REACH_BYTES = 1024
DEADLINE_S = 600.0


def own_bytes() -> int:
    """PSS of this process: its resident memory, with its share of the pages that it shares with others."""
    gc.collect()
    rollup = Path("/proc/self/smaps_rollup").read_text()
    (kib,) = re.findall(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    return int(kib) << 10


def fill(pool: PoolAtOnce, fingerprint: bytes, num_shards: int, entries: int) -> None:
    """Puts `entries` blocks, prefix by prefix."""
    shards = ShardRange(0, num_shards)
    for start in range(0, entries, CHAIN_BLOCKS):
        stop = min(start + CHAIN_BLOCKS, entries)
        hashes = [hashlib.sha256(idx.to_bytes(8, "big")).digest() for idx in range(start, stop)]
        grant = pool.put_start(fingerprint, [BlockRun(0, hashes)], shards)
        # As large as real checksums: Python would share small integers.
        sums = range((1 << 63) + start * num_shards, (1 << 63) + stop * num_shards)
        pool.put_end(grant.ticket_id, sums)


def measure(num_shards: int, entries: int) -> float:
    """Builds a pool in this process; returns its bytes for each entry."""
    slots = -(-entries // EXTENTS_PER_ARENA) * EXTENTS_PER_ARENA
    pool = PoolAtOnce(Arena(slots * SLOT_BYTES), time.monotonic, itertools.count(1 << 62).__next__)
    group = GroupSpec("full_attention", 16, 8, 128, 128, num_shards, SLOT_BYTES // num_shards)
    namespace, _ = pool.open_namespace(NamespaceSpec("benchmark", (group,)))
    before = own_bytes()
    fill(pool, namespace.fingerprint, num_shards, entries)
    grown = own_bytes() - before
    assert pool.stats().num_entries == entries
    return grown / entries


def main(
    entries: Annotated[int, typer.Option(help="Entries in the pool.")] = 1_000_000,
    shards: Annotated[
        int, typer.Option(help="Measure one pool with this many shards, in this process, and print the bytes.")
    ] = 0,
) -> None:
    """Measures each shard count in a child, and reports."""
    if shards:
        print(measure(shards, entries))
        return
    rows = []
    with progress("pools", len(SHARD_COUNTS)) as advance:
        for num_shards in SHARD_COUNTS:
            command = [
                sys.executable,
                "-m",
                "benchmarks.cases.memory",
                f"--entries={entries}",
                f"--shards={num_shards}",
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
            rows.append(at_most(f"server memory an entry, {num_shards} shards", float(done.stdout), "B", REACH_BYTES))
            advance()
    report("memory", rows, num_entries=entries, chain_blocks=CHAIN_BLOCKS, slot_bytes=SLOT_BYTES)


if __name__ == "__main__":
    typer.run(main)
