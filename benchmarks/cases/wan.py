"""How fast do blocks travel between two machines, with 1 ms of delay and 0.1 % of loss on the way? And are they whole?

Server and client are in two network namespaces (`testbed.link`), the client uses the `tcp` transport, and
every byte of every get is compared. A batch is as large as the connector's puts, and a get is made as the connector
makes it: the lookup locates the blocks, and nothing waits for the release. Beside it, as many bare TCP connections over
the same link as the transport takes, between memory as large; both over a link without delay and loss, which is what
its carrier can do at most; and both with TCP Reno, which halves its rate at every loss, where the machine's own
congestion control may not.
`python -m benchmarks.cases.wan --role client ...` is the client's process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.harness.measuring import (
    Row,
    alternate,
    at_least,
    gb_per_s,
    process,
    progress,
    report,
    speed_ratio,
    timed,
    until_true,
)
from benchmarks.harness.traffic import Traffic, pair
from benchmarks.peers.bare_socket import BareSocket
from benchmarks.peers.bare_threads import BareThreads
from kvpool import Client, ClientConfig
from kvpool.protocol.errors import KVPoolError
from kvpool.transport.helpers import movers_of
from testbed.link import CONGESTION, DELAY_MS, LOSS, MTU, End, link, why_not

CONTROL_PORT, DATA_PORT, BARE_PORT = 50051, 50053, 50055
BLOCK_BYTES = 1 << 20
MESSAGE_BYTES = 1 << 20
START_S = 60.0
CLIENT_S = 300.0
LOSSY = f"{DELAY_MS:g} ms, {LOSS * 100:g} % loss"
LINKS: dict[str, dict[str, Any]] = {
    "no delay, no loss": {"delay_ms": 0.0, "loss": 0.0},
    LOSSY: {},
    f"{LOSSY}, Reno": {"congestion": "reno"},
}
"""What each is made with."""
BARE_SHARE = 0.9


def server_command(address: str, memory: str) -> list[str]:
    """A kvpool-server that can be reached at `address` only."""
    command = [sys.executable, "-m", "kvpool_server", "--listen", f"{address}:{CONTROL_PORT}", "--keep", "no"]
    command += ["--insecure-network", "--http-listen", "", "--memory", memory]
    return [*command, "--data-listen", f"{address}:{DATA_PORT}"]


@contextlib.contextmanager
def served(end: End, memory: str) -> Iterator[str]:
    """A server at one end of a link; its endpoint. Whoever comes first waits for it: see `wait_for_server`."""
    with process(end.command(*server_command(end.address, memory))):
        yield f"{end.address}:{CONTROL_PORT}"


def wait_for_server(endpoint: str) -> None:
    """Returns once it answers."""

    def answers() -> bool:
        with Client(ClientConfig(endpoint, insecure_network=True)) as client:
            try:
                stats = client.admin.stats()
            except KVPoolError:
                return False
        return stats.prefaulted_bytes == stats.arena_bytes

    until_true(answers, f"no kvpool-server at {endpoint}", START_S)


def measure(mib: int, rounds: int, **how: Any) -> dict[str, list[float]]:
    """Seconds of each round, by what was timed.

    Args:
        mib: bytes of a batch.
        how: the link is made.
    """
    with link(**how) as (here, there), served(here, f"{max(256, 4 * mib)}MiB"), contextlib.ExitStack() as stack:
        for port in bare_ports():
            bare = ["-m", "benchmarks.peers.bare_socket", str(port), str(mib << 20), here.address]
            stack.enter_context(process(here.command(sys.executable, *bare)))
        command = [
            sys.executable,
            "-m",
            "benchmarks.cases.wan",
            "--role=client",
            f"--mib={mib}",
            f"--rounds={rounds}",
        ]
        done = subprocess.run(
            there.command(*command, f"--host={here.address}"),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=CLIENT_S,
            env={**os.environ, "GRPC_VERBOSITY": "NONE"},
        )
    taken: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return taken


def client(host: str, mib: int, rounds: int) -> dict[str, list[float]]:
    """At the other end: what `measure` returns. Raises AssertionError for a byte that is wrong."""
    endpoint = f"{host}:{CONTROL_PORT}"
    wait_for_server(endpoint)
    source, sink = (each.reshape(-1, BLOCK_BYTES) for each in pair(mib << 20))
    traffic = Traffic(endpoint, "tcp", source, sink, 1)
    traffic.check()
    connections = [BareSocket(port, host) for port in bare_ports()]
    threads = ThreadPoolExecutor(len(connections))
    bare = BareThreads(connections, threads)

    def get() -> float:
        sink[:] = 0
        seconds = traffic.load()
        assert np.array_equal(source, sink), "the pool returned other bytes"
        return seconds

    messages, into = source.reshape(-1, MESSAGE_BYTES), np.empty_like(source).reshape(-1, MESSAGE_BYTES)
    measures = {
        "put": traffic.put,
        "get": get,
        "bare put": lambda: timed(lambda: bare.put(messages)),
        "bare get": lambda: timed(lambda: bare.get(into)),
    }
    taken = alternate(measures, rounds, warmups=1)
    traffic.close()
    threads.shutdown()
    for connection in connections:
        connection.close()
    return taken


def bare_ports() -> range:
    """As many as the transport has connections."""
    return range(BARE_PORT, BARE_PORT + movers_of(len(os.sched_getaffinity(0))))


def rows_of(name: str, taken: dict[str, list[float]], mib: int) -> list[Row]:
    """What one link gave."""
    rows = []
    for direction in ("put", "get"):
        ours, bare = taken[direction], taken[f"bare {direction}"]
        rows += [
            Row(f"{name}: tcp {direction}", gb_per_s(mib << 20, ours), "GB/s"),
            Row(f"{name}: bare TCP, {direction}", gb_per_s(mib << 20, bare), "GB/s"),
            at_least(f"{name}: tcp / bare, {direction}", speed_ratio(ours, bare), "x", BARE_SHARE)
            if name == LOSSY
            else Row(f"{name}: tcp / bare, {direction}", speed_ratio(ours, bare), "x"),
        ]
    return rows


def main(
    mib: Annotated[int, typer.Option(help="MiB in a batch.", min=1)] = 64,
    rounds: Annotated[int, typer.Option(min=1)] = 15,
    role: Annotated[str, typer.Option(hidden=True)] = "",
    host: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measures and reports; says so and does nothing where no link can be made."""
    if role == "client":
        print(json.dumps(client(host, mib, rounds)))
        return
    if reason := why_not():
        print(f"benchmarks.cases.wan: skipped, for there can be no link here: {reason}")
        return
    rows: list[Row] = []
    with progress("links", len(LINKS)) as advance:
        for name, how in LINKS.items():
            rows += rows_of(name, measure(mib, rounds, **how), mib)
            advance()
    report(
        "wan",
        rows,
        batch_bytes=mib << 20,
        rounds=rounds,
        mtu_bytes=MTU,
        delay="each way, so that a round trip takes twice as long",
        connections=len(bare_ports()),
        congestion_control=f"{CONGESTION.read_text().strip()}, where Reno is not named",
        checked="every byte of every get",
    )


if __name__ == "__main__":
    typer.run(main)
