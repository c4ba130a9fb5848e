"""What does TLS cost? Lookups, and bytes over the data port, with certificates and encryption and without, in one run.

Two servers run side by side: one serves plaintext, the other TLS with certificates of clients and a sealed data port.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.measuring import (
    Row,
    alternate,
    at_least,
    at_most,
    estimate,
    gb_per_s,
    ms,
    report,
    server_process,
    speed_ratio,
    timed,
)
from benchmarks.harness.traffic import Traffic, pair
from kvpool import BlockRun, Client, ClientConfig, GroupSpec, NamespaceSpec
from kvpool.security.certificates import Authority
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool.security.tls import TlsFiles

MIB = 1 << 20
BLOCK_BYTES = 2 * MIB
BATCH_BYTES = 256 * MIB
LOOKUP_BLOCKS, LOOKUPS = 64, 200
MEMORY = "1GiB"
LOOKUP_MS = 0.1
MANY_CORES, SHARES = 16, (0.4, 0.6)
"""From so many cores on, the second reach of sealed over plain holds."""


class Lookups:
    """Lookups of blocks that are there, with a lease."""

    def __init__(self, endpoint: str, tls: TlsFiles | None):
        self._client = Client(ClientConfig(endpoint, timeout_ms=10_000, tls=tls))
        spec = NamespaceSpec("lookups", (GroupSpec("full_attention", 16, 8, 128, 128, 1, 64),))
        self._namespace = self._client.open_namespace(spec)
        self._run = BlockRun(0, [number.to_bytes(32, "big") for number in range(LOOKUP_BLOCKS)])
        self._client.put_blocks(self._namespace, self._run, [bytes(64)] * LOOKUP_BLOCKS)

    def many(self) -> float:
        """Seconds of one of many lookups, one after the other."""
        return timed(lambda: [self._one() for _ in range(LOOKUPS)]) / LOOKUPS

    def _one(self) -> None:
        found = self._client.lookup(self._namespace, [self._run])
        assert found.hits[0].num_leading == LOOKUP_BLOCKS
        self._client.rpc.release_quietly(found.lease_id)

    def close(self) -> None:
        self._client.close()


def main(rounds: Annotated[int, typer.Option(help="Rounds of each measure.")] = 11) -> None:
    """Measures and reports."""
    rows: list[Row] = []
    with ExitStack() as stack:
        authority = Authority.create(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        operator = TlsFiles.in_directory(authority.issue_principal(Principal(ALL_TENANTS, Role.OPERATOR)))
        server = TlsFiles.in_directory(authority.issue_server([]))
        flags = ["--tls-cert", server.cert, "--tls-key", server.key, "--tls-client-ca", server.ca]
        plain, _ = stack.enter_context(server_process(MEMORY))
        sealed, _ = stack.enter_context(server_process(MEMORY, *flags, tls=operator))
        sides = {"plain": (plain, None), "TLS": (sealed, operator)}

        lookups = {name: Lookups(*side) for name, side in sides.items()}
        taken = alternate({name: each.many for name, each in lookups.items()}, rounds, what="lookups")
        for name, each in lookups.items():
            rows.append(Row(f"lookup of {LOOKUP_BLOCKS} blocks, {name}", ms(taken[name]), "ms"))
            each.close()
        added = estimate([a - b for a, b in zip(taken["TLS"], taken["plain"], strict=True)]) * 1e3
        rows.append(at_most(f"lookup of {LOOKUP_BLOCKS} blocks, TLS - plain", added, "ms", LOOKUP_MS))

        source, sink = (each.reshape(-1, BLOCK_BYTES) for each in pair(BATCH_BYTES))
        blocks = {name: Traffic(end, "tcp", source, sink, 1, tls=tls) for name, (end, tls) in sides.items()}
        share = SHARES[len(os.sched_getaffinity(0)) >= MANY_CORES]
        for each in blocks.values():
            each.check()
        for way in ("put", "get"):
            taken = alternate(
                {name: each.put if way == "put" else each.get_without_lookup for name, each in blocks.items()},
                rounds,
                what=way,
            )
            for name, seconds in taken.items():
                rows.append(Row(f"{way} over TCP, {name}", gb_per_s(BATCH_BYTES, seconds), "GB/s"))
            ratio = speed_ratio(taken["TLS"], taken["plain"])
            rows.append(at_least(f"{way} over TCP, TLS / plain", ratio, "x", share))
        for each in blocks.values():
            each.close()
    report("tls", rows, rounds=rounds, block_bytes=BLOCK_BYTES, batch_bytes=BATCH_BYTES, connections="as many as pay")


if __name__ == "__main__":
    typer.run(main)
