from __future__ import annotations

import itertools
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ECTransferConfig, MultiModalConfig
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, SlidingWindowMLASpec

from kvpool.protocol.errors import ConfigError, InvalidRequestError
from kvpool.protocol.namespace import GroupSpec
from kvpool.report.bandwidth import shards_of_rank
from tests.support.toy.fixtures import MakeConfig
from tests.support.vllm_objects import LAYERS, cache_config, full_attention, of_rank
from tests.vllm_plugin.kinds import chunked, kv_cache, mla, state, uniform, window
from vllm_plugin.config import ConnectorConfig
from vllm_plugin.model.groups import (
    PoolGroup,
    alignment_tokens,
    check_supported,
    group_spec,
    hash_tokens,
    make_groups,
    rank_shards,
    scheduler_knows,
)
from vllm_plugin.model.identity import namespace_spec
from vllm_plugin.model.kinds import ChunkedLocal, FullAttention, Kind, MambaState, SlidingWindow

SIZES = (1, 2, 4, 8)


def model(heads: int, **settings: Any) -> Any:
    config = SimpleNamespace(to_dict=lambda: {"num_key_value_heads": heads, **settings}, **settings)
    return SimpleNamespace(
        model="some/model", get_total_num_kv_heads=lambda: heads, hf_text_config=config, multimodal_config=None
    )


def engine(
    heads: int = 4,
    tp_size: int = 1,
    pp_size: int = 1,
    drafts: bool = False,
    settings: dict[str, Any] | None = None,
    draft_model_config: Any = None,
    **parallel: Any,
) -> Any:
    """What groups depend on of a configuration."""
    defaults = {"distributed_executor_backend": "mp"}
    drafting = {"use_eagle_block_drop": lambda: True, "draft_model_config": draft_model_config}
    return SimpleNamespace(
        model_config=model(heads, **(settings or {})),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size, **{**defaults, **parallel}
        ),
        cache_config=SimpleNamespace(calculate_kv_scales=False, enable_prefix_caching=True),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
        speculative_config=SimpleNamespace(**drafting) if drafts else None,
    )


def specs_of(config: Any, cache: KVCacheConfig, num_shards: int = 0) -> list[GroupSpec]:
    return [group_spec(group, config, cache, num_shards) for group in make_groups(config, cache)]


def group_of(total_kv_heads: int, tp_size: int, num_shards: int = 0, **fields: Any) -> GroupSpec:
    """One group of full attention."""
    cache = cache_config(full_attention(max(1, total_kv_heads // tp_size), **fields))
    (spec,) = specs_of(engine(total_kv_heads, tp_size), cache, num_shards)
    return spec


def written(group: GroupSpec, tp_size: int) -> Counter[int]:
    """How often each shard is written."""
    mine = [rank_shards(group, rank, tp_size) for rank in range(tp_size)]
    return Counter(
        shard for one in mine if one.writes for shard in range(one.shards.start, one.shards.start + one.shards.count)
    )


# What is served


@pytest.mark.parametrize(
    ("spec", "name", "kind", "window_tokens"),
    [
        (full_attention(), "full_attention", FullAttention(block_tokens=16), 0),
        # Without a hybrid allocator.
        (full_attention(sliding_window=64), "full_attention", FullAttention(block_tokens=16), 0),
        (full_attention(block_size=32), "full_attention", FullAttention(block_tokens=32), 0),
        (mla(), "mla_attention", FullAttention(block_tokens=16), 0),
        (window(64), "sliding_window", SlidingWindow(block_tokens=16, reach_tokens=63), 64),
        (window(64, extra_retained_tokens=3), "sliding_window", SlidingWindow(block_tokens=16, reach_tokens=66), 64),
        (chunked(96), "chunked_local_attention", ChunkedLocal(block_tokens=16, reach_tokens=96), 0),
        (state(), "mamba", MambaState(block_tokens=16), 0),
    ],
)
def test_each_kind_has_its_rule(spec: KVCacheSpec, name: str, kind: Kind, window_tokens: int) -> None:
    (group,) = make_groups(engine(), kv_cache(spec))
    assert group == PoolGroup(
        replace(kind, name=name, window_tokens=window_tokens, is_replicated=name == "mla_attention"), (0,)
    )


def test_groups_that_follow_one_rule_are_one() -> None:
    cache = kv_cache(window(64), full_attention(), window(64, num_kv_heads=8), window(32), state(), window(64), state())
    groups = make_groups(engine(), cache)
    assert [(group.kind.name, group.members) for group in groups] == [
        ("sliding_window", (0, 2, 5)),
        ("full_attention", (1,)),
        ("sliding_window", (3,)),
        ("mamba", (4, 6)),
    ]
    spec = specs_of(engine(), cache)[0]
    assert spec.layer_names == ("0.0", "0.1", "2.0", "2.1", "5.0", "5.1")
    assert spec.slot_bytes == sum(2 * cache.kv_cache_groups[idx].kv_cache_spec.page_size_bytes for idx in (0, 2, 5))


@pytest.mark.parametrize("other", [window(64, block_size=32), window(63), window(64, max_tp_shards=1), chunked(64)])
def test_groups_of_other_rules_are_apart(other: KVCacheSpec) -> None:
    assert [group.members for group in make_groups(engine(), kv_cache(window(64), other))] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("drafts", "flagged", "proving"),
    [(False, {0}, set()), (True, {0}, {0}), (True, {2}, {1, 2}), (True, set(), {0, 1, 2})],
)
def test_a_draft_models_groups_prove_one_block_more(drafts: bool, flagged: set[int], proving: set[int]) -> None:
    cache = kv_cache(full_attention(), window(64), window(64), state(), eagle=flagged)
    groups = make_groups(engine(drafts=drafts), cache)
    assert {member for group in groups if group.kind.proves for member in group.members} == proving


def test_boundaries_are_whole_blocks_and_hashes_are_their_common_part(vllm_config: MakeConfig) -> None:
    cache = kv_cache(full_attention(block_size=32), window(block_size=48))
    assert (alignment_tokens(cache), hash_tokens(vllm_config(), cache)) == (96, 16)
    assert hash_tokens(vllm_config(), replace(cache, hash_block_size=8)) == 8, "what the engine core has settled counts"


# What is refused


class NewSpec(type(full_attention())):  # type: ignore[misc]
    """Of a kind that a later vLLM may add."""


SCRATCH = SlidingWindowMLASpec(**vars(window(64)) | {"head_size_v": 0, "bounded_replay": True})


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([full_attention(), state(mode="none")], r"1 \(MambaSpec, .*'none'; start vLLM .*--mamba-cache-mode align"),
        ([full_attention(), state(mode="all")], r"1 \(MambaSpec, 2 layers\) .*'all'; start .*--mamba-cache-mode align"),
        ([full_attention(non_causal=True)], r"0 \(FullAttentionSpec, 2 layers\) looks ahead .*serve it without kvpool"),
        ([SCRATCH], r"0 \(SlidingWindowMLASpec, 2 layers\) is scratch memory"),
        # vLLM ends chunks at multiples of the smallest block: inside these states' blocks.
        ([full_attention(), state(block_size=48)], r"1 \(MambaSpec, 2 layers\) keeps states in blocks of 48"),
        ([NewSpec(**vars(full_attention()))], r"0 \(NewSpec, 2 layers\) is of a kind that it does not know"),
        # One layer of a mixed group is enough.
        ([uniform(a=full_attention(), b=full_attention(8, non_causal=True))], r"0 \(FullAttentionSpec, .* looks ahead"),
    ],
)
def test_a_group_that_cannot_be_shared_is_refused_by_number_kind_and_fix(
    specs: list[KVCacheSpec], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"does not serve some/model: its KV-cache group {message}"):
        check_supported(engine(), kv_cache(*specs))
    with pytest.raises(ConfigError, match="some/model has no KV cache, so there is nothing to share"):
        check_supported(engine(), kv_cache())


NO_PREFIXES: dict[str, Any] = {"cache_config.enable_prefix_caching": False}


def images(processor_cache_gb: float) -> dict[str, Any]:
    """With both caches off vLLM's renderer does not look at an image's content."""
    return {"model_config.multimodal_config": MultiModalConfig(mm_processor_cache_gb=processor_cache_gb)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel_config.decode_context_parallel_size": 2}, "decode_context_parallel_size = 2; set it to 1"),
        ({"parallel_config.prefill_context_parallel_size": 2}, "prefill_context_parallel_size = 2; set it to 1"),
        ({"parallel_config.distributed_executor_backend": "external_launcher"}, "one for each: use 'mp' or 'ray'"),
        ({"parallel_config.enable_fault_tolerance": True}, "serve without --enable-fault-tolerance"),
        ({"cache_config.calculate_kv_scales": True}, "calculate_kv_scales"),
        (NO_PREFIXES | {"scheduler_config.enable_chunked_prefill": False}, "neither prefix caching nor chunked"),
        # Who encodes images may have other weights.
        ({"ec_transfer_config": ECTransferConfig(ec_connector="C", ec_role="ec_both")}, "set ec_role = 'ec_producer'"),
        ({"ec_transfer_config": ECTransferConfig(ec_connector="C", ec_role="ec_consumer")}, "set ec_role = 'ec_prod"),
        ({"ec_transfer_config": ECTransferConfig(ec_connector="C", ec_role="ec_producer")}, ""),
        (NO_PREFIXES | images(0), "names images by a counter"),
        (images(0), ""),
        (NO_PREFIXES | images(4), ""),
    ],
)
def test_settings_that_are_not_served_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    config = engine()
    for place, value in changes.items():
        *sections, name = place.split(".")
        setattr(reduce(getattr, sections, config), name, value)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_supported(config, cache_config())


# Shards


@pytest.mark.parametrize("total_kv_heads", SIZES)
def test_every_parallel_size_names_one_group_of_which_a_rank_has_its_part(total_kv_heads: int) -> None:
    for tp_size in SIZES:
        group = group_of(total_kv_heads, tp_size)
        assert group == group_of(total_kv_heads, 1)
        spec = of_rank(cache_config(full_attention(total_kv_heads)), tp_size).kv_cache_groups[0].kv_cache_spec
        count = rank_shards(group, 0, tp_size).shards.count
        assert count * group.chunk_bytes == len(LAYERS) * spec.page_size_bytes


@pytest.mark.parametrize(("total_kv_heads", "expected"), [(1, 1), (6, 2), (8, 8), (16, 16), (32, 16), (24, 8)])
def test_by_default_a_shard_is_a_head_up_to_sixteen_shards(total_kv_heads: int, expected: int) -> None:
    assert group_of(total_kv_heads, 1).num_shards == expected


@pytest.mark.parametrize(
    ("total_kv_heads", "tp_size", "num_shards", "starts"), [(8, 2, 2, [0, 1]), (6, 3, 6, [0, 2, 4])]
)
def test_a_shard_may_hold_several_heads(total_kv_heads: int, tp_size: int, num_shards: int, starts: list[int]) -> None:
    group = group_of(total_kv_heads, tp_size, num_shards)
    assert group.chunk_bytes == total_kv_heads // num_shards * group_of(8, 1).chunk_bytes
    assert [rank_shards(group, rank, tp_size).shards.start for rank in range(tp_size)] == starts


@pytest.mark.parametrize(
    ("total_kv_heads", "tp_size", "num_shards", "message"),
    [
        (8, 1, 3, "num_shards = 3 does not divide the 8 KV heads of a KV-cache group"),
        (8, 8, 4, "set kv_connector_extra_config num_shards to 8 on every engine"),
        (6, 3, 2, "set kv_connector_extra_config num_shards to 6 on every engine"),
        (32, 32, 0, "set kv_connector_extra_config num_shards to 32 on every engine"),
    ],
)
def test_shards_that_cannot_be_dealt_out_are_refused_with_a_number_that_can(
    total_kv_heads: int, tp_size: int, num_shards: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        group_of(total_kv_heads, tp_size, num_shards)


@pytest.mark.parametrize("tp_size", SIZES)
@pytest.mark.parametrize("spec", [mla(), window(64, 1, max_tp_shards=1), state(24, tp_replicated=True)])
def test_what_every_rank_has_is_one_shard_that_one_rank_writes(spec: KVCacheSpec, tp_size: int) -> None:
    (group,) = specs_of(engine(8, tp_size), kv_cache(spec))
    assert (group.num_kv_heads, group.num_shards) == (1, 1)
    assert group.chunk_bytes == 2 * spec.page_size_bytes
    mine = [rank_shards(group, rank, tp_size) for rank in range(tp_size)]
    assert {(one.shards.start, one.shards.count) for one in mine} == {(0, 1)}
    assert [one.writes for one in mine] == [rank == 0 for rank in range(tp_size)]


@pytest.mark.parametrize("tp_size", SIZES)
@pytest.mark.parametrize("spec", [state(24), state(24, page_size_padded=128), full_attention(4, num_head_slots=2)])
def test_what_cannot_be_cut_by_heads_is_an_opaque_shard_a_rank(spec: Any, tp_size: int) -> None:
    (group,) = specs_of(engine(4 * tp_size, tp_size), kv_cache(spec))
    assert (group.num_kv_heads, group.num_shards) == (0, tp_size)
    content = 96 if hasattr(spec, "shapes") else spec.page_size_bytes
    assert group.chunk_bytes == 2 * content, "padding is nobody's"
    assert [rank_shards(group, rank, tp_size).shards.start for rank in range(tp_size)] == list(range(tp_size))
    assert written(group, tp_size) == Counter(range(tp_size))


def mixed_heads(tp_size: int, *heads: int) -> KVCacheConfig:
    """Layers with several head counts in one group, as a rank has them."""
    layers = {f"layer.{nth}": full_attention(max(1, count // tp_size)) for nth, count in enumerate(heads)}
    return kv_cache(uniform(**layers))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_layers_with_other_heads_share_shards_as_far_as_their_heads_do(tp_size: int) -> None:
    (group,) = specs_of(engine(8, tp_size), mixed_heads(tp_size, 8, 4, 12))
    assert (group.num_kv_heads, group.num_shards) == (4, 4)
    head_bytes = full_attention(1).page_size_bytes
    assert group.chunk_bytes == (2 + 1 + 3) * head_bytes
    assert group == specs_of(engine(8, 1), mixed_heads(1, 8, 4, 12))[0]
    count = rank_shards(group, 0, tp_size).shards.count
    spec = mixed_heads(tp_size, 8, 4, 12).kv_cache_groups[0].kv_cache_spec
    assert count * group.chunk_bytes == spec.page_size_bytes


def test_more_ranks_than_common_heads_make_it_opaque() -> None:
    cache = mixed_heads(4, 8, 12)  # Two and three heads a rank; the greatest common part are four.
    assert specs_of(engine(8, 4), cache)[0].num_shards == 4
    cache = mixed_heads(8, 8, 24)
    (group,) = specs_of(engine(8, 8), cache)
    assert (group.num_kv_heads, group.num_shards) == (8, 8)
    # A layer that every rank has whole cannot be cut along the others' heads.
    cache = kv_cache(uniform(a=full_attention(1), b=full_attention(4), c=mla()))
    (group,) = specs_of(engine(8, 8), cache)
    assert (group.num_kv_heads, group.num_shards) == (0, 8)
    assert group.chunk_bytes == (1 + 4) * full_attention(1).page_size_bytes + mla().page_size_bytes
    assert written(group, 8) == Counter(range(8))


# Heads of layers that have more or fewer than the model names

TP_SIZES = (1, 2, 4, 8, 16)


def stored_heads(group: GroupSpec, heads: int, tp_size: int) -> list[list[int]]:
    """The heads of a layer that each shard holds, as the ranks that write would store them."""
    shards: list[list[int]] = [[] for _ in range(group.num_shards)]
    for rank in range(tp_size):
        mine = rank_shards(group, rank, tp_size)
        held = held_by(rank, heads, tp_size)
        each = len(held) // mine.shards.count
        for nth in range(mine.shards.count):
            if mine.writes:
                shards[mine.shards.start + nth] = held[nth * each : (nth + 1) * each]
    return shards


def held_by(rank: int, heads: int, tp_size: int) -> list[int]:
    """The heads that vLLM gives to a rank (`QKVParallelLinear`)."""
    first = rank * heads // tp_size
    return list(range(first, first + max(1, heads // tp_size)))


def assert_every_rank_finds_its_heads(groups: dict[int, GroupSpec], heads: int) -> None:
    """What engines of one tensor-parallel size store of a layer, those of each size that name the same group load."""
    for tp_size, other_size in itertools.product(groups, groups):
        if groups[tp_size] != groups[other_size]:
            continue
        stored = stored_heads(groups[tp_size], heads, tp_size)
        for rank in range(other_size):
            mine = rank_shards(groups[other_size], rank, other_size)
            shards = stored[mine.shards.start : mine.shards.start + mine.shards.count]
            loaded = [head for shard in shards for head in shard]
            assert loaded == held_by(rank, heads, other_size), (tp_size, other_size, rank)


NAMED: dict[str, Any] = {
    "MiMo V2": lambda heads: {"settings": {"swa_num_key_value_heads": heads}},
    "Gemma 4": lambda heads: {"settings": {"num_global_key_value_heads": heads}},
    "Step 3.5": lambda heads: {"settings": {"attention_other_setting": {"num_attention_groups": heads}}},
    "one per layer": lambda heads: {"settings": {"num_kv_heads_per_layer": [2, heads, 2]}},
    "a nested model": lambda heads: {"settings": {"model": {"multi_query_group_num": heads}}},
    "a draft model": lambda heads: {"drafts": True, "draft_model_config": model(heads)},
}


@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("heads", TP_SIZES)
@pytest.mark.parametrize("total", TP_SIZES)
def test_every_rank_finds_its_heads_whatever_the_model_counts(total: int, heads: int, named: str) -> None:
    groups = {}
    for tp_size in TP_SIZES:
        cache = cache_config(full_attention(max(1, heads // tp_size)))
        (groups[tp_size],) = specs_of(engine(total, tp_size, **NAMED[named](heads)), cache)
        assert written(groups[tp_size], tp_size) == Counter(range(groups[tp_size].num_shards))
    assert_every_rank_finds_its_heads(groups, heads)


@pytest.mark.parametrize("tp_size", TP_SIZES)
def test_ranks_share_a_head_where_the_configuration_names_no_other_count(tp_size: int) -> None:
    """Neither sizes nor heads of states are KV heads, and a count above the ranks' number is not theirs."""
    settings = {
        "num_attention_heads": 32,
        "head_dim": 8,
        "mamba_n_heads": 16,
        "linear_num_key_heads": 16,
        "n_group": 16,
        "num_heads_of_others": [3 * tp_size, None],
        "num_nextn_predict_layers": 16,
    }
    spec = full_attention(max(1, 4 // tp_size))
    (group,) = specs_of(engine(4, tp_size, settings=settings), cache_config(spec))
    assert (group.num_kv_heads, group.num_shards) == (4, 4)


@pytest.mark.parametrize(
    ("total", "tp_size", "settings", "spec", "heads"),
    [
        # Counts that fit no common part of the ranks.
        (2, 4, {"swa_num_key_value_heads": 3}, full_attention(1), 4),
        # MiniCPM 3 has as many KV heads as query heads, whatever its configuration names: ranks of one share none.
        (4, 8, {"num_attention_heads": 8}, full_attention(1), 8),
        # DeciLM names query heads per KV head, layer by layer: a layer's heads are quotients.
        (2, 8, {"block_configs": [object()]}, full_attention(1), 8),
        # Fewer heads than any count.
        (8, 4, {}, window(64, num_kv_heads=1), 4),
    ],
)
def test_counts_that_tell_no_layers_heads_leave_each_rank_its_own(
    total: int, tp_size: int, settings: dict[str, Any], spec: KVCacheSpec, heads: int
) -> None:
    (group,) = specs_of(engine(total, tp_size, settings=settings), kv_cache(spec))
    assert (group.num_kv_heads, written(group, tp_size)) == (heads, Counter(range(heads)))


# What each side knows


def test_a_mixed_group_is_known_to_workers_alone() -> None:
    config = engine(8)
    worker = mixed_heads(1, 8, 4)
    scheduler = generate_scheduler_kv_cache_config([worker])
    assert make_groups(config, worker) == make_groups(config, scheduler)
    assert specs_of(config, worker) != specs_of(config, scheduler)
    assert not scheduler_knows(config, worker)


def test_otherwise_both_sides_work_out_the_same(vllm_config: MakeConfig) -> None:
    config = vllm_config()
    worker = kv_cache(full_attention(), window(64), window(64), mla(), state())
    scheduler = generate_scheduler_kv_cache_config([worker, worker])
    assert scheduler_knows(config, worker)
    sides = [namespace_spec(config, cache, ConnectorConfig()) for cache in (worker, scheduler)]
    assert sides[0] == sides[1]
    sides[0].check()


def test_stages_have_their_own_layers_and_names(vllm_config: MakeConfig) -> None:
    config = vllm_config()
    config.parallel_config.pipeline_parallel_size = 2
    assert not scheduler_knows(config, cache_config())
    caches = [cache_config(layer_names=[name]) for name in LAYERS]
    specs = [namespace_spec(config, cache, ConnectorConfig(), stage) for stage, cache in enumerate(caches)]
    assert [spec.groups[0].layer_names for spec in specs] == [(LAYERS[0],), (LAYERS[1],)]
    assert [(spec.pipeline_stage, spec.num_pipeline_stages) for spec in specs] == [(0, 2), (1, 2)]
    assert specs[0].fingerprint() != specs[1].fingerprint()


def test_a_stage_without_a_layer_of_a_group_is_refused_unless_the_group_has_another_member() -> None:
    cache = kv_cache(full_attention(), window(64), window(64))
    cache.kv_cache_groups[2].layer_names.clear()
    assert specs_of(engine(pp_size=2), cache)[1].layer_names == ("1.0", "1.1")
    cache.kv_cache_groups[1].layer_names.clear()
    with pytest.raises(
        ConfigError, match=r"no layer of KV-cache group \(1, 2\) \(sliding_window\).*VLLM_PP_LAYER_PARTITION"
    ):
        specs_of(engine(pp_size=2), cache)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (window(64), window(64, dtype=torch.float16)),
        (window(64), window(64, head_size=16, head_size_v=0)),
        (window(64), window(80)),
        (state(4, 6), state(6, 4)),
        (mla(), mla(cache_dtype_str="fp8_ds_mla", state_content_bytes=mla().state_content_size_bytes)),
    ],
)
def test_bytes_of_another_meaning_have_another_name(one: KVCacheSpec, other: KVCacheSpec) -> None:
    assert specs_of(engine(), kv_cache(one)) != specs_of(engine(), kv_cache(other))


def test_pages_that_a_backend_packs_its_own_way_are_opaque_whatever_their_counts() -> None:
    """Two slots that are planes of K and V look like two heads."""
    heads = full_attention(2)
    planes = replace(heads, num_head_slots=2, state_content_bytes=heads.state_content_size_bytes)
    (plain,), (packed,) = (specs_of(engine(2), kv_cache(spec)) for spec in (heads, planes))
    assert (plain.num_kv_heads, plain.num_shards) == (2, 2)
    assert (packed.num_kv_heads, packed.num_shards) == (0, 1)
    assert plain.layer_formats != packed.layer_formats


@pytest.mark.parametrize("tp_size", SIZES)
@pytest.mark.parametrize("shards", SIZES)
@pytest.mark.parametrize("heads", [0, *SIZES])
def test_ping_measures_the_shards_that_a_rank_loads(heads: int, shards: int, tp_size: int) -> None:
    group = GroupSpec("full_attention", 16, heads, 64, 64, shards, chunk_bytes=8)
    if heads and heads % shards:
        return  # No engine has such a group.
    is_divisible = shards % tp_size == 0 or (tp_size % shards == 0 and heads == shards)
    if not (is_divisible if heads else shards == tp_size):
        with pytest.raises(InvalidRequestError, match="cannot share"):
            shards_of_rank(group, tp_size)
    else:
        assert shards_of_rank(group, tp_size) == rank_shards(group, 0, tp_size).shards
