"""How a server says it is doing, beside what its /metrics say."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable

import pytest

from kvpool.client.client import Client
from kvpool.protocol.server_stats import count, since
from kvpool.version import __version__
from tests.conftest import StartServer
from tests.support.driven_pool import SAVED_S, Driver
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


def test_stats_say_who_uses_the_pool(pool_server: StartServer, connect: Callable[..., Client]) -> None:
    client = connect(pool_server())
    spec = namespace_spec(group_spec(chunk_bytes=1_000, block_tokens=16), model="m", tenant="t")
    namespace = client.open_namespace(spec)
    client.put_blocks(namespace, run_of("a", "b"), [payload(name, 1_000) for name in "ab"])
    client.lookup(namespace, [run_of("a", "b", "c")])
    server = client.admin.stats().server
    (used,) = server.usage
    assert (used.model, used.tenant, used.lookup_tokens, used.hit_tokens) == ("m", "t", 48, 32)
    assert (used.stored_bytes, used.held_blocks) == (2_000, 2)


def test_stats_say_what_engines_have_reported(pool_server: StartServer, connect: Callable[..., Client]) -> None:
    client = connect(pool_server())
    drivers = [Driver(client, "one", "acme"), Driver(client, "two")]
    for driver in drivers:
        for _ in range(20):
            driver.turn()
    drivers[0].report("gpu-1:1")
    server = client.admin.stats().server
    used = {(each.model, each.tenant): each for each in server.usage}
    acme, silent = used["one", "acme"], used["two", ""]
    assert acme.saved_seconds == pytest.approx(drivers[0].served.hit_tokens * SAVED_S) and acme.saved_seconds > 0
    assert 0 < acme.lost_seconds < acme.saved_seconds
    missed = drivers[0].served.looked_up_tokens - drivers[0].served.hit_tokens
    assert acme.computed_tokens == {"never_stored": missed}
    assert silent.hit_tokens > 0 and (silent.saved_seconds, silent.computed_tokens) == (0, {})


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
