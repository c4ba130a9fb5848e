"""What a router promises of servers behind a bridge is what their lookups find: under churn, restarts and snapshots.

The router here reads vLLM's wire format; `test_dynamo.py` has NVIDIA Dynamo's own indexer.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from testbed.ports import free_endpoint
from tests.conftest import Connect, StartServer
from tests.routers.conftest import Start
from tests.support.processes import wait_for
from tests.support.routers import (
    BRIDGE,
    MODEL,
    Prompts,
    RoutedServer,
    WireRouter,
    churn,
    compare_through_a_kill,
    compare_with_lookups,
    runs_of,
    settle,
    store_all,
)
from tests.support.values import group_spec, namespace_spec, payload, run_of

FULL = group_spec(block_tokens=4, chunk_bytes=2_048)
WINDOW = group_spec(kind="sliding_window", block_tokens=4, window_tokens=10, chunk_bytes=2_048)


@pytest.fixture
def router() -> Iterator[WireRouter]:
    made = WireRouter()
    yield made
    made.close()


def _follow(router: WireRouter, servers: list[RoutedServer]) -> None:
    for nth, server in enumerate(servers):
        router.follow(nth, server.endpoint)


def test_a_router_promises_what_lookups_find(start: Start, router: WireRouter) -> None:
    servers, prompts = start(namespace_spec(FULL, model=MODEL), 2), Prompts.make(1)
    churn(servers[0], prompts, 30)  # Before the router is there: it begins with a snapshot.
    _follow(router, servers)
    lines = compare_through_a_kill(router, servers, prompts, (4_000, 3_000))
    servers[0].client.admin.clear(servers[0].namespace.fingerprint)
    late = WireRouter()
    try:
        _follow(late, servers)  # The snapshot clears the other router's index, too.
        for server in servers:
            churn(server, prompts, 20)
        for each in (router, late):
            settle(each, servers, 3)
            lines.append(compare_with_lookups(each, servers, prompts, 1_500))
    finally:
        late.close()
    print("\n".join(lines))


def test_a_restart_is_noticed_although_the_server_stores_nothing(start: Start, router: WireRouter) -> None:
    servers = start(namespace_spec(FULL, model=MODEL), 1)
    _follow(router, servers)
    settle(router, servers, 1)
    servers[0].stop(is_killed=True)
    assert router.promised([1_001] * 8) == {0: 8}
    servers[0].start()
    wait_for(lambda: not router.promised([1_001] * 8), "the router's knowledge that all is gone")


def test_blocks_whose_tokens_no_engine_has_named_are_not_published(start: Start, router: WireRouter) -> None:
    servers = start(namespace_spec(FULL, model=MODEL), 1)
    _follow(router, servers)
    unknown, tokens = [7] * 12, [8] * 12
    (run,) = runs_of(servers[0].namespace.spec, unknown)
    store_all(servers[0], run)
    servers[0].tell(run_of("other"), tokens[:4])
    settle(router, servers, 1)
    assert not router.promised(unknown) and not router.promised(tokens)
    servers[0].tell(run, unknown)
    wait_for(lambda: router.promised(unknown) == {0: 12}, "the tokens of the blocks")


def test_a_model_with_several_groups_is_refused(pool_server: StartServer, connect: Connect) -> None:
    events, replays, publish, engine = (f"tcp://{free_endpoint()}" for _ in range(4))
    server = pool_server("--kv-events", events, "--kv-events-replay", replays)
    client = connect(server)
    namespace = client.open_namespace(namespace_spec(FULL, WINDOW, model=MODEL))
    client.put_blocks(namespace, run_of("a", group_idx=1), [payload("a", 2_048)])
    where = f"{namespace.fingerprint.hex()}@{MODEL}"
    command = [sys.executable, BRIDGE, "--server", events, replays, "--engine", engine]
    command += ["--namespace", where, "--publish", publish]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "this model has several; ask Exists instead" in done.stderr
