from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

from kvpool.errors import ConfigError
from kvpool.namespace import GroupSpec
from tests.vllm_plugin.conftest import BLOCK_TOKENS, MakeConfig
from tests.vllm_plugin.support import LAYERS, cache_config, full_attention, of_rank
from vllm_plugin.groups import check_supported, group_spec, rank_shards

SIZES = (1, 2, 4, 8)


def group_of(total_kv_heads: int, tp_size: int, num_shards: int = 0, **fields: Any) -> GroupSpec:
    group = KVCacheGroupSpec(list(LAYERS), full_attention(max(1, total_kv_heads // tp_size), **fields))
    return group_spec(group, total_kv_heads, tp_size, num_shards)


# What is served


def test_one_full_attention_group_is_served(vllm_config: MakeConfig) -> None:
    check_supported(vllm_config(), cache_config())


@pytest.mark.parametrize(
    ("specs", "named"),
    [
        ((full_attention(), full_attention()), "group 0: FullAttentionSpec .* group 1: FullAttentionSpec"),
        (
            (
                SlidingWindowSpec(
                    block_size=BLOCK_TOKENS, num_kv_heads=4, head_size=8, dtype=torch.float32, sliding_window=64
                ),
            ),
            r"group 0: SlidingWindowSpec \(2 layers\)",
        ),
        (
            (MLAAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=576, dtype=torch.float32),),
            "group 0: MLAAttentionSpec",
        ),
        (
            (full_attention(), MambaSpec(block_size=BLOCK_TOKENS, shapes=((4,),), dtypes=(torch.float32,))),
            "group 0: FullAttentionSpec .* group 1: MambaSpec",
        ),
    ],
)
def test_other_models_are_refused_with_the_names_of_their_groups(
    specs: tuple[Any, ...], named: str, vllm_config: MakeConfig
) -> None:
    config = vllm_config()
    with pytest.raises(ConfigError, match=named) as raised:
        check_supported(config, cache_config(*specs))
    assert config.model_config.model in str(raised.value)
    assert "without kvpool" in str(raised.value)


def test_a_model_without_kv_cache_is_refused(vllm_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="has no KV-cache group"):
        check_supported(vllm_config(), replace(cache_config(), kv_cache_groups=[]))


@pytest.mark.parametrize(
    "spec", [full_attention(num_head_slots=2, state_content_bytes=64), full_attention(sliding_window=128)]
)
def test_heads_that_cannot_be_told_apart_are_refused(spec: Any, vllm_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="cannot cut group 0: FullAttentionSpec"):
        check_supported(vllm_config(), cache_config(spec))


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "decode_context_parallel_size"])
def test_a_parallelism_that_is_not_served_is_refused_by_name(name: str, vllm_config: MakeConfig) -> None:
    config = vllm_config()
    setattr(config.parallel_config, name, 2)
    with pytest.raises(ConfigError, match=f"{name} = 2; set it to 1"):
        check_supported(config, cache_config())


def test_scales_that_depend_on_the_first_request_are_refused(vllm_config: MakeConfig) -> None:
    config = vllm_config()
    config.cache_config.calculate_kv_scales = True
    with pytest.raises(ConfigError, match="calculate_kv_scales"):
        check_supported(config, cache_config())


# Shards


@pytest.mark.parametrize("total_kv_heads", SIZES)
@pytest.mark.parametrize("tp_size", SIZES)
def test_writers_cover_every_shard_once_and_every_rank_reads_its_heads(tp_size: int, total_kv_heads: int) -> None:
    group = group_of(total_kv_heads, tp_size)
    mine = [rank_shards(group, rank, tp_size) for rank in range(tp_size)]
    written = Counter(
        shard for one in mine if one.writes for shard in range(one.shards.start, one.shards.start + one.shards.count)
    )
    assert written == Counter(range(group.num_shards))
    heads_per_shard = total_kv_heads // group.num_shards
    for rank, one in enumerate(mine):
        one.shards.check(group.num_shards)
        # As vLLM deals them out: rank r of more ranks than heads holds head r // replicas.
        first_head = rank * total_kv_heads // tp_size
        assert one.shards.start * heads_per_shard == first_head
        assert one.shards.count * heads_per_shard == max(1, total_kv_heads // tp_size)
    assert sum(one.writes for one in mine) == min(tp_size, total_kv_heads)


@pytest.mark.parametrize("total_kv_heads", SIZES)
def test_every_parallel_size_names_the_same_group(total_kv_heads: int) -> None:
    assert len({group_of(total_kv_heads, tp_size) for tp_size in SIZES}) == 1


@pytest.mark.parametrize("tp_size", SIZES)
@pytest.mark.parametrize("total_kv_heads", SIZES)
def test_a_ranks_part_of_a_chunk_is_what_its_kv_cache_holds(total_kv_heads: int, tp_size: int) -> None:
    group = group_of(total_kv_heads, tp_size)
    spec = of_rank(cache_config(full_attention(total_kv_heads)), tp_size).kv_cache_groups[0].kv_cache_spec
    count = rank_shards(group, 0, tp_size).shards.count
    assert count * group.chunk_bytes == len(LAYERS) * spec.page_size_bytes


@pytest.mark.parametrize(("total_kv_heads", "expected"), [(1, 1), (6, 2), (8, 8), (16, 16), (32, 16), (24, 8)])
def test_by_default_a_shard_is_a_head_up_to_sixteen_shards(total_kv_heads: int, expected: int) -> None:
    assert group_of(total_kv_heads, 1).num_shards == expected


def test_a_shard_may_hold_several_heads() -> None:
    group = group_of(8, 2, num_shards=2)
    assert group.chunk_bytes == 4 * group_of(8, 2).chunk_bytes
    assert [rank_shards(group, rank, 2).shards.start for rank in range(2)] == [0, 1]


@pytest.mark.parametrize(
    ("total_kv_heads", "tp_size", "num_shards", "message"),
    [
        (8, 1, 3, "num_shards = 3 does not divide the model's 8 KV heads"),
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


def test_the_number_that_a_refusal_names_works() -> None:
    group = group_of(6, 3, num_shards=6)
    assert [rank_shards(group, rank, 3).shards.start for rank in range(3)] == [0, 2, 4]
