"""Real servers over one real Mooncake cluster: what one stored the others find, whoever dies."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvpool.client.client import Client, Namespace
from tests.kvpool_server.tiering.test_servers import NAMES, SLOT, Connect, StartServer, _demoted, _hits, _put, _spec
from tests.support.mooncake import Cluster
from tests.support.processes import ServerProcess, wait_for
from tests.support.values import payload, run_of

STOPS_S = 30.0
SLOW_S = 3.9
"""Below what a call to a dead master takes: 4 s, or 5."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster(0)
    yield made
    made.stop()


def _tier(cluster: Cluster, segment: str = "64MiB") -> tuple[str, ...]:
    return "--mooncake-trusted-network", "--tier", f"mooncake:master={cluster.address},segment={segment}"


def _wait_demoted(client: Client, count: int) -> None:
    wait_for(lambda: _demoted(client) == count, f"{count} blocks are written through")


def _is_up(server: ServerProcess) -> bool:
    with urllib.request.urlopen(f"{server.http_url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith("kvpool_tier_up{")]
    return bool(line.endswith(" 1.0"))


def test_three_servers_on_one_cluster_one_of_them_killed(
    cluster: Cluster, pool_server: StartServer, connect: Connect
) -> None:
    spec = _spec()
    holder = pool_server("--memory", "8MiB", *_tier(cluster))
    others = [pool_server("--memory", "32MiB", *_tier(cluster, "0")) for _ in range(2)]
    servers = [*others, pool_server("--memory", "32MiB", *_tier(cluster))]
    clients = [connect(server) for server in servers]
    namespaces = [client.open_namespace(spec) for client in clients]
    for nth, (client, namespace) in enumerate(zip(clients, namespaces, strict=True)):
        _put(client, namespace, [f"{nth}-{name}" for name in NAMES])
        _wait_demoted(client, len(NAMES))
    for client, namespace in zip(clients[:2], namespaces[:2], strict=True):
        for nth in range(3):
            assert _hits(client, namespace, [f"{nth}-{name}" for name in NAMES]) == len(NAMES)
        assert client.admin.stats().tiers[0].counters["promoted_blocks"] == 2 * len(NAMES)
    servers[2].kill()  # In its segment lies some of what the others put.
    late = connect(pool_server("--memory", "32MiB", *_tier(cluster, "0")))
    namespace = late.open_namespace(spec)
    for nth in range(3):
        names = [f"{nth}-{name}" for name in NAMES]
        _hits(late, namespace, names)  # As many as there are, and each of them right.
        assert _hits(clients[0], namespaces[0], names) == len(NAMES), "its own arena has them"

    def comes_through(nth: int = 0) -> bool:
        """Somebody puts what another finds."""
        nonlocal tried
        tried += 1
        names = [f"after-{tried}-{name}" for name in NAMES]
        before = _demoted(clients[0])
        _put(clients[0], namespaces[0], names)
        ends_at = time.monotonic() + 3
        while _demoted(clients[0]) < before + len(names) and time.monotonic() < ends_at:
            time.sleep(0.05)
        return _hits(clients[1], namespaces[1], names) == len(names)

    tried = 0
    wait_for(comes_through, "the cluster does without the segment that has gone", 120)
    assert not any(client.admin.stats().tiers[0].counters.get("corrupt_blocks") for client in [*clients[:2], late])
    for server in (holder, *others):
        server.terminate()
        assert server.wait(STOPS_S) == 0


@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_without_a_master_the_pool_goes_on(
    cluster: Cluster, pool_server: StartServer, connect: Connect, way: str
) -> None:
    server = pool_server("--memory", "64MiB", *_tier(cluster))
    client = connect(server)
    namespace = client.open_namespace(_spec())
    _put(client, namespace, NAMES)
    _wait_demoted(client, len(NAMES))
    assert _is_up(server)
    cluster.harm_master(way)
    slowest = _work_until(lambda: not _is_up(server), client, namespace, "down")
    assert slowest < SLOW_S
    assert _hits(client, namespace, NAMES) == len(NAMES)
    cluster.restore_master()
    before = _demoted(client)
    slowest = _work_until(lambda: _demoted(client) > before and _is_up(server), client, namespace, "back")
    assert slowest < SLOW_S


def _work_until(done: Callable[[], bool], client: Client, namespace: Namespace, tag: str) -> float:
    """Puts, looks up what is there and what is not, and gets, until `done`; the slowest lookup in seconds."""
    slowest = 0.0
    ends_at = time.monotonic() + 120
    nth = 0
    while not done():
        assert time.monotonic() < ends_at, f"not {tag} within two minutes"
        names: Sequence[str] = [f"{tag}-{nth}-{part}" for part in range(4)]
        client.put_blocks(namespace, run_of(*names), [payload(name, SLOT) for name in names])
        for asked in (run_of(*names), run_of(f"missing-{tag}-{nth}")):
            began_at = time.monotonic()
            found = client.lookup(namespace, [asked], prefix_only=True)
            slowest = max(slowest, time.monotonic() - began_at)
            client.release([found.lease_id])
        nth += 1
        time.sleep(0.05)
    return slowest


@pytest.mark.parametrize("way", ["there", "stopped", "killed"])
def test_sigterm_ends_the_server_whatever_its_master_does(
    cluster: Cluster, pool_server: StartServer, connect: Connect, way: str
) -> None:
    server = pool_server("--memory", "64MiB", "--drain-ms", "500", *_tier(cluster))
    client = connect(server)
    namespace = client.open_namespace(_spec())
    cluster.harm_master(way)
    _put(client, namespace, NAMES)  # A call is under way, or waits.
    client.lookup(namespace, [run_of("missing")], prefix_only=True)
    server.terminate()
    assert server.wait(STOPS_S) == 0
    assert '"stopped"' in server.stderr or "stopped" in server.stderr
