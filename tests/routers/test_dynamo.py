"""What NVIDIA Dynamo's own indexer promises of real servers is what their lookups find."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.routers.conftest import Start
from tests.routers.test_equality import FULL, SPARSE
from tests.support.dynamo import DynamoIndexer
from tests.support.routers import MODEL, Prompts, churn, compare_through_a_kill, runs_of, settle
from tests.support.values import namespace_spec

pytestmark = pytest.mark.more


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[DynamoIndexer]:
    made = DynamoIndexer(tmp_path / "indexer.log", block_tokens=FULL.block_tokens)
    yield made
    made.close()


def test_dynamo_promises_what_lookups_find(start: Start, indexer: DynamoIndexer) -> None:
    servers, prompts = start(namespace_spec(FULL, model=MODEL), 2), Prompts.make(1)
    churn(servers[0], prompts, 30)  # Before the indexer is there: it begins with a snapshot.
    for nth, server in enumerate(servers):
        indexer.follow(nth, server.endpoint, server.replay_endpoint)
    lines = compare_through_a_kill(indexer, servers, prompts, (5_000, 5_000))
    num_lost = sum(server.num_lost for server in servers)
    assert num_lost > 20
    print("\n".join([*lines, f"{num_lost} messages were lost"]))


def test_sparse_groups_never_make_dynamo_promise_what_cannot_be_used(start: Start, tmp_path: Path) -> None:
    spec = namespace_spec(*SPARSE, model=MODEL)
    (server,), prompts = start(spec, 1), Prompts.make(2)
    indexer = DynamoIndexer(tmp_path / "indexer.log", block_tokens=max(group.block_tokens for group in SPARSE))
    try:
        indexer.follow(0, server.endpoint, server.replay_endpoint)
        num_equal = num_promised = 0
        churn(server, prompts, 200)
        settle(indexer, [server], 1)
        for _ in range(2_000):
            tokens = prompts.one()
            usable = server.client.exists(server.namespace.fingerprint, runs_of(spec, tokens)).usable_tokens
            promised = indexer.promised(tokens).get(0, 0)
            assert promised <= usable, f"{promised} tokens are promised, and {usable} can be used"
            num_equal += promised == usable
            num_promised += promised > 0
        assert num_promised
        print(f"2000 prompts, none promised too much, {num_equal} equal, {num_promised} promised")
    finally:
        indexer.close()
