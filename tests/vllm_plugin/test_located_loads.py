"""A load makes one call before its bytes move: the lookup, whose answer says where the blocks lie."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from tests.support.processes import ServerProcess
from tests.support.toy.model import answer
from tests.support.toy.shapes import SHAPES
from tests.support.vllm_objects import tokens
from vllm_plugin import metadata
from vllm_plugin.worker import transfer

PROMPT = tokens(200)


def _load(fleet: Any, server: ServerProcess, shape: str, **options: int) -> dict[str, int]:
    """What the server counted while one engine loaded what another had stored."""
    writer, reader = (fleet.start(specs=SHAPES[shape], num_blocks=128, **options) for _ in range(2))
    writer.generate(PROMPT)
    with Client(ClientConfig(server.endpoint, timeout_ms=10_000)) as client:
        before = client.admin.stats().counters
        assert reader.generate(PROMPT) == [answer(PROMPT, 8)]
        assert reader.cached_tokens["prompt-0"] == 192
        after = client.admin.stats().counters
    return {name: after[name] - before[name] for name in ("lookups", "located_blocks", "get_blocks")}


@pytest.mark.parametrize(
    ("shape", "ranks", "stages"), [("deepseek", 1, 1), ("gemma3", 2, 1), ("llama4", 1, 2), ("qwen3-next", 2, 2)]
)
def test_a_load_is_one_call_a_stage(
    fleet: Any, shared_server: ServerProcess, shape: str, ranks: int, stages: int
) -> None:
    counted = _load(fleet, shared_server, shape, tp_size=ranks, num_stages=stages)
    assert counted["lookups"] == stages and counted["located_blocks"] and not counted["get_blocks"]


def test_a_rank_on_another_host_asks_where_the_blocks_lie(
    fleet: Any, shared_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "own_clock", lambda: "another host's")
    assert metadata.own_clock() != transfer.own_clock()
    assert _load(fleet, shared_server, "deepseek")["get_blocks"] == 12
