"""Real servers over one real Mooncake cluster: what one stored the others find, whoever dies."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvpool.client.client import Client
from tests.kvpool_server.tiering.test_servers import NAMES, Connect, StartServer, _demoted, _hits, _put, _spec
from tests.support.mooncake import Cluster
from tests.support.processes import wait_for

STOPS_S = 30.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster(0)
    yield made
    made.stop()


def _tier(cluster: Cluster, segment: str = "64MiB") -> tuple[str, ...]:
    return "--mooncake-trusted-network", "--tier", f"mooncake:master={cluster.address},segment={segment}"


def _wait_demoted(client: Client, count: int) -> None:
    wait_for(lambda: _demoted(client) == count, f"{count} blocks are written through")


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
