"""Does anything break in ten minutes at full speed, with servers that are killed? `make soak`.

Three servers over one shared directory and one Mooncake cluster; clients of each put, look up and get prefixes at
random, and compare every byte. Meanwhile servers are killed, ended, stopped and restarted, the cluster's master is
killed, and bytes in the directory change. At the end nothing may be held, and everything must be free.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer

from benchmarks.harness.measuring import Row, at_most, progress, report, until_true
from kvpool import BlockRun, GroupSpec, NamespaceSpec
from kvpool.client.client import Client, Namespace
from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import KVPoolError, UnavailableError
from testbed.mooncake import master_command, segment_command
from testbed.ports import free_endpoint, free_port, is_listening

MIB = 1 << 20
SERVERS = 3
CLIENTS_A_SERVER = 2
CHUNK_BYTES, SHARDS = 8 << 10, 2
BLOCK_BYTES = CHUNK_BYTES * SHARDS
PREFIXES, DEPTH = 400, 64
MEMORY, TIER = "16MiB", "64MiB"
PATIENCE_S = 0.5
SPEC = NamespaceSpec("soak", (GroupSpec("full_attention", 16, 8, 64, 64, SHARDS, CHUNK_BYTES),))
CALAMITY_EVERY_S = (0.5, 3.0)
START_S = 60.0
END_S = 30.0


@functools.cache
def name_of(prefix: int, depth: int) -> bytes:
    """A block hash."""
    return hashlib.sha256(b"soak %d %d" % (prefix, depth)).digest()


@functools.lru_cache(4096)
def content(prefix: int, depth: int) -> npt.NDArray[np.uint8]:
    """What a block must hold: uint8 [BLOCK_BYTES]."""
    seed = int.from_bytes(name_of(prefix, depth)[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


class Process:
    """Something that is killed and started again."""

    def __init__(self, command: list[str], port: int, log: Path):
        self._command = command
        self._port = port
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def wait_until_there(self) -> None:
        until_true(lambda: is_listening(self._port), f"{self._command[:4]} does not listen; see {self._log}", START_S)

    def send(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def end(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal, and waits for the end. Raises RuntimeError if the process has to be killed."""
        if self.process is None:
            return
        self.send(signal.SIGCONT)
        self.send(number)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise RuntimeError(f"{self._command[:4]} did not end within {END_S:.0f} s; see {self._log}") from None


class World:
    """Servers, and the cluster and the directory under them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.tier = folder / "tier"
        master_port = free_port()
        self.master = Process(master_command(master_port), master_port, folder / "master.log")
        self.holder = Process(
            segment_command(f"127.0.0.1:{master_port}", 256 * MIB), master_port, folder / "holder.log"
        )
        self.endpoints = [free_endpoint() for _ in range(SERVERS)]
        self.servers = [self._server(nth, endpoint, master_port) for nth, endpoint in enumerate(self.endpoints)]

    def _server(self, nth: int, endpoint: str, master_port: int) -> Process:
        command = [sys.executable, "-m", "kvpool_server", "--listen", endpoint, "--http-listen", "", "--keep", "no"]
        command += ["--data-listen", "127.0.0.1:0", "--memory", MEMORY, "--grace-ms", "200", "--max-ttl-ms", "5000"]
        command += ["--log-level", "error"]
        write = "back" if nth == SERVERS - 1 else "through"
        command += ["--tier", f"file:{self.tier},size={TIER},name=server-{nth},write={write},create=yes"]
        if nth:  # The first has the directory alone: a dead master is then no excuse for a miss.
            command += ["--mooncake-trusted-network", "--tier", f"mooncake:master=127.0.0.1:{master_port}"]
        return Process(command, int(endpoint.rpartition(":")[2]), self.folder / f"server-{nth}.log")

    def start(self) -> None:
        self.master.start()
        self.master.wait_until_there()
        self.holder.start()
        for server in self.servers:
            server.start()
        for server in self.servers:
            server.wait_until_there()

    def end(self) -> None:
        with contextlib.ExitStack() as stack:  # Ends the others, too, where one does not end.
            for each in (self.master, self.holder, *self.servers):
                stack.callback(each.end, signal.SIGTERM)


class Clients:
    """Threads that put, look up and get, until they are told to stop.

    Attributes:
        counts: of operations by kind, of failures, of blocks that hit and of wrong bytes.
    """

    def __init__(self, endpoints: list[str]):
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, args=(endpoint, nth), name=f"soak-{nth}")
            for nth, endpoint in enumerate(endpoint for endpoint in endpoints for _ in range(CLIENTS_A_SERVER))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads), "a client hangs"

    def _count(self, what: str, by: int = 1) -> None:
        with self._lock:
            self.counts[what] += by

    def _work(self, endpoint: str, nth: int) -> None:
        picks = random.Random(nth)
        transport = "shm" if nth % 2 == 0 else "tcp"
        config = ClientConfig(
            endpoint, transport=transport, timeout_ms=2_000, data_timeout_ms=2_000, ticket_ttl_ms=2_000
        )
        while not self._stopping.is_set():
            try:
                with Client(config) as client:
                    namespace = client.open_namespace(SPEC)
                    while not self._stopping.is_set():
                        self._turn(client, namespace, picks)
            except KVPoolError as error:  # The server has gone, or is another one now.
                self._count("calls that failed")
                with self._lock:
                    self.errors[type(error).__name__] += 1
                time.sleep(0.05)

    def _turn(self, client: Client, namespace: Namespace, picks: random.Random) -> None:
        prefix = min(int(picks.expovariate(1 / (PREFIXES / 5))), PREFIXES - 1)
        count = picks.randint(1, DEPTH)
        run = BlockRun(0, [name_of(prefix, depth) for depth in range(count)])
        hits = self._read(client, namespace, prefix, run)
        if hits < count:
            rest = BlockRun(0, run.block_hashes[hits:], run.block_hashes[hits - 1] if hits else b"")
            client.put_blocks(namespace, rest, [content(prefix, depth) for depth in range(hits, count)])
            self._count("puts")
        if picks.random() < 0.002:
            client.admin.remove(namespace, [BlockRun(0, [name_of(prefix, picks.randrange(DEPTH))])])
            self._count("removals")

    def _read(self, client: Client, namespace: Namespace, prefix: int, run: BlockRun) -> int:
        found = client.lookup(namespace, [run])
        ends_at = time.monotonic() + PATIENCE_S
        while found.retry_after_ms and time.monotonic() < ends_at:
            self._count("lookups asked again")
            time.sleep(found.retry_after_ms / 1e3)
            earlier, found = found, client.lookup(namespace, [run])
            client.release([earlier.lease_id])
        self._count("lookups")
        self._count("blocks asked for", len(run))
        hits = found.hits[0].num_leading
        if not hits:
            return 0
        blocks = client.get_blocks(namespace, found.lease_id, BlockRun(0, run.block_hashes[:hits]))
        for depth, block in enumerate(blocks):
            if block is not None and not np.array_equal(block, content(prefix, depth)):
                self._count("wrong blocks")
        client.release([found.lease_id])
        self._count("gets")
        self._count("blocks hit", hits)
        return hits


class Calamities:
    """What befalls the servers, one thing at a time."""

    def __init__(self, world: World, seed: int):
        self.counts: Counter[str] = Counter()
        self._world = world
        self._picks = random.Random(seed)

    def next(self) -> None:
        """Does harm, and mends it."""
        harm = self._picks.choice([self._kill, self._kill, self._end, self._stop, self._flip, self._kill_master])
        harm()
        self.counts[harm.__name__.strip("_").replace("_", " ")] += 1

    def _pick(self) -> Process:
        server = self._picks.choice(self._world.servers)
        assert server.process is not None and server.process.poll() is None, "a server has ended by itself"
        return server

    def _kill(self) -> None:
        server = self._pick()
        server.end(signal.SIGKILL)
        server.start()
        server.wait_until_there()

    def _end(self) -> None:
        server = self._pick()
        server.end(signal.SIGTERM)
        server.start()
        server.wait_until_there()

    def _stop(self) -> None:
        server = self._pick()
        server.send(signal.SIGSTOP)
        time.sleep(self._picks.uniform(0.1, 3.0))
        server.send(signal.SIGCONT)

    def _flip(self) -> None:
        with contextlib.suppress(OSError):  # It may be cut or removed at this moment.
            path = self._picks.choice(sorted(self._world.tier.rglob("extent-*")))
            at = self._picks.randrange(max(1, path.stat().st_size))
            fd = os.open(path, os.O_RDWR)
            try:
                byte = os.pread(fd, 1, at)
                os.pwrite(fd, bytes(value ^ 0xFF for value in byte), at)
            finally:
                os.close(fd)

    def _kill_master(self) -> None:
        self._world.master.end(signal.SIGKILL)
        time.sleep(self._picks.uniform(0.0, 2.0))
        self._world.master.start()
        self._world.master.wait_until_there()


def check(endpoint: str) -> tuple[int, int]:
    """Once everybody has gone: what is still held on a server, and how many bytes of slots it has lost."""
    with Client(ClientConfig(endpoint, timeout_ms=20_000)) as client:

        def held() -> int:
            stats = client.admin.stats()
            return stats.num_leases + stats.num_tickets + stats.num_quarantined + stats.num_incomplete

        with contextlib.suppress(RuntimeError):
            until_true(lambda: held() == 0, "held", 30)
        still_held = held()
        until_true(lambda: _is_cleared(client), "Mooncake's master, which was killed, is not back", 30)
        with contextlib.suppress(RuntimeError):
            until_true(lambda: client.admin.stats().free_bytes == client.admin.stats().arena_bytes, "lost", 30)
        stats = client.admin.stats()
        return still_held, stats.arena_bytes - stats.free_bytes


def _is_cleared(client: Client) -> bool:
    """Clears a server; False while a tier is away."""
    try:
        client.admin.clear()
    except UnavailableError:
        return False
    return True


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kvpool-soak-"))
    yield folder  # Whoever fails leaves its logs there.
    shutil.rmtree(folder)


def main(
    seconds: Annotated[int, typer.Option(help="How long.")] = 600,
    seed: Annotated[int, typer.Option(help="Of what befalls the servers.")] = 0,
) -> None:
    """Runs, checks, and reports."""
    with _folder() as folder:
        world = World(folder)
        clients = Clients(world.endpoints)
        calamities = Calamities(world, seed)
        try:
            world.start()
            clients.start()
            ends_at = time.monotonic() + seconds
            with progress("soak", seconds) as advance:
                told = time.monotonic()
                while time.monotonic() < ends_at:
                    time.sleep(calamities._picks.uniform(*CALAMITY_EVERY_S))
                    calamities.next()
                    while told < time.monotonic():
                        advance()
                        told += 1
            clients.stop()
            tiers = Counter[str]()
            for endpoint in world.endpoints:
                with Client(ClientConfig(endpoint, timeout_ms=20_000)) as client:
                    for tier in client.admin.stats().tiers:
                        tiers.update(tier.counters)
            checked = [check(endpoint) for endpoint in world.endpoints]
        finally:
            clients._stopping.set()
            world.end()
        counts = clients.counts
        rows = [
            Row("operations", counts["lookups"] + counts["gets"] + counts["puts"] + counts["removals"], ""),
            *(Row(f"calamities: {what}", count, "") for what, count in sorted(calamities.counts.items())),
            at_most("wrong blocks", counts["wrong blocks"], "", 0),
            at_most("leases, tickets and slots held at the end", sum(held for held, _ in checked), "", 0),
            at_most("bytes of slots lost", sum(lost for _, lost in checked), "B", 0),
            Row("blocks asked for", counts["blocks asked for"], ""),
            Row("of them, hit", counts["blocks hit"] / max(1, counts["blocks asked for"]), ""),
            *(Row(what, counts[what], "") for what in ("lookups asked again", "calls that failed")),
            *(
                Row(f"{what.replace('_', ' ')}, since the last starts", tiers[what], "")
                for what in ("demoted_blocks", "dropped_demotions", "promoted_blocks", "corrupt_blocks")
            ),
        ]
        report("soak", rows, seconds=seconds, seed=seed, servers=SERVERS, clients=SERVERS * CLIENTS_A_SERVER,
               memory=MEMORY, tier=TIER, failures=dict(clients.errors))  # fmt: skip
        if any(row.met is False for row in rows):
            raise SystemExit(f"something broke; logs and files are in {shutil.move(folder, f'{folder}-failed')}")


if __name__ == "__main__":
    typer.run(main)
