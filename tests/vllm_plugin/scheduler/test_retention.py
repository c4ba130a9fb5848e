"""What is stored lets every request resume that should, and not much more is stored."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.effort import effort
from vllm_plugin.model.kinds import ChunkedLocal, Found, FullAttention, Kind, SlidingWindow, longest
from vllm_plugin.scheduler.stores import Retention

MAX_TOKENS = 640


@st.composite
def attention(draw: st.DrawFn, drafts: bool) -> Kind:
    size, proves = draw(st.sampled_from([16, 32, 48])), drafts and draw(st.booleans())
    kind: type[Kind] = draw(st.sampled_from([FullAttention, SlidingWindow, SlidingWindow, ChunkedLocal]))
    reach_tokens = {FullAttention: st.just(0), SlidingWindow: st.integers(0, 200), ChunkedLocal: st.integers(8, 200)}
    return kind(block_tokens=size, reach_tokens=draw(reach_tokens[kind]), proves=proves)


@st.composite
def requests(draw: st.DrawFn, drafts: bool) -> tuple[list[Kind], Retention, int, list[int]]:
    """Kinds, what one request keeps, how many tokens it has at its end, and where its steps end."""
    kinds = draw(st.lists(attention(drafts), min_size=1, max_size=3))
    alignment = math.lcm(*(kind.block_tokens for kind in kinds))
    prompt = draw(st.integers(1, MAX_TOKENS))
    interval = draw(st.integers(1, 5)) * alignment
    divergence = draw(st.integers(0, (prompt - 1) // alignment)) * alignment
    total = prompt + draw(st.integers(0, 150))
    cuts = draw(st.sets(st.integers(1, total), max_size=8))
    return kinds, Retention(prompt, alignment, interval, divergence), total, [*sorted(cuts - {total}), total]


def stored(kind: Kind, retention: Retention, steps: Sequence[int]) -> set[int]:
    """All blocks that a request's steps store."""
    kept: set[int] = set()
    start = 0
    for written in steps:
        stop = written // kind.block_tokens
        if stop > start:
            blocks = retention.blocks(kind, start, stop)
            assert blocks == sorted(set(blocks)) and set(blocks) <= set(range(start, stop))
            kept.update(blocks)
            start = stop
    return kept


def hit(kinds: Sequence[Kind], kept: Sequence[set[int]], alignment: int, limit: int, num_tokens: int) -> int:
    """The longest hit of a request that shares `num_tokens` tokens; only blocks of these have its names."""
    found = []
    for kind, blocks in zip(kinds, kept, strict=True):
        length = num_tokens // kind.block_tokens
        found.append(Found(0, sum(1 << block for block in blocks if block < length), length))
    return longest(kinds, found, 0, limit, alignment)


def reachable(kinds: Sequence[Kind], alignment: int, limit: int, num_tokens: int) -> int:
    """The longest boundary up to `limit` that all kinds allow a request with `num_tokens` tokens at all."""
    boundary = limit // alignment * alignment
    while boundary and any(kind.end(boundary) * kind.block_tokens > num_tokens for kind in kinds):
        boundary -= alignment
    return boundary


@settings(max_examples=effort(200))
@given(requests(drafts=False))
def test_whoever_should_resume_can(request_: tuple[list[Kind], Retention, int, list[int]]) -> None:
    kinds, retention, total, steps = request_
    kept = [stored(kind, retention, steps) for kind in kinds]
    prompt, alignment = retention.prompt_tokens, retention.alignment
    again = (prompt - 1) // alignment * alignment
    longer = prompt // alignment * alignment
    assert hit(kinds, kept, alignment, prompt - 1, prompt) == again
    assert hit(kinds, kept, alignment, prompt, prompt) == longer
    assert hit(kinds, kept, alignment, retention.divergence, prompt) == retention.divergence
    for boundary in range(retention.interval, total + 1, retention.interval):
        assert hit(kinds, kept, alignment, boundary, total) == boundary
    # The next turn of a conversation may end anywhere in what was decoded.
    for boundary in range(longer, total + 1, alignment):
        assert hit(kinds, kept, alignment, boundary, total) == boundary


@settings(max_examples=effort(200))
@given(requests(drafts=True))
def test_beside_a_draft_model_too(request_: tuple[list[Kind], Retention, int, list[int]]) -> None:
    kinds, retention, total, steps = request_
    kept = [stored(kind, retention, steps) for kind in kinds]
    prompt, alignment = retention.prompt_tokens, retention.alignment
    for limit, shared in ((prompt - 1, prompt), (prompt, prompt), (prompt, total), (total, total)):
        expected = reachable(kinds, alignment, limit, shared)
        assert hit(kinds, kept, alignment, limit, shared) == expected, (limit, shared)
    for boundary in [retention.divergence, *range(retention.interval, total + 1, retention.interval)]:
        if boundary == reachable(kinds, alignment, boundary, total):
            assert hit(kinds, kept, alignment, boundary, total) == boundary


@settings(max_examples=effort(100))
@given(requests(drafts=True))
def test_windows_are_sparse_however_a_prompt_is_cut_into_steps(
    request_: tuple[list[Kind], Retention, int, list[int]],
) -> None:
    kinds, retention, total, steps = request_
    for kind in kinds:
        kept = stored(kind, retention, steps)
        assert kept == stored(kind, retention, [total])
        if kind.needs_prefix:
            assert kept == set(range(total // kind.block_tokens))
            continue
        decoded = retention.prompt_tokens // retention.alignment * retention.alignment // kind.block_tokens
        in_prompt = sum(block < decoded for block in kept)
        # Multiples of the interval, and the ends.
        boundaries = retention.prompt_tokens // retention.interval + 2 + 5
        assert in_prompt <= boundaries * (-(-kind.reach_tokens // kind.block_tokens) + 1 + kind.proves)
