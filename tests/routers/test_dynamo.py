"""What NVIDIA Dynamo's own indexer promises of real servers is what their lookups find."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.routers.conftest import Start
from tests.routers.test_equality import FULL
from tests.support.dynamo import DynamoIndexer
from tests.support.routers import MODEL, Prompts, churn, compare_through_a_kill
from tests.support.values import namespace_spec


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[DynamoIndexer]:
    made = DynamoIndexer(tmp_path / "indexer.log", block_tokens=FULL.block_tokens)
    yield made
    made.close()


def test_dynamo_promises_what_lookups_find(start: Start, indexer: DynamoIndexer) -> None:
    servers, prompts = start(namespace_spec(FULL, model=MODEL), 2), Prompts.make(1)
    churn(servers[0], prompts, 30)  # Before the indexer is there: it begins with a snapshot.
    for nth, server in enumerate(servers):
        indexer.follow(nth, server.endpoint)
    print("\n".join(compare_through_a_kill(indexer, servers, prompts, (5_000, 5_000))))
