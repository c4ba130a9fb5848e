"""How a server says it is doing, beside what its /metrics say."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable

from kvpool.client.client import Client
from kvpool.protocol.reports import count, since
from kvpool.version import __version__
from tests.conftest import StartServer
from tests.support.values import group_spec, namespace_spec, payload, run_of


def test_stats_say_what_the_metrics_say(pool_server: StartServer, connect: Callable[..., Client]) -> None:
    server = pool_server()
    client = connect(server, transport="tcp")
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=1_000)))
    client.put_blocks(namespace, run_of("a", "b"), [payload(name, 1_000) for name in "ab"])
    for _ in range(5):
        client.lookup(namespace, [run_of("a", "b", "c")])
    before = client.admin.stats().server
    page = urllib.request.urlopen(f"{server.http_url}/metrics", timeout=10).read().decode()
    lookups = sum(
        int(counted)
        for counted in re.findall(r'kvpool_rpc_seconds_bucket\{.*?"\+Inf",method="Lookup".*?\} (\d+)', page)
    )
    assert count(before.rpcs, "Lookup") == lookups >= 5
    bounds = re.findall(r'kvpool_rpc_seconds_bucket\{le="([^"]+)",method="PutStart"', page)
    assert list(map(float, bounds[:-1])) == before.rpc_seconds_bounds
    for moved in before.transfers:
        pattern = (
            rf'kvpool_transferred_bytes_total\{{direction="{moved.direction}",transport="{moved.transport}"\}} (\S+)'
        )
        (value,) = re.findall(pattern, page)
        assert float(value) == moved.nbytes
    assert {(moved.transport, moved.direction) for moved in before.transfers} == {
        (transport, direction) for transport in ("grpc", "tcp") for direction in ("read", "write")
    }
    assert sum(moved.nbytes for moved in before.transfers if moved.direction == "write") == 2_000


def test_a_server_says_which_run_of_it_answers(pool_server: StartServer, connect: Callable[..., Client]) -> None:
    server = pool_server()
    with connect(server) as client:
        first = client.admin.stats()
        second = client.admin.stats()
    assert first.server.http_port == int(server.http_url.rpartition(":")[2])
    assert first.server.version == __version__ and abs(first.server.unix_seconds - time.time()) < 60
    assert 0 < first.server.uptime_seconds < second.server.uptime_seconds < 600
    assert first.boot_token == second.boot_token != 0
    assert count(since(second.server, first.server).rpcs, "Stats") == 1
    assert 0 <= second.server.loop_lag_p50_seconds <= second.server.loop_lag_max_seconds < 60
