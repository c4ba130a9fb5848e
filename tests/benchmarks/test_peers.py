"""Many servers that read from one another, simulated around real pools, and as many real servers as a test can have."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cases.peers import MANY_SERVERS, REQUESTS_A_SERVER, ROUTERS, SERVERS, measure_troubles
from benchmarks.replay.fleet import Fleet, documents, plain
from benchmarks.replay.pool import run_of
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.types import BlockRun
from kvpool_server.cache.eviction import DEFAULT_POLICY
from tests.support.directory import DirectoryProcess
from tests.support.processes import ServerProcess
from tests.support.values import group_spec, namespace_spec

REAL_SERVERS = 16
MEMORY, CHUNK = 8 << 20, 64 << 10


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(
    "num_servers",
    [
        SERVERS[0],
        *(
            pytest.param(each, marks=[pytest.mark.more, pytest.mark.timeout(900)])
            for each in (SERVERS[1], MANY_SERVERS)
        ),
    ],
)
def test_a_fleet_of_any_size_goes_on_with_as_few_messages(num_servers: int, router: str) -> None:
    rows = {row.what: row for row in measure_troubles(num_servers, router)}
    missed = {what: row.figure for what, row in rows.items() if row.met not in (None, True)}
    assert not missed


@pytest.mark.more
def test_real_servers_hit_what_the_simulated_ones_hit(
    pool_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    """One client a server; each block has 512 tokens, so that all of them are announced."""
    requests = documents(REAL_SERVERS, REAL_SERVERS * REQUESTS_A_SERVER)
    simulated = Fleet(REAL_SERVERS, MEMORY // CHUNK, DEFAULT_POLICY, announced=1.0).play(requests, plain)
    spec = namespace_spec(group_spec(chunk_bytes=CHUNK, block_tokens=512), tenant="acme")
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text(os.urandom(32).hex())
    with ExitStack() as stack:
        directory = DirectoryProcess(tmp_path)
        stack.callback(directory.kill)
        tier = f"peers:transport=tcp,directory={directory.url},key_file={key}"
        flags = ("--memory", str(MEMORY), "--tier", tier)
        servers = [pool_server(*flags) for _ in range(REAL_SERVERS)]
        clients = [stack.enter_context(Client(ClientConfig(each.endpoint, timeout_ms=20_000))) for each in servers]
        namespaces = [client.open_namespace(spec) for client in clients]
        hits = 0
        for nth, request in enumerate(requests):
            client, namespace, run = clients[nth % REAL_SERVERS], namespaces[nth % REAL_SERVERS], run_of(request)
            lease_id, ends_at = 0, time.monotonic() + 10
            while (found := client.rpc.lookup_async(namespace, [run], wait_ms=200).result()).retry_after_ms:
                assert time.monotonic() < ends_at
                client.release([lease_id])
                lease_id = found.lease_id
            leading = found.hits[0].num_leading
            hits += leading
            left = run.block_hashes[leading:]
            if left:
                parent = run.block_hashes[leading - 1] if leading else b""
                client.put_blocks(namespace, BlockRun(0, left, parent), [np.zeros(CHUNK, np.uint8)] * len(left))
            client.release([lease_id, found.lease_id])
    print(f"hits of real servers {hits}, of simulated ones {simulated}")
    assert 0.9 < hits / simulated < 1.1
