"""The longest hit, against every token that attention reads, and against vLLM's own search."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from tests.support.effort import effort
from tests.support.toy.fixtures import MakeConfig
from tests.support.vllm_objects import full_attention
from tests.vllm_plugin.kinds import chunked, kv_cache, state, window
from vllm_plugin.model.groups import PoolGroup, alignment_tokens, make_groups
from vllm_plugin.model.kinds import Found, longest

HASH_TOKENS = 16
MAX_TOKENS = 420

Present = Sequence[set[int]]
"""Of each of the engine's groups, the indices of the blocks that are there."""


# Found


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 9), st.data())
def test_found_answers_for_every_stretch(bits: list[bool], first: int, data: st.DataObject) -> None:
    found = Found(first, sum(1 << idx for idx, bit in enumerate(bits) if bit), len(bits))
    leading = next((idx for idx, bit in enumerate(bits) if not bit), len(bits))
    assert found.leading == first + leading
    start = data.draw(st.integers(first, first + len(bits) + 2))
    stop = data.draw(st.integers(first, first + len(bits) + 2))
    wanted = range(start - first, stop - first)
    assert found.has(start, stop) == all(idx < len(bits) and bits[idx] for idx in wanted)


# The longest


@st.composite
def caches(draw: st.DrawFn, whole_chunks: bool) -> tuple[KVCacheConfig, bool]:
    """A KV cache as vLLM allows it, and whether a draft model is there."""
    # vLLM asserts that chunked local attention has one block size and no draft model beside it.
    with_chunks = draw(st.booleans())
    sizes = st.just(draw(st.sampled_from([16, 32]))) if with_chunks else st.sampled_from([16, 32, 48])
    kinds = ["full", "window", "state", *(["chunk"] if with_chunks else [])]
    specs: list[KVCacheSpec] = []
    drawn = draw(st.lists(sizes, min_size=1, max_size=4))
    for size in drawn:
        match draw(st.sampled_from(kinds)):
            case "full":
                specs.append(full_attention(draw(st.sampled_from([2, 4])), block_size=size))
            case "window":
                specs.append(window(draw(st.integers(1, 200)), block_size=size))
            case "state":
                specs.append(state(block_size=min(drawn)))  # Larger ones are refused.
            case "chunk":
                length = draw(st.integers(1, 9)) * size if whole_chunks else draw(st.integers(8, 150))
                specs.append(chunked(length, block_size=size))
    drafts = draw(st.booleans()) and not with_chunks
    eagle = draw(st.sets(st.integers(0, len(specs) - 1))) if drafts else set()
    # vLLM flags groups of one spec as one.
    eagle |= {idx for idx, other in itertools.product(range(len(specs)), eagle) if specs[idx] == specs[other]}
    return kv_cache(*specs, eagle=eagle), drafts


@st.composite
def lookups(draw: st.DrawFn, whole_chunks: bool = False) -> tuple[KVCacheConfig, bool, int, int, list[set[int]]]:
    """A KV cache with a prompt's length, the engine's own hit, and what the pool has of each group."""
    cache, drafts = draw(caches(whole_chunks))
    num_tokens = draw(st.integers(1, MAX_TOKENS))
    alignment = alignment_tokens(cache)
    local = draw(st.integers(0, (num_tokens - 1) // alignment)) * alignment if draw(st.booleans()) else 0
    present = []
    for group in cache.kv_cache_groups:
        count = num_tokens // HASH_TOKENS * HASH_TOKENS // group.kv_cache_spec.block_size
        holes = draw(st.sets(st.integers(0, max(0, count - 1)), max_size=draw(st.sampled_from([0, 1, 3, 30]))))
        present.append(set(range(count)) - holes)
    return cache, drafts, num_tokens, local, present


def reads(spec: KVCacheSpec, boundary: int) -> range:
    """Tokens before a boundary that the computation of the next token reads; of a state, the last."""
    if (sliding_window := getattr(spec, "sliding_window", None)) is not None:
        return range(max(0, boundary - sliding_window + 1), boundary)
    if (chunk := getattr(spec, "attention_chunk_size", None)) is not None:
        return range(boundary - boundary % chunk, boundary)
    return range(boundary - 1, boundary) if hasattr(spec, "shapes") else range(boundary)


def is_valid(cache: KVCacheConfig, drafting: set[int], present: Present, local: int, boundary: int) -> bool:
    """Whether all is there that is read, token by token."""
    for idx, (group, blocks) in enumerate(zip(cache.kv_cache_groups, present, strict=True)):
        spec = group.kv_cache_spec
        needed = {token // spec.block_size for token in reads(spec, boundary) if token >= local}
        if idx in drafting and not hasattr(spec, "shapes"):
            needed.add(boundary // spec.block_size)
        if not needed <= blocks:
            return False
    return True


def vllms(cache: KVCacheConfig, drafts: bool, present: Present, num_tokens: int) -> tuple[int, set[int]]:
    """vLLM's own hit, and the groups that it drops a block of."""
    unit = math.gcd(*(group.kv_cache_spec.block_size for group in cache.kv_cache_groups))
    coordinator = get_kv_cache_coordinator(
        cache,
        max_model_len=1024,
        max_in_flight_tokens=1024,
        use_eagle=drafts,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=alignment_tokens(cache),
        hash_block_size=unit,
        allow_partial_hash_hits=False,
    )
    hashes: Any = [idx.to_bytes(4, "big") for idx in range(num_tokens // unit)]
    held = {
        (idx, hashes[(block + 1) * group.kv_cache_spec.block_size // unit - 1])
        for idx, (group, blocks) in enumerate(zip(cache.kv_cache_groups, present, strict=True))
        for block in blocks
    }
    pool: Any = HeldBlocks(unit, held)
    coordinator.block_pool = pool
    for manager in coordinator.single_type_managers:
        manager.block_pool = pool
    return coordinator.find_longest_cache_hit(hashes, num_tokens - 1)[1], coordinator.eagle_group_ids


class HeldBlocks(BlockPool):
    """A block pool that has what it is told."""

    def __init__(self, hash_block_size: int, held: set[tuple[int, bytes]]):
        self.hash_block_size = hash_block_size
        self.null_block = KVCacheBlock(0)
        self._held = held

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: Any) -> Any:
        if all((idx, block_hash) in self._held for idx in kv_cache_group_ids):
            return [KVCacheBlock(1)] * len(kv_cache_group_ids)
        return None


def found_of(groups: Sequence[PoolGroup], present: Present, local: int, num_tokens: int) -> list[Found]:
    """What the pool answers: a block of a group is there if each of its members has it."""
    found = []
    for group in groups:
        first = local // group.kind.block_tokens
        length = num_tokens // group.kind.block_tokens - first
        held = set.intersection(*(present[member] for member in group.members))
        found.append(Found(first, sum(1 << (block - first) for block in held if block >= first), length))
    return found


@pytest.fixture(scope="module")
def groups_of(vllm_config: MakeConfig) -> Any:
    """Makes the pool's groups of a KV cache, with or without a draft model."""
    config = vllm_config()

    def make(cache: KVCacheConfig, drafts: bool) -> list[PoolGroup]:
        config.speculative_config = SimpleNamespace(use_eagle_block_drop=lambda: True) if drafts else None
        return make_groups(config, cache)

    return make


@settings(max_examples=effort(200))
@given(lookups())
def test_the_longest_is_the_longest_of_all_that_can_be_resumed(groups_of: Any, lookup: Any) -> None:
    cache, drafts, num_tokens, local, present = lookup
    groups = groups_of(cache, drafts)
    kinds, found = [group.kind for group in groups], found_of(groups, present, local, num_tokens)
    drafting = {member for group in groups if group.kind.proves for member in group.members}
    alignment = alignment_tokens(cache)
    boundaries = range(local + alignment, num_tokens, alignment)
    valid = [boundary for boundary in boundaries if is_valid(cache, drafting, present, local, boundary)]
    assert [each for each in boundaries if longest(kinds, found, local, each, alignment) == each] == valid
    assert longest(kinds, found, local, num_tokens - 1, alignment) == max(valid, default=local)


@settings(max_examples=effort(200))
@given(lookups(whole_chunks=True))  # Where a chunk begins inside a block, vLLM's hit may lack what precedes it.
def test_no_hit_is_shorter_than_vllms(groups_of: Any, lookup: Any) -> None:
    cache, drafts, num_tokens, local, present = lookup
    groups = groups_of(cache, drafts)
    for group in groups:
        # What the engine has itself it has of every group, and what the pool has of a group it has of every member.
        held = present[group.members[0]] | set(range(local // group.kind.block_tokens))
        for member in group.members:
            present[member] = held
    theirs, drafting = vllms(cache, drafts, present, num_tokens)
    found = found_of(groups, present, 0, num_tokens)
    ours = longest([group.kind for group in groups], found, 0, num_tokens - 1, alignment_tokens(cache))
    if ours == theirs:
        return
    assert ours > theirs
    # vLLM's search stops early in some cases: a window of one token needs no block, and it asks for one; beside a draft
    # model it leaves out the prompt's last block as a proof (one group), and boundaries where a block of a larger size
    # would have to be dropped (several sizes).
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    assert drafting or any(getattr(spec, "sliding_window", None) == 1 for spec in specs)
    assert is_valid(cache, drafting, present, 0, ours)
