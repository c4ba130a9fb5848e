"""What a router promises of servers behind a bridge is what their lookups find: under churn, restarts and snapshots.

The router here reads vLLM's wire format; `test_dynamo.py` has NVIDIA Dynamo's own indexer.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.routers.conftest import Start
from tests.support.processes import wait_for
from tests.support.routers import (
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
from tests.support.values import group_spec, namespace_spec, run_of

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
