"""What does it cost that tenants share a server's memory? Puts and gets through shared memory, beside one domain's.

Two servers run side by side: one serves whoever connects, the other tenants with certificates, over a Unix socket. More
tenants take turns than the arena has room for, so each of their puts gets extents that another tenant has left: the
server gives the memory back to the system, and gets zeros for it.
"""

from __future__ import annotations

import itertools
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cases.tls import files_in
from benchmarks.harness.measuring import Row, alternate, at_least, gb_per_s, report, server_process, speed_ratio, timed
from benchmarks.harness.traffic import Bytes, pair
from kvpool import BlockRun, Client, ClientConfig, GroupSpec, InPlace, NamespaceSpec
from kvpool.certificates import Authority
from kvpool.principal import ALL_TENANTS, Principal, Role
from kvpool.tls import TlsFiles

MIB = 1 << 20
BLOCK_BYTES, BATCH_BYTES = 2 * MIB, 64 * MIB
MEMORY = "256MiB"
TENANTS = 8
"""Twice as many as their batches fit the arena."""
PUT_SHARE, GET_SHARE = 0.6, 0.95


class Engine:
    """A client that puts and gets one batch through shared memory.

    Args:
        source, sink: uint8 [num_blocks, BLOCK_BYTES], warm.
    """

    def __init__(self, endpoint: str, tls: TlsFiles | None, source: Bytes, sink: Bytes):
        self.client = Client(ClientConfig(endpoint, transport="shm", tls=tls))
        spec = NamespaceSpec("batch", (GroupSpec("full_attention", 16, 8, 128, 128, 1, BLOCK_BYTES),))
        self._namespace = self.client.open_namespace(spec)
        self._run = BlockRun(0, [number.to_bytes(32, "big") for number in range(len(source))])
        self._source, self._sink = source, sink

    def put(self) -> float:
        """Seconds of a put into a pool that has none of the blocks."""
        seconds = timed(lambda: self.client.put_blocks(self._namespace, self._run, list(self._source)))
        assert self.client.lookup(self._namespace, [self._run], lease=False).hits[0].num_leading == len(self._run)
        return seconds

    def get(self) -> float:
        """Seconds of a get."""
        found = self.client.lookup(self._namespace, [self._run])
        target = InPlace(list(self._sink))
        seconds = timed(lambda: self.client.get(self._namespace, found.lease_id, [self._run], target))
        self.client.release([found.lease_id])
        return seconds


def main(rounds: Annotated[int, typer.Option(help="Rounds of each measure.")] = 41) -> None:
    """Measures and reports."""
    source, sink = (each.reshape(-1, BLOCK_BYTES) for each in pair(BATCH_BYTES))
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        authority = Authority.create(directory / "pki")
        operator = files_in(authority.issue_principal(Principal(ALL_TENANTS, Role.OPERATOR)))
        server = files_in(authority.issue_server([]))
        unix = directory / "kvpool"
        flags = ["--tls-cert", server.cert, "--tls-key", server.key, "--tls-client-ca", server.ca]
        plain, _ = stack.enter_context(server_process(MEMORY))
        stack.enter_context(server_process(MEMORY, *flags, "--unix-listen", str(unix), "--tenant-memory", tls=operator))

        one_domain = Engine(plain, None, source, sink)
        engines = []
        for number in range(TENANTS):
            identity = files_in(authority.issue_principal(Principal(f"tenant-{number}", Role.ENGINE_WRITE)))
            engines.append(Engine(f"unix:{unix}", identity, source, sink))
        operators = {"one domain": one_domain.client, "tenants": Client(ClientConfig(f"unix:{unix}", tls=operator))}
        for each in (*engines, one_domain):
            stack.callback(each.client.close)
        stack.callback(operators["tenants"].close)
        turns = itertools.cycle(engines)

        def put(name: str, engine: Engine) -> float:
            operators[name].admin.clear()
            return engine.put()

        rows: list[Row] = []
        first = engines[0]
        for what, measures, share in (
            (
                "put, extents change hands",
                {"one domain": lambda: put("one domain", one_domain), "tenants": lambda: put("tenants", next(turns))},
                PUT_SHARE,
            ),
            (
                "put, extents stay",
                {"one domain": lambda: put("one domain", one_domain), "tenants": lambda: put("tenants", first)},
                PUT_SHARE,
            ),
            ("get", {"one domain": one_domain.get, "tenants": first.get}, GET_SHARE),
        ):
            taken = alternate(measures, rounds, what=what, warmups=TENANTS)
            rows += [Row(f"{what}, {name}", gb_per_s(BATCH_BYTES, seconds), "GB/s") for name, seconds in taken.items()]
            ratio = speed_ratio(taken["tenants"], taken["one domain"])
            rows.append(at_least(f"{what}, tenants / one domain", ratio, "x", share))
    report("tenants", rows, rounds=rounds, memory=MEMORY, batch_bytes=BATCH_BYTES, tenants=TENANTS)


if __name__ == "__main__":
    typer.run(main)
