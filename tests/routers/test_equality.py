"""What a router promises of real servers is what their lookups find: under churn, losses, restarts and snapshots.

The router here reads vLLM's wire format; `test_dynamo.py` has NVIDIA Dynamo's own indexer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.routers.conftest import Start
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
)
from tests.support.values import group_spec, namespace_spec

FULL = group_spec(block_tokens=4, chunk_bytes=2_048)
SPARSE = (
    FULL,
    group_spec(kind="sliding_window", block_tokens=4, window_tokens=10, chunk_bytes=2_048),
    group_spec(kind="mamba", block_tokens=8, chunk_bytes=2_048),
)


@pytest.fixture
def router() -> Iterator[WireRouter]:
    made = WireRouter()
    yield made
    made.close()


def test_a_router_promises_what_lookups_find(start: Start, router: WireRouter) -> None:
    servers, prompts = start(namespace_spec(FULL, model=MODEL), 2), Prompts.make(1)
    churn(servers[0], prompts, 30)  # Before the router is there: it begins with a snapshot.
    for nth, server in enumerate(servers):
        router.follow(nth, server.endpoint, server.replay_endpoint)
    lines = compare_through_a_kill(router, servers, prompts, (4_000, 4_000))
    servers[0].client.admin.clear(servers[0].namespace.fingerprint)
    churn(servers[0], prompts, 20)
    settle(router, servers, 3)
    lines.append(compare_with_lookups(router, servers, prompts, 2_000))
    num_lost = sum(server.num_lost for server in servers)
    assert num_lost > 20 and router.num_replays > 20
    print("\n".join([*lines, f"{num_lost} messages were lost, and {router.num_replays} replays asked for"]))


def test_a_router_that_cannot_ask_promises_what_lookups_find(start: Start, router: WireRouter) -> None:
    servers, prompts = start(namespace_spec(FULL, model=MODEL), 2, has_replays=False), Prompts.make(1)
    churn(servers[0], prompts, 30)  # Before the router is there.
    _follow(router, servers)
    lines = compare_through_a_kill(router, servers, prompts, (4_000, 3_000))
    late = WireRouter()
    try:
        _follow(late, servers)  # Which clears the other router's index, too.
        for server in servers:
            churn(server, prompts, 20)
        for each in (router, late):
            settle(each, servers, 3)
            lines.append(compare_with_lookups(each, servers, prompts, 1_500))
    finally:
        late.close()
    assert router.num_replays == 0
    print("\n".join([*lines, f"snapshots in the streams: {dict(router.num_snapshots)}"]))


def _follow(router: WireRouter, servers: Sequence[RoutedServer]) -> None:
    """Subscribes to servers without replays, and waits for their snapshots."""
    for nth, server in enumerate(servers):
        router.follow(nth, server.endpoint, "")
    for _ in _until(lambda: router.promised([]) == {} and all(router.num_snapshots.values())):
        pass


def test_a_silent_restart_is_noticed_within_seconds(start: Start, router: WireRouter) -> None:
    servers, tokens = start(namespace_spec(FULL, model=MODEL), 1), [9] * 16
    router.follow(0, servers[0].endpoint, servers[0].replay_endpoint)
    settle(router, servers, 1)
    servers[0].stop()
    assert router.promised([1_001] * 8) == {0: 8}
    servers[0].start()  # And stores nothing: only its beats tell of it.
    ends = [router.promised([1_001] * 8) for _ in _until(lambda: not router.promised([1_001] * 8))]
    assert ends and not router.promised(tokens)


def test_sparse_groups_never_make_a_router_promise_what_cannot_be_used(start: Start, router: WireRouter) -> None:
    spec = namespace_spec(*SPARSE, model=MODEL)
    (server,), prompts = start(spec, 1), Prompts.make(2)
    router.follow(0, server.endpoint, server.replay_endpoint)
    num_equal = num_promised = num_usable = 0
    for nth in range(5):
        churn(server, prompts, 60)
        settle(router, [server], nth)
        for _ in range(400):
            tokens = prompts.one()
            usable = server.client.exists(server.namespace.fingerprint, runs_of(spec, tokens)).usable_tokens
            promised = router.promised(tokens).get(0, 0)
            assert promised <= usable, f"{promised} tokens are promised, and {usable} can be used"
            num_equal += promised == usable
            num_promised += promised > 0
            num_usable += usable > 0
    print(f"2000 prompts, none promised too much, {num_equal} equal, {num_promised} promised, {num_usable} usable")
    assert 0 < num_promised <= num_usable


def _until(is_done: Callable[[], bool], deadline_s: float = 20.0) -> Iterator[None]:
    ends_at = time.monotonic() + deadline_s
    while True:
        yield
        if is_done():
            return
        assert time.monotonic() < ends_at, f"not within {deadline_s} s"
        time.sleep(0.05)
