import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpool.errors import ConfigError
from kvpool.namespace import NamespaceSpec, differences
from tests.vllm_plugin.conftest import MakeConfig
from tests.vllm_plugin.support import cache_config, full_attention, of_rank
from vllm_plugin.config import ConnectorConfig
from vllm_plugin.identity import namespace_spec, weights_digest

Identify = Callable[..., NamespaceSpec]


@pytest.fixture(scope="module")
def identify(vllm_config: MakeConfig) -> Identify:
    def make(kv_spec: Any = None, extra: dict[str, Any] | None = None, **options: Any) -> NamespaceSpec:
        kv_spec = kv_spec or full_attention(block_size=options.get("block_size", 16))
        return namespace_spec(vllm_config(**options), cache_config(kv_spec), ConnectorConfig.parse(extra or {}))

    return make


@pytest.fixture
def copied_model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / tiny_model.name))


def edit_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def fields_that_differ(ours: NamespaceSpec, theirs: NamespaceSpec) -> set[str]:
    assert ours.fingerprint() != theirs.fingerprint()
    return {difference.field for difference in differences(ours, theirs)}


def test_the_same_configuration_gives_the_same_name(identify: Identify) -> None:
    spec = identify()
    spec.check()
    assert identify().fingerprint() == spec.fingerprint()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"dtype": "float16"}, {"model_dtype"}),
        ({"kv_spec": full_attention(dtype=torch.float16)}, {"groups[0].layer_formats", "groups[0].chunk_bytes"}),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype"}),
        (
            {"block_size": 32},
            {"groups[0].block_tokens", "groups[0].chunk_bytes", "groups[0].layer_formats"},
        ),
        ({"extra": {"weights_epoch": "2"}}, {"weights_epoch"}),
        ({"extra": {"tenant": "another"}}, {"tenant"}),
        ({"extra": {"salt": "another"}}, {"salt"}),
        ({"extra": {"num_shards": 2}}, {"groups[0].num_shards", "groups[0].chunk_bytes"}),
        ({"load_format": "dummy"}, {"extra['load_format']"}),
        ({"hf_overrides": {"rope_theta": 5e5}}, {"extra['hf_config']"}),
        (
            {"hf_overrides": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}},
            {"extra['hf_config']"},
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_changes_kv_values_changes_the_name(
    change: dict[str, Any], expected: set[str], identify: Identify
) -> None:
    assert fields_that_differ(identify(), identify(**change)) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"endpoint": "10.0.0.1:1"},
        {"role": "kv_consumer"},
        {"max_model_len": 256},
        {"max_num_seqs": 3},
        {"seed": 9},
        {"extra": {"store_decoded": False, "lookup_timeout_ms": 7, "transport": "stream"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_does_not_change_kv_values_does_not_change_the_name(change: dict[str, Any], identify: Identify) -> None:
    assert differences(identify(), identify(**change)) == []


def test_where_the_length_limit_chooses_the_rope_factors_it_is_part_of_the_name(identify: Identify) -> None:
    # vLLM takes LongRoPE's short or long factors for every position, by max_model_len.
    factors = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
               "original_max_position_embeddings": 256}  # fmt: skip
    overrides = {"rope_parameters": factors, "original_max_position_embeddings": 256}
    short, long = (identify(hf_overrides=overrides, max_model_len=length) for length in (256, 512))
    assert fields_that_differ(short, long) == {"extra['max_model_len']"}


def test_both_sides_and_every_rank_agree(vllm_config: MakeConfig) -> None:
    def of(tp_size: int) -> NamespaceSpec:
        config = vllm_config()
        config.parallel_config.tensor_parallel_size = tp_size
        return namespace_spec(config, of_rank(cache_config(), tp_size), ConnectorConfig())

    assert of(1) == of(2) == of(4) == of(8)


def test_the_order_of_hash_seeds_is_part_of_the_name(identify: Identify, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    unset = identify()
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert fields_that_differ(unset, identify()) == {"hash_seed"}


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash_cbor"])
def test_an_algorithm_that_differs_between_processes_is_refused_with_the_fix(
    algorithm: str, identify: Identify
) -> None:
    with pytest.raises(ConfigError, match=f"{algorithm}.*start vLLM with --prefix-caching-hash-algo sha256_cbor"):
        identify(prefix_caching_hash_algo=algorithm)


# Weights


def test_where_a_local_model_lies_does_not_matter(identify: Identify, copied_model: Path) -> None:
    assert differences(identify(), identify(model=copied_model)) == []
    assert differences(identify(), identify(model=f"{copied_model}/")) == []


@pytest.mark.parametrize("place", ["start", "middle", "end"])
def test_other_weights_are_another_namespace(place: str, identify: Identify, copied_model: Path) -> None:
    weights = copied_model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    at = {"start": 1 << 10, "middle": len(data) // 2, "end": len(data) - 1}[place]
    data[at] ^= 0xFF
    weights.write_bytes(data)
    assert fields_that_differ(identify(), identify(model=copied_model)) == {"weights_digest"}


def test_a_retrained_file_of_many_samples_gives_another_digest(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    weights = directory / "model.safetensors"
    weights.write_bytes(bytes(8 << 20))
    before = weights_digest(str(directory), None)
    weights.write_bytes(b"\x01" * (8 << 20))
    assert weights_digest(str(directory), None) != before


def test_another_shard_file_gives_another_digest(copied_model: Path) -> None:
    before = weights_digest(str(copied_model), None)
    (copied_model / "model-2.safetensors").write_bytes(b"more")
    assert weights_digest(str(copied_model), None) != before


def test_a_changed_configuration_file_is_another_namespace(identify: Identify, copied_model: Path) -> None:
    edit_config(copied_model, rms_norm_eps=1e-6)
    assert fields_that_differ(identify(), identify(model=copied_model)) == {"extra['hf_config']"}


def test_a_version_stamp_in_the_configuration_file_does_not_matter(identify: Identify, copied_model: Path) -> None:
    edit_config(copied_model, transformers_version="0.0.1")
    assert differences(identify(), identify(model=copied_model)) == []


def test_a_model_that_is_not_on_this_disk_has_no_digest() -> None:
    assert weights_digest("nobody/has-this-model", "main") == ""
