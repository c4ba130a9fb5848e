"""What does the server's bookkeeping weigh? Resident bytes an entry, beyond the arena, at a million entries.

The pool is built in a process of its own, over an arena of offsets only (2 MiB slots, no memory behind them), and
filled in prefix chains of 256 blocks, every one complete. `--measure NUM_SHARDS` is that process.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.harness import at_most, report
from kvpool import BlockRun, GroupSpec, NamespaceSpec, ShardRange
from kvpool_server.storage.arena import Arena
from kvpool_server.storage.pool import Pool

NUM_ENTRIES = 1_000_000
CHAIN_BLOCKS = 256
SLOT_BYTES = 2 << 20
SHARD_COUNTS = (1, 8)
REACH_BYTES = 1024
DEADLINE_S = 600


def resident_bytes() -> int:
    """Memory of this process that is backed now."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fill(pool: Pool, fingerprint: bytes, num_shards: int) -> None:
    """Puts `NUM_ENTRIES` blocks, chain by chain."""
    shards = ShardRange(0, num_shards)
    for start in range(0, NUM_ENTRIES, CHAIN_BLOCKS):
        stop = min(start + CHAIN_BLOCKS, NUM_ENTRIES)
        hashes = [hashlib.sha256(idx.to_bytes(8, "big")).digest() for idx in range(start, stop)]
        grant = pool.put_start(fingerprint, [BlockRun(0, hashes)], shards)
        # Checksums as large as real ones, so that nothing is a cached small integer.
        sums = range((1 << 63) + start * num_shards, (1 << 63) + stop * num_shards)
        pool.put_end(grant.ticket_id, sums)


def measure(num_shards: int) -> float:
    """Resident bytes an entry of a pool built here."""
    pool = Pool(Arena(NUM_ENTRIES * SLOT_BYTES), time.monotonic, itertools.count(1 << 62).__next__)
    group = GroupSpec("full_attention", 16, 8, 128, 128, num_shards, SLOT_BYTES // num_shards)
    namespace, _ = pool.open_namespace(NamespaceSpec("benchmark", (group,)))
    before = resident_bytes()
    fill(pool, namespace.fingerprint, num_shards)
    grown = resident_bytes() - before
    assert pool.stats().num_entries == NUM_ENTRIES
    return grown / NUM_ENTRIES


def main(arguments: Sequence[str]) -> None:
    """Measures in one child a shard count, and reports."""
    if arguments:
        print(measure(int(arguments[1])))
        return
    rows = []
    for num_shards in SHARD_COUNTS:
        command = [sys.executable, "-m", "benchmarks.memory", "--measure", str(num_shards)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
        rows.append(at_most(f"server memory an entry, {num_shards} shards", float(done.stdout), "B", REACH_BYTES))
    report("memory", rows, num_entries=NUM_ENTRIES, chain_blocks=CHAIN_BLOCKS, slot_bytes=SLOT_BYTES)


if __name__ == "__main__":
    main(sys.argv[1:])
