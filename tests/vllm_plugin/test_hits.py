"""A hit has what every KV-cache group needs, and ends before the last token.

Each scenario passes, and fails where a bug that KV connectors are known for is put back in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import ANY, patch

import pytest
from vllm.v1.core.sched.output import KVConnectorBlockState

from kvpool.protocol.types import BlockRun
from tests.support.toy.fixtures import BLOCK_TOKENS
from tests.support.toy.fleet import assert_nothing_is_left
from tests.support.toy.model import answer
from tests.support.toy.shapes import SHAPES
from tests.support.vllm_objects import tokens
from tests.vllm_plugin.bugs import WRONG_KV, FreshFleet, assert_caught, replaced
from vllm_plugin.connector import KVPoolConnector
from vllm_plugin.metadata import GroupBlocks
from vllm_plugin.model.groups import Geometry
from vllm_plugin.model.kinds import Found, Kind, SlidingWindow
from vllm_plugin.scheduler import admission
from vllm_plugin.scheduler.loads import Loads
from vllm_plugin.scheduler.scheduler import KVPoolScheduler
from vllm_plugin.scheduler.stores import Stores, TrackedRequest


@pytest.mark.parametrize("shape", ["qwen3-next", "states alone"])
def test_a_mamba_state_is_not_named_by_its_position(shape: str, fresh_fleet: FreshFleet) -> None:
    prompt = tokens(200)
    shorter = [*prompt[:90], *tokens(40, "other")]

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        first = fleet.start(specs=SHAPES[shape])
        first.generate(prompt)
        assert_nothing_is_left(first)
        second = fleet.start(specs=SHAPES[shape])
        assert second.generate(shorter, prompt) == [answer(shorter, 8), answer(prompt, 8)]
        assert second.cached_tokens == {"prompt-0": 0, "prompt-1": 192}, (first.stats.data, second.stats.data)

    store_job = Stores._store_job

    def by_position(
        self: Stores, tracked: TrackedRequest, num_tokens: int, state: KVConnectorBlockState, budget: int
    ) -> Any:
        request_id = tracked.request.request_id
        tables = state.get_block_ids(request_id)
        assert tables is not None
        offers = [
            (member, block_id, (nth + 1) * BLOCK_TOKENS)
            for member, table in enumerate(tables)
            for nth, block_id in enumerate(table)
        ]
        self._jobs.hash_of = lambda _: ANY  # type: ignore[method-assign]
        positional = KVConnectorBlockState({request_id}, state.get_block_ids, {request_id: offers})  # type: ignore
        return store_job(self, tracked, num_tokens, positional, budget)

    assert_caught(scenario, replaced(Stores, "_store_job", by_position), WRONG_KV)


class Everything(Found):
    """Whatever is asked for is there."""

    def __init__(self) -> None:
        super().__init__(0, 0, 0)

    def has(self, start: int, stop: int) -> bool:
        return True


@pytest.mark.parametrize(("shape", "right"), [("gemma3", 0), ("qwen3-next", 0), ("llama4", 48)])
def test_a_hit_on_a_hybrid_model_needs_every_group(shape: str, right: int, fresh_fleet: FreshFleet) -> None:
    prompt = tokens(200)
    shorter = [*prompt[:90], *tokens(40, "other")]

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        fleet.start(specs=SHAPES[shape], num_blocks=128).generate(prompt)
        second = fleet.start(specs=SHAPES[shape], num_blocks=128)
        assert second.generate(shorter, prompt) == [answer(shorter, 8), answer(prompt, 8)]
        assert second.cached_tokens == {"prompt-0": right, "prompt-1": 192}

    @contextmanager
    def attention_only() -> Iterator[None]:
        longest, load_parts = admission.longest, Loads.parts

        def longest_of_attention(kinds: Sequence[Kind], found: Sequence[Found], *bounds: int) -> int:
            full = [pair for pair in zip(kinds, found, strict=True) if pair[0].needs_prefix]
            return longest([kind for kind, _ in full], [blocks for _, blocks in full], *bounds)

        def parts_of_attention(self: Any, request: Any, lookup: Any, *args: Any) -> list[GroupBlocks]:
            lookup.found = [Everything() for _ in lookup.found]
            parts = load_parts(self, request, lookup, *args) or []
            return [part for part in parts if self._geometry.groups[part.group_idx].kind.needs_prefix]

        with (
            patch.object(admission, "longest", longest_of_attention),
            patch.object(Loads, "parts", parts_of_attention),
        ):
            yield

    assert_caught(scenario, attention_only, WRONG_KV)


@pytest.mark.parametrize("shape", ["gemma3", "gpt-oss", "windows alone", "block sizes"])
def test_a_window_is_loaded_whole(shape: str, fresh_fleet: FreshFleet) -> None:
    prompt = tokens(200)
    specs = SHAPES[shape]

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        fleet.start(specs=specs).generate(prompt)
        second = fleet.start(specs=specs)
        assert second.generate(prompt) == [answer(prompt, 8)]
        assert second.cached_tokens["prompt-0"] == 192

    @contextmanager
    def short_windows() -> Iterator[None]:
        first, load_parts = SlidingWindow.first, Loads.parts

        def too_late(self: SlidingWindow, boundary: int) -> int:
            return first(self, boundary) + 1

        def from_the_rule(
            self: Any, request: Any, lookup: Any, tables: Any, start: int, stop: int
        ) -> list[GroupBlocks]:
            lookup.found = [Everything() for _ in lookup.found]
            parts: list[GroupBlocks] = load_parts(self, request, lookup, tables, start, stop) or []
            for part in parts:
                skip = max(0, self._geometry.groups[part.group_idx].kind.first(stop) - part.firsts[0])
                (run,) = part.runs
                part.runs = [BlockRun(run.group_idx, run.block_hashes[skip:], run.block_hashes[skip - 1])]
                part.block_ids = [row[skip:] for row in part.block_ids]
                part.leased = ()
            return parts

        with patch.object(SlidingWindow, "first", too_late), patch.object(Loads, "parts", from_the_rule):
            yield

    assert_caught(scenario, short_windows, WRONG_KV)


@pytest.mark.parametrize(("shape", "right"), [("qwen3-next", 80), ("states alone", 80)])
def test_a_hit_leaves_the_last_token_to_compute(shape: str, right: int, fresh_fleet: FreshFleet) -> None:
    prompt = tokens(96)
    specs = SHAPES[shape]

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        fleet.start(specs=specs).generate(prompt, [*prompt, 3])
        second = fleet.start(specs=specs)
        assert second.generate(prompt) == [answer(prompt, 8)]
        assert second.cached_tokens["prompt-0"] == right

    hit_limit = Geometry.hit_limit

    def of_one_token_more(self: Geometry, num_tokens: int) -> int:
        return hit_limit(self, num_tokens + 1)

    assert_caught(scenario, replaced(Geometry, "hit_limit", of_one_token_more), WRONG_KV)


@pytest.mark.parametrize("cut", [16, 40])
def test_vllm_may_take_less_than_was_found(cut: int, fresh_fleet: FreshFleet) -> None:
    prompt = tokens(100)
    matched = KVPoolConnector.get_num_new_matched_tokens

    def cut_short(self: KVPoolConnector, *args: Any) -> tuple[int | None, bool]:
        count, is_async = matched(self, *args)
        return (count - cut if count else count), is_async

    def scenario(deadline_s: float) -> None:
        fleet = fresh_fleet()
        fleet.start().generate(prompt)
        engine = fleet.start()
        with patch.object(KVPoolConnector, "get_num_new_matched_tokens", cut_short):
            assert engine.generate(prompt) == [answer(prompt, 8)]
        assert engine.cached_tokens["prompt-0"] == 96 - cut
        assert engine.counted("loaded_blocks") == math.ceil((96 - cut) / 16)
        assert_nothing_is_left(engine)

    after_alloc = KVPoolScheduler.after_alloc

    def all_or_nothing(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        candidate = self.admission.candidates.get(request.request_id)
        found = candidate.boundary - candidate.asked if candidate is not None else 0
        assert num_external_tokens in (0, found), f"{num_external_tokens} of {found} tokens are taken"
        after_alloc(self, request, blocks, num_external_tokens)

    assert_caught(scenario, replaced(KVPoolScheduler, "after_alloc", all_or_nothing), "tokens are taken")
