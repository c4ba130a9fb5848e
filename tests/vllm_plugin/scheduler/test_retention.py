"""What is stored lets every request resume that should, and not much more is stored."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.effort import effort
from vllm_plugin.model.hit_rules import Found, Reach, Rule, longest
from vllm_plugin.scheduler.retention import Retention

MAX_TOKENS = 640


@st.composite
def attention(draw: st.DrawFn, drafts: bool) -> Rule:
    size, proves = draw(st.sampled_from([16, 32, 48])), drafts and draw(st.booleans())
    match draw(st.sampled_from([Reach.ALL, Reach.WINDOW, Reach.WINDOW, Reach.CHUNK])):
        case Reach.ALL:
            return Rule(Reach.ALL, size, proves=proves)
        case Reach.WINDOW:
            return Rule(Reach.WINDOW, size, draw(st.integers(0, 200)), proves)
        case _:
            return Rule(Reach.CHUNK, size, draw(st.integers(8, 200)), proves)


@st.composite
def requests(draw: st.DrawFn, drafts: bool) -> tuple[list[Rule], Retention, int, list[int]]:
    """Rules, what one request keeps, how many tokens it has at its end, and where its steps end."""
    rules = draw(st.lists(attention(drafts), min_size=1, max_size=3))
    alignment = math.lcm(*(rule.block_tokens for rule in rules))
    prompt = draw(st.integers(1, MAX_TOKENS))
    interval = draw(st.integers(1, 5)) * alignment
    divergence = draw(st.integers(0, (prompt - 1) // alignment)) * alignment
    total = prompt + draw(st.integers(0, 150))
    cuts = draw(st.sets(st.integers(1, total), max_size=8))
    return rules, Retention(prompt, alignment, interval, divergence), total, [*sorted(cuts - {total}), total]


def stored(rule: Rule, retention: Retention, steps: Sequence[int]) -> set[int]:
    """All blocks that a request's steps store."""
    kept: set[int] = set()
    start = 0
    for written in steps:
        stop = written // rule.block_tokens
        if stop > start:
            blocks = retention.blocks(rule, start, stop)
            assert blocks == sorted(set(blocks)) and set(blocks) <= set(range(start, stop))
            kept.update(blocks)
            start = stop
    return kept


def hit(rules: Sequence[Rule], kept: Sequence[set[int]], alignment: int, limit: int, num_tokens: int) -> int:
    """The longest hit of a request that shares `num_tokens` tokens; only blocks of these have its names."""
    found = []
    for rule, blocks in zip(rules, kept, strict=True):
        length = num_tokens // rule.block_tokens
        found.append(Found(0, sum(1 << block for block in blocks if block < length), length))
    return longest(rules, found, 0, limit, alignment)


def reachable(rules: Sequence[Rule], alignment: int, limit: int, num_tokens: int) -> int:
    """The longest boundary up to `limit` that all rules allow a request with `num_tokens` tokens at all."""
    boundary = limit // alignment * alignment
    while boundary and any(rule.end(boundary) * rule.block_tokens > num_tokens for rule in rules):
        boundary -= alignment
    return boundary


@settings(max_examples=effort(200))
@given(requests(drafts=False), st.data())
def test_whoever_should_resume_can(request_: tuple[list[Rule], Retention, int, list[int]], data: st.DataObject) -> None:
    rules, retention, total, steps = request_
    kept = [stored(rule, retention, steps) for rule in rules]
    prompt, alignment = retention.prompt_tokens, retention.alignment
    again = (prompt - 1) // alignment * alignment
    longer = prompt // alignment * alignment
    assert hit(rules, kept, alignment, prompt - 1, prompt) == again
    assert hit(rules, kept, alignment, prompt, prompt) == longer
    assert hit(rules, kept, alignment, retention.divergence, prompt) == retention.divergence
    for boundary in range(retention.interval, total + 1, retention.interval):
        assert hit(rules, kept, alignment, boundary, total) == boundary
    # The next turn of a conversation may end anywhere in what was decoded.
    for boundary in range(longer, total + 1, alignment):
        assert hit(rules, kept, alignment, boundary, total) == boundary


@settings(max_examples=effort(200))
@given(requests(drafts=True))
def test_beside_a_draft_model_too(request_: tuple[list[Rule], Retention, int, list[int]]) -> None:
    rules, retention, total, steps = request_
    kept = [stored(rule, retention, steps) for rule in rules]
    prompt, alignment = retention.prompt_tokens, retention.alignment
    for limit, shared in ((prompt - 1, prompt), (prompt, prompt), (prompt, total), (total, total)):
        expected = reachable(rules, alignment, limit, shared)
        assert hit(rules, kept, alignment, limit, shared) == expected, (limit, shared)
    for boundary in [retention.divergence, *range(retention.interval, total + 1, retention.interval)]:
        if boundary == reachable(rules, alignment, boundary, total):
            assert hit(rules, kept, alignment, boundary, total) == boundary


@settings(max_examples=effort(100))
@given(requests(drafts=True))
def test_how_a_prompt_is_cut_into_steps_does_not_matter(
    request_: tuple[list[Rule], Retention, int, list[int]],
) -> None:
    rules, retention, total, steps = request_
    for rule in rules:
        assert stored(rule, retention, steps) == stored(rule, retention, [total])


@settings(max_examples=effort(100))
@given(requests(drafts=True))
def test_windows_are_sparse(request_: tuple[list[Rule], Retention, int, list[int]]) -> None:
    rules, retention, total, steps = request_
    for rule in rules:
        kept = stored(rule, retention, steps)
        if rule.reach is Reach.ALL:
            assert kept == set(range(total // rule.block_tokens))
            continue
        decoded = retention.prompt_tokens // retention.alignment * retention.alignment // rule.block_tokens
        in_prompt = sum(block < decoded for block in kept)
        # Multiples of the interval, and the ends.
        boundaries = retention.prompt_tokens // retention.interval + 2 + 5
        assert in_prompt <= boundaries * (-(-rule.reach_tokens // rule.block_tokens) + 1 + rule.proves)


def test_a_long_prompt_stores_a_small_part_of_its_windows() -> None:
    rule = Rule(Reach.WINDOW, 16, 511)
    kept = stored(rule, Retention(65_536 + 7, 16, 4096), [*range(2048, 65_536, 2048), 65_543])
    assert len(kept) == 16 * 32 + 1, (
        "the window before each of sixteen boundaries, and before one block less than the last"
    )


@pytest.mark.parametrize("interval", [16, 48])
def test_an_interval_shorter_than_a_window_stores_all(interval: int) -> None:
    kept = stored(Rule(Reach.WINDOW, 16, 60), Retention(480, 16, interval), [480])
    assert kept == set(range(30))
