"""What does the end of a server cost? A kill under load, with a million blocks; the table's price; a trace with kills.

kvpool: the server below its keeper gets SIGKILL while clients look up and put. Timed is until a client has the first
hit; then every block that had been stored before the load is looked up. Mooncake Store: the process with the segment
gets SIGKILL, and another one joins the cluster. memcached: a server with a memory file gets SIGKILL, and SIGUSR1, which
it takes for a restart.

The price: puts of new blocks and lookups, of a server whose memory is kept and of one with `--keep no`, in turns.

The trace: the Mooncake trace replayed against the pool (`benchmarks.replay`), which dies after each thousandth request
and is adopted by a new one, beside the same without deaths.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import numpy as np
import typer

from benchmarks.cases.replay import TRACE
from benchmarks.harness.measuring import (
    Row,
    alternate,
    at_least,
    at_most,
    estimate,
    percentile,
    report,
    server_process,
    speed_ratio,
    timed,
    until_true,
)
from benchmarks.peers import memcached
from benchmarks.peers.mooncake_store import Store, master, segment
from benchmarks.replay.pool import ReplayedPool, make_pool
from benchmarks.replay.request import Request, num_blocks, num_distinct
from benchmarks.replay.trace import load
from kvpool import BlockRun, Client, ClientConfig, GroupSpec, NamespaceSpec
from kvpool.protocol.errors import KVPoolError
from kvpool.protocol.types import NONCE_BYTES, TOKEN_BYTES
from kvpool_server.cache.arena import MIN_SLOT_BYTES
from kvpool_server.cache.eviction import DEFAULT_POLICY
from kvpool_server.cache.steps import finish
from kvpool_server.keeping.adoption import MARK_EVERY_S, TableFollower, restore
from kvpool_server.keeping.table import Geometry, SlotTable
from testbed.kept import server_below
from testbed.ports import is_listening

KEPT = ("--keep", "yes")
CHUNK_BYTES, ROOM_MIB = 1 << 10, 256
PROBED, PUT, LOADED, LOADED_BLOCKS, LOOKED_UP = 64, 4_096, 256, 65_536, 8_192
START_S, ENDED_S = 240.0, 60.0
REACH_S, REACH_HITS, REACH_PRICE, REACH_TRACE = 3.0, 0.99, 0.98, 0.97
BLOCKS_A_PUT = {16 << 10: 64, 2 << 20: 16}
"""By the bytes of a block: a small one, and one of 16 tokens of Llama-3.1-8B."""
PAIRS = 6
KILL_EVERY = 1_000
SHARE = 10
MOONCAKE_KEYS, MOONCAKE_BYTES = 1_000, 256 << 20
MEMCACHED_MIB = 2_048


def main(
    entries: Annotated[int, typer.Option(help="Blocks in the pool.", min=LOOKED_UP)] = 1_000_000,
    kills: Annotated[int, typer.Option(min=1)] = 5,
    rounds: Annotated[int, typer.Option(help="Of puts and lookups.", min=3)] = 40,
    block_kib: Annotated[int, typer.Option(help="KiB of each block in the pool.", min=1)] = 1,
) -> None:
    """Kill and measure."""
    seconds, share = _killed(entries, kills, block_kib << 10)
    rows = [
        at_most("SIGKILL under load to the first hit", estimate(seconds), "s", REACH_S),
        at_least("complete blocks that are hits again", min(share), "", REACH_HITS),
        Row("objects of Mooncake Store that are there again", _mooncake(), ""),
        *_memcached(entries),
        *_price(rounds),
    ]
    if TRACE.exists():
        rows.append(_trace(load(TRACE)))
    report("restarts", rows, entries=entries, block_kib=block_kib, kills=kills, rounds=rounds)


def _killed(entries: int, kills: int, nbytes: int) -> tuple[list[float], list[float]]:
    """Seconds from each kill to the first hit, and the share of the blocks that are hits again."""
    hashes = [nth.to_bytes(32, "big") for nth in range(entries)]
    slot_bytes = max(nbytes, MIN_SLOT_BYTES)  # Of a small block's slot a part is touched.
    memory = f"{entries * slot_bytes * 5 // 4 // (1 << 20) + ROOM_MIB}MiB"
    seconds, shares = [], []
    with server_process(memory, *KEPT, start_timeout_s=START_S) as (endpoint, keeper):
        spec = NamespaceSpec("restarts", (GroupSpec("full_attention", 16, 8, 128, 128, 1, nbytes),))
        _fill(endpoint, spec, hashes)
        for nth in range(kills):
            probed = hashes[nth * PROBED : (nth + 1) * PROBED]
            with _load(endpoint, spec):
                os.kill(server_below(keeper), signal.SIGKILL)
                began = time.monotonic()
                until_true(lambda: _hits(endpoint, spec, probed) > 0, "no hit after a kill", ENDED_S)  # noqa: B023
                seconds.append(time.monotonic() - began)
            shares.append(sum(_all_hits(endpoint, spec, hashes)) / entries)
            print(f"kill {nth}: first hit after {seconds[-1]:.2f} s, hits {shares[-1]:.5f}", flush=True)
    return seconds, shares


def _fill(endpoint: str, spec: NamespaceSpec, hashes: Sequence[bytes]) -> None:
    payloads = [np.zeros(spec.groups[0].chunk_bytes, np.uint8)] * PUT
    with Client(ClientConfig(endpoint, timeout_ms=60_000)) as client:
        namespace = client.open_namespace(spec)
        for first in range(0, len(hashes), PUT):
            run = BlockRun(0, hashes[first : first + PUT])
            client.put_blocks(namespace, run, payloads[: len(run)])


@contextlib.contextmanager
def _load(endpoint: str, spec: NamespaceSpec) -> Iterator[None]:
    """A client looks up and puts new blocks meanwhile."""
    ended = threading.Event()
    payloads = [bytes(spec.groups[0].chunk_bytes)] * LOADED
    names = itertools.cycle([b"load" + bytes(24) + nth.to_bytes(4, "big") for nth in range(LOADED_BLOCKS)])

    def run() -> None:
        while not ended.is_set():
            ended.wait(0.05)
            if not is_listening(int(endpoint.rpartition(":")[2])):
                continue
            with contextlib.suppress(KVPoolError), Client(ClientConfig(endpoint, timeout_ms=2_000)) as client:
                namespace = client.open_namespace(spec)
                while not ended.is_set():
                    run = BlockRun(0, list(itertools.islice(names, LOADED)))
                    client.lookup(namespace, [run])
                    client.put_blocks(namespace, run, payloads)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.5)
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _hits(endpoint: str, spec: NamespaceSpec, hashes: Sequence[bytes]) -> int:
    if not is_listening(int(endpoint.rpartition(":")[2])):
        return 0  # gRPC would wait before it connects again, longer each time.
    try:
        with Client(ClientConfig(endpoint, timeout_ms=1_000)) as client:
            return client.lookup(client.open_namespace(spec), [BlockRun(0, hashes)]).hits[0].num_leading
    except KVPoolError:
        return 0


def _all_hits(endpoint: str, spec: NamespaceSpec, hashes: Sequence[bytes]) -> Iterator[int]:
    with Client(ClientConfig(endpoint, timeout_ms=60_000)) as client:
        namespace = client.open_namespace(spec)
        for first in range(0, len(hashes), LOOKED_UP):
            run = BlockRun(0, hashes[first : first + LOOKED_UP])
            yield client.lookup(namespace, [run], lease=False, prefix_only=False).hits[0].complete.bit_count()


def _mooncake() -> float:
    """The share of a store's objects that are there again, once the process with its segment was killed and started."""
    value = np.zeros(1 << 20, np.uint8)
    keys = [f"restart@{nth}" for nth in range(MOONCAKE_KEYS)]
    with master() as address, contextlib.ExitStack() as stack:
        holder = stack.enter_context(segment(address, MOONCAKE_BYTES))
        store = Store(address)
        stack.callback(store.close)
        store.register(value)
        store.put(keys, [value.ctypes.data] * len(keys), CHUNK_BYTES)
        holder.kill()
        holder.wait()
        stack.enter_context(segment(address, MOONCAKE_BYTES))
        sink = np.zeros((len(keys), CHUNK_BYTES), np.uint8)
        store.register(sink)
        there = 0
        for key, row in zip(keys, sink, strict=True):
            with contextlib.suppress(AssertionError):
                store.get([key], [row.ctypes.data], CHUNK_BYTES)
                there += 1
            if not there:
                break  # Each miss waits for the dead process.
    return there / len(keys)


def _memcached(entries: int) -> list[Row]:
    """The shares of a server's objects that are there again after each signal, and the time until the first one is."""
    if missing := memcached.missing():
        print(f"not measured: {missing}")
        return []
    rows = []
    with memcached.memcached(MEMCACHED_MIB) as server:
        for number in (signal.SIGUSR1, signal.SIGKILL):
            server.fill(entries, CHUNK_BYTES)
            server.end(number)
            seconds = timed(server.start)
            share = server.found(entries) / entries
            rows.append(Row(f"objects of memcached that are there again after {number.name}", share, ""))
            if share:
                rows.append(Row(f"memcached, start after {number.name} until it answers", seconds, "s"))
    return rows


def _price(rounds: int) -> list[Row]:
    """What keeping costs puts and lookups of one client. Two processes differ by chance, so there are several pairs."""
    rows = []
    for nbytes, count in BLOCKS_A_PUT.items():
        seconds: dict[tuple[str, str], list[float]] = {}
        for pair in range(PAIRS):
            flags = [("kept", KEPT), ("not", ("--keep", "no"))]
            if pair % 2:
                flags.reverse()  # The arena of the server that starts first has more scattered pages.
            with contextlib.ExitStack() as stack:
                sides = {
                    name: stack.enter_context(contextlib.closing(_Side(stack, each, nbytes, count)))
                    for name, each in flags
                }
                for what in ("put", "lookup"):
                    measures = {name: getattr(side, what) for name, side in sides.items()}
                    taken = alternate(measures, rounds, what=f"{what}s of {nbytes} bytes, pair {pair}")
                    for name, each in taken.items():
                        seconds.setdefault((what, name), []).append(percentile(each, 50))
        for what in ("put", "lookup"):
            ratio = speed_ratio(seconds[what, "kept"], seconds[what, "not"])
            rows.append(at_least(f"{what}, blocks of {nbytes >> 10} KiB, over --keep no", ratio, "x", REACH_PRICE))
    return rows


class _Side:
    """A server, and a client that puts and looks up."""

    def __init__(self, stack: contextlib.ExitStack, flags: Sequence[str], nbytes: int, count: int):
        endpoint, _ = stack.enter_context(server_process("512MiB", *flags))
        self._client = Client(ClientConfig(endpoint))
        group = GroupSpec("full_attention", 16, 8, 128, 128, 1, nbytes)
        self._namespace = self._client.open_namespace(NamespaceSpec("price", (group,)))
        self._payloads = [np.zeros(nbytes, np.uint8)] * count
        self._last = BlockRun(0, [bytes(32)])

    def put(self) -> float:
        self._last = BlockRun(0, [os.urandom(32) for _ in self._payloads])
        return timed(lambda: self._client.put_blocks(self._namespace, self._last, self._payloads))

    def lookup(self) -> float:
        found = []
        seconds = timed(lambda: found.append(self._client.lookup(self._namespace, [self._last])))
        self._client.release([found[0].lease_id])
        return seconds

    def close(self) -> None:
        self._client.close()


class _MortalPool(ReplayedPool):
    """A pool that dies after every `KILL_EVERY` requests, and is adopted by another one."""

    def __init__(self, capacity: int, policy: str):
        super().__init__(capacity, policy)
        self._capacity, self._policy, self._num_requests, self._marked_at = capacity, policy, 0, 0.0
        arena = self.pool.arena
        geometry = Geometry(arena.arena_bytes, arena.extent_bytes, False, bytes(NONCE_BYTES), bytes(TOKEN_BYTES))
        self._table = SlotTable.create(geometry)
        self._follower = TableFollower(self.pool, self._table)

    def play(self, request: Request) -> int:
        self._num_requests += 1
        if self._num_requests % KILL_EVERY == 0:
            self._die()
        hits = super().play(request)
        if self.now_s - self._marked_at >= MARK_EVERY_S:
            self._marked_at = self.now_s
            finish(self._follower.mark())
        return hits

    def _die(self) -> None:
        before = self._table
        self._table = SlotTable.reopen(os.dup(before.fd))
        before.close()
        self.pool, self._fingerprint = make_pool(self._capacity, self._policy, lambda: self.now_s)
        _, self._follower = restore(self.pool, self._table)


def _trace(requests: Sequence[Request]) -> Row:
    capacity = num_distinct(requests) * SHARE // 100
    hits = [
        sum(pool.play(request) for request in requests)
        for pool in (_MortalPool(capacity, DEFAULT_POLICY), ReplayedPool(capacity, DEFAULT_POLICY))
    ]
    print(f"hits with kills {hits[0] / num_blocks(requests):.4f}, without {hits[1] / num_blocks(requests):.4f}")
    name = f"hits of the trace, a kill every {KILL_EVERY} requests, over none"
    return at_least(name, hits[0] / hits[1], "", REACH_TRACE)


if __name__ == "__main__":
    typer.run(main)
