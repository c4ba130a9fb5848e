"""Which requests are looked up before vLLM asks about them, and from which token on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.processes import wait_for
from tests.support.toy.fixtures import BLOCK_TOKENS
from tests.support.vllm_objects import make_request, tokens
from tests.vllm_plugin.core import Core, blocks, fill
from vllm_plugin.scheduler import admission


@pytest.fixture
def asked_for(alone: Core, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(request, tokens that the engine has) of each lookup that is sent."""
    sent = []
    send = alone.side.lookups.send

    def note_and_send(request: Any, local: int, limit: int) -> Any:
        sent.append((request.request_id, local))
        return send(request, local, limit)

    monkeypatch.setattr(alone.side.lookups, "send", note_and_send)
    return sent


def cache(core: Core, request: Any, count: int) -> None:
    """The engine has computed the first blocks of a prompt before."""
    computed = core.pool.get_new_blocks(count)
    core.pool.cache_full_blocks(request, computed, 0, count, BLOCK_TOKENS, 0)
    core.pool.free_blocks(computed)


def test_the_answer_is_there_when_vllm_asks_first(alone: Core, asked_for: list[tuple[str, int]]) -> None:
    request = make_request("r", tokens(100))
    fill(alone, request.block_hashes[:3])
    alone.side.arrived(request)
    wait_for(lambda: alone.side.admission.candidates["r"].lookup.calls[0].done(), "the answer")
    assert alone.side.matched_tokens(request, 0) == (blocks(3), True)
    assert asked_for == [("r", 0)]
    alone.finish(request)
    assert not any(alone.side.held().values())


def test_what_the_engine_has_itself_is_not_looked_up(alone: Core, asked_for: list[tuple[str, int]]) -> None:
    part, whole = make_request("part", tokens(100)), make_request("whole", tokens(100, 1))
    cache(alone, part, 4)
    cache(alone, whole, 6)  # All but the last token's block, which is not full.
    for request in (part, whole):
        alone.side.arrived(request)
    alone.step()
    assert asked_for == [("part", blocks(4))]
    for request in (part, whole):
        alone.finish(request)


def test_a_request_is_looked_up_again_if_the_engine_has_less_than_was_thought(
    alone: Core, asked_for: list[tuple[str, int]]
) -> None:
    request = make_request("r", tokens(100))
    fill(alone, request.block_hashes)
    cache(alone, request, 4)
    alone.side.arrived(request)
    assert alone.pool.reset_prefix_cache()
    assert alone.ask(request, blocks(1)) == blocks(5)
    assert asked_for == [("r", blocks(4)), ("r", blocks(1))]
    alone.finish(request)


@pytest.mark.usefixtures("answered_at_once")
def test_few_hold_leases_while_many_wait(
    alone: Core, asked_for: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_STEPS_AHEAD", 2 * blocks(6) / alone.side.geometry.step_tokens)
    traced: list[str] = []
    spans = SimpleNamespace(asked=lambda request: traced.append(request.request_id))
    monkeypatch.setattr(alone.side.admission, "_spans", spans)
    requests = [make_request(name, tokens(100, ord(name))) for name in "abcd"]
    for request in requests:
        alone.side.arrived(request)
    alone.step()
    assert [name for name, _ in asked_for] == traced == ["a", "b"]
    alone.finish(requests[2])
    assert alone.side.matched_tokens(requests[0], 0) == (0, False)
    alone.allocate(requests[0], 0)
    alone.step((requests[0], 100))
    assert [name for name, _ in asked_for] == ["a", "b", "d"], "c has ended"
    for request in (requests[0], requests[1], requests[3]):
        alone.finish(request)
    assert not alone.side.admission.candidates


def test_one_that_must_not_read_is_not_looked_up(alone: Core, asked_for: list[tuple[str, int]]) -> None:
    request = make_request("r", tokens(100))
    request.skip_reading_prefix_cache = True
    alone.side.arrived(request)
    alone.step()
    assert asked_for == []
    alone.finish(request)
