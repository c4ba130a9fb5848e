import itertools
import json
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import MultiModalConfig
from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from kvpool.protocol.errors import ConfigError
from kvpool.protocol.namespace import NamespaceSpec, differences
from kvpool.security.name_key import NameKey
from testbed.tiny_models import write as write_shape
from tests.support.toy.fixtures import MakeConfig
from tests.support.vllm_objects import cache_config, full_attention
from vllm_plugin.config import ConnectorConfig
from vllm_plugin.model import identity
from vllm_plugin.model.identity import DRAFT_WEIGHTS, code, is_in_doubt, namespace_spec
from vllm_plugin.model.weights import Weights

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


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"dtype": "float16"}, {"model_dtype"}),
        ({"kv_spec": full_attention(dtype=torch.float16)}, {"groups[0].layer_formats", "groups[0].chunk_bytes"}),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype", "extra['device']"}),
        (
            {"block_size": 32},
            {"groups[0].block_tokens", "groups[0].chunk_bytes", "groups[0].layer_formats"},
        ),
        ({"extra": {"weights_epoch": "2"}}, {"weights_epoch"}),
        ({"extra": {"tenant": "another"}}, {"tenant"}),
        ({"extra": {"salt": "another"}}, {"salt"}),
        ({"extra": {"num_shards": 2}}, {"groups[0].num_shards", "groups[0].chunk_bytes"}),
        ({"load_format": "dummy"}, {"extra['load_format']", "weights_digest", "model"}),
        ({"hf_overrides": {"rope_theta": 5e5}}, {"extra['hf_config']", "extra['model_config.hf_overrides']"}),
        (
            {"hf_overrides": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}},
            {"extra['model_config.hf_overrides']"},
        ),
        ({"disable_sliding_window": True}, {"extra['model_config.disable_sliding_window']"}),
        ({"additional_config": {"secret": 1}}, {"extra['vllm_config.additional_config']"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_changes_kv_values_changes_the_name(
    change: dict[str, Any], expected: set[str], identify: Identify
) -> None:
    assert fields_that_differ(identify(), identify(**change)) == expected


def test_a_name_key_is_part_of_the_name(identify: Identify, tmp_path: Path) -> None:
    keys = [NameKey.create(tmp_path / name) for name in ("a", "b")]
    plain, *keyed = (identify(extra={"name_key_file": file}) for file in ("", str(tmp_path / "a"), str(tmp_path / "b")))
    assert [dict(spec.extra)["name_key"] for spec in keyed] == [key.digest for key in keys]
    for ours, theirs in ((plain, keyed[0]), keyed):
        assert fields_that_differ(ours, theirs) == {"extra['name_key']"}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"endpoint": "10.0.0.1:1"},
        {"role": "kv_consumer"},
        {"max_model_len": 256},
        {"override_generation_config": {"attn_temperature_tuning": True}},
        {"max_num_seqs": 3},
        {"seed": 9},
        {"extra": {"store_decoded": False, "lookup_timeout_ms": 7, "transport": "network"}},
    ],
    ids=lambda change: next(iter(change), "nothing"),
)
def test_what_does_not_change_kv_values_does_not_change_the_name(change: dict[str, Any], identify: Identify) -> None:
    spec = identify(**change)
    spec.check()
    assert differences(identify(), spec) == []


@pytest.mark.parametrize(
    ("changed", "value", "expected"),
    [
        ("vllm.__version__", "0.0.1", "extra['vllm']"),
        ("transformers.__version__", "0.0.1", "extra['transformers']"),
        ("config.cache_config.swa_bounded_replay", False, "extra['cache_config.swa_bounded_replay']"),
        ("config.device_config.device_type", "cuda", "page_format"),
    ],
)
def test_what_a_release_and_a_device_make_of_kv_is_part_of_the_name(
    changed: str, value: object, expected: str, vllm_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vllm_config()
    ours = namespace_spec(config, cache_config(), ConnectorConfig())
    place, _, name = changed.rpartition(".")
    if place.startswith("config."):
        monkeypatch.setattr(attrgetter(place.removeprefix("config."))(config), name, value)
    else:
        monkeypatch.setattr(changed, value)
    assert fields_that_differ(ours, namespace_spec(config, cache_config(), ConnectorConfig())) == {expected}


def test_a_revision_is_part_of_the_name_where_no_digest_names_the_weights(
    identify: Identify, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for revision in ("aa", "bb"):
        weights = Weights("model", revision, "")
        monkeypatch.setattr(identity, "describe_weights", lambda *_, weights=weights: weights)
        names.append(identify())
    assert fields_that_differ(*names) == {"revision"}


def test_where_the_length_limit_chooses_the_rope_factors_it_is_part_of_the_name(identify: Identify) -> None:
    # vLLM takes LongRoPE's short or long factors for every position, by max_model_len.
    factors = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
               "original_max_position_embeddings": 256}  # fmt: skip
    overrides = {"rope_parameters": factors, "original_max_position_embeddings": 256}
    short, long = (identify(hf_overrides=overrides, max_model_len=length) for length in (256, 512))
    assert fields_that_differ(short, long) == {"extra['model_config.max_model_len']"}


@pytest.fixture(scope="module")
def llama4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An architecture that reads more than its checkpoint: `attn_temperature_tuning` from elsewhere."""
    return write_shape("llama4", tmp_path_factory.mktemp("shapes"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"max_model_len": 40_000}, "max_model_len"),
        ({"override_generation_config": {"attn_temperature_tuning": True}}, "override_generation_config"),
        ({"generation_config": "elsewhere"}, "generation_config"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_architecture_that_may_depend_on_a_setting_has_it_in_its_name(
    change: dict[str, Any], expected: str, identify: Identify, llama4: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir(exist_ok=True)
    (tmp_path / "elsewhere" / "generation_config.json").write_text(json.dumps({"attn_temperature_tuning": True}))
    if "generation_config" in change:
        change = {"generation_config": str(tmp_path / "elsewhere")}
    common = {"model": llama4, "hf_overrides": {"max_position_embeddings": 65_536}, "max_model_len": 512}
    assert fields_that_differ(identify(**common), identify(**{**common, **change})) == {
        f"extra['model_config.{expected}']"
    }


def test_both_sides_agree_whatever_a_models_constructor_does_to_its_configuration(
    vllm_config: MakeConfig, llama4: Path
) -> None:
    """vLLM's constructors write into the configuration, and only the workers build a model."""
    scheduler, worker = vllm_config(model=llama4), vllm_config(model=llama4)
    worker.model_config.hf_config.attn_temperature_tuning = True  # llama4.py, Llama4ForCausalLM.__init__
    worker.model_config.hf_text_config.max_model_len = 512  # minimax_m2.py, MiniMaxM2ForCausalLM.__init__
    specs = [namespace_spec(config, cache_config(), ConnectorConfig()) for config in (scheduler, worker)]
    assert differences(*specs) == []


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash_cbor"])
def test_an_algorithm_that_differs_between_processes_is_refused_with_the_fix(
    algorithm: str, identify: Identify
) -> None:
    with pytest.raises(ConfigError, match=f"{algorithm}.*start vLLM with --prefix-caching-hash-algo sha256_cbor"):
        identify(prefix_caching_hash_algo=algorithm)


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("PYTHONHASHSEED", "0", "hash_seed"),
        *(
            (variable, value, f"extra['environment.{variable}']")
            for variable, value in (
                ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", '{"dtype": "int4"}'),
                ("VLLM_MARLIN_INPUT_DTYPE", "fp8"),
                ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random"),
            )
        ),
    ],
)
def test_a_variable_that_may_change_kv_is_part_of_the_name(
    variable: str, value: str, expected: str, identify: Identify, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    before = identify()
    monkeypatch.setenv(variable, value)
    assert fields_that_differ(before, identify()) == {expected}


def test_variables_that_differ_between_replicas_are_no_part_of_the_name(
    identify: Identify, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = identify()
    for variable in ("CPU_OMP_THREADS_BIND", "DP_RANK", "LOG_STATS_INTERVAL", "RPC_TIMEOUT", "PORT"):
        monkeypatch.setenv(f"VLLM_{variable}", "1")
    assert differences(before, identify()) == []


@pytest.mark.parametrize(
    ("section", "field", "name"),
    [
        ("", "", "LlamaForCausalLM"),
        ("", "", "AnInnerModelOrADraft"),
        ("parallel_config", "worker_extension_cls", "worker extension"),
        ("parallel_config", "worker_cls", "worker"),
        ("scheduler_config", "scheduler_cls", "scheduler"),
    ],
)
def test_a_class_that_a_plugin_puts_in_the_place_of_vllms_is_part_of_the_name(
    section: str, field: str, name: str, vllm_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vllm_config()
    names = [namespace_spec(config, cache_config(), ConnectorConfig())]
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").touch()
    (tmp_path / "own" / "models.py").write_text("from own import layers")
    if section:
        monkeypatch.setattr(getattr(config, section), field, "own.models.Own")
    else:
        monkeypatch.setitem(ModelRegistry.models, name, _LazyRegisteredModel("own.models", "Own"))
    for source in ("x = 1", "x = 2"):
        (tmp_path / "own" / "layers.py").write_text(source)
        names.append(namespace_spec(config, cache_config(), ConnectorConfig()))
    assert f"extra['class.{name}']" in fields_that_differ(*names[:2])
    assert fields_that_differ(*names[1:]) == {f"extra['class.{name}']"}


def _in_a_package(place: Path, content: str) -> Path:
    (place / "own").mkdir(exist_ok=True)
    (place / "own" / "__init__.py").touch()
    (place / "own" / "kernels.so").write_text(content)
    return place


def _in_a_namespace_package(place: Path, content: str) -> Path:
    (place / "own").mkdir(exist_ok=True)
    (place / "own" / "models.py").write_text(content)
    return place


def _in_an_archive(place: Path, content: str) -> Path:
    with zipfile.ZipFile(place / "own.zip", "w") as archive:
        archive.writestr("own/__init__.py", "")
        archive.writestr("own/models.py", content)
    return place / "own.zip"


@pytest.mark.parametrize("put", [_in_a_package, _in_a_namespace_package, _in_an_archive])
def test_code_of_any_form_has_a_digest_of_its_content(
    put: Callable[[Path, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for place, content in (("here", "x = 1"), ("there", "x = 1"), ("there", "x = 2")):
        (tmp_path / place).mkdir(exist_ok=True)
        with monkeypatch.context() as found:
            found.syspath_prepend(put(tmp_path / place, content))
            names.append(code("own.models"))
    assert names[0] == names[1] != names[2] and all(names)


def test_no_architecture_of_a_plugin_is_known_to_ignore_settings(
    vllm_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [vllm_config(max_model_len=length) for length in (256, 512)]
    monkeypatch.setitem(ModelRegistry.models, "LlamaForCausalLM", _LazyRegisteredModel("own_models", "Llama"))
    ours, theirs = (namespace_spec(config, cache_config(), ConnectorConfig()) for config in configs)
    assert fields_that_differ(ours, theirs) == {"extra['model_config.max_model_len']"}


def test_an_entry_point_of_vllm_is_part_of_the_name_with_its_packages_code(
    identify: Identify, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [identify()]
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own-1.0.dist-info").mkdir()
    points = tmp_path / "own-1.0.dist-info" / "entry_points.txt"
    points.write_text("[vllm.general_plugins]\nown = own_plugin:register\n[console_scripts]\nown = own_plugin:main\n")
    for source in ("def register(): pass", "def register(): 1"):
        (tmp_path / "own_plugin.py").write_text(source)
        names.append(identify())
    for record in ("top_level.txt", "RECORD"):  # Of the distribution's other modules.
        listed = tmp_path / "own-1.0.dist-info" / record
        listed.write_text("own_plugin\nown_kernels\n" if record == "top_level.txt" else "own_kernels.py,,\n")
        for source in (f"x = 1  # {record}", f"x = 2  # {record}"):
            (tmp_path / "own_kernels.py").write_text(source)
            names.append(identify())
        listed.unlink()
    for ours, theirs in itertools.pairwise(names):
        assert fields_that_differ(ours, theirs) == {"extra['plugin.vllm.general_plugins.own']"}
    monkeypatch.setattr("vllm.envs.VLLM_PLUGINS", ["another"])
    assert differences(names[0], identify()) == []


def test_where_nothing_is_quantised_kernels_do_not_count_and_else_they_do(
    vllm_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names(capability: str = "", **fields: Any) -> NamespaceSpec:
        config = vllm_config(**({"kv_cache_dtype": "fp8"} if is_quantised else {}))
        monkeypatch.setattr(config.kernel_config, "moe_backend", fields.get("moe_backend", "auto"))
        monkeypatch.setattr(config.parallel_config, "enable_expert_parallel", "all2all_backend" in fields)
        monkeypatch.setattr(config.parallel_config, "all2all_backend", fields.get("all2all_backend", "naive"))
        monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_: capability)
        return namespace_spec(config, cache_config(), ConnectorConfig())

    for is_quantised in (False, True):
        base, *others = names(), names(capability="10.0"), names(moe_backend="marlin"), names(all2all_backend="naive")
        assert is_quantised == bool(differences(others[-1], names(all2all_backend="deepep_low_latency")))
        if is_quantised:
            assert [fields_that_differ(base, each) for each in others] == [
                {"extra['device']"},
                {"extra['kernel_config.moe_backend']"},
                {"extra['parallel_config.experts']"},
            ]
        else:
            assert [differences(base, each) for each in others] == [[], [], []]


@dataclass
class Scales:
    path: str


@pytest.mark.parametrize("holder", [lambda path: {"scales": str(path)}, lambda path: {"scales": Scales(str(path))}])
@pytest.mark.parametrize("is_absolute", [True, False])
def test_a_setting_that_names_a_file_counts_by_its_content(
    holder: Callable[[Path], Any],
    is_absolute: bool,
    vllm_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    names, place, config = [], tmp_path if is_absolute else Path(), vllm_config()
    for file, content in (("scales.json", "1"), ("copy.json", "1"), ("copy.json", "2")):
        (place / file).write_text(content)
        monkeypatch.setattr(config, "additional_config", holder(place / file))
        names.append(namespace_spec(config, cache_config(), ConnectorConfig()))
    assert differences(names[0], names[1]) == []
    assert fields_that_differ(*names[1:])


def test_scales_that_are_powers_of_two_are_part_of_the_name_where_numbers_are_quantised(
    identify: Identify, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_supported in (False, True):
        monkeypatch.setattr("vllm.utils.deep_gemm.is_deep_gemm_supported", lambda: is_supported)  # noqa: B023
        for options in ({}, {"kv_cache_dtype": "fp8"}):
            names = []
            for setting in "01":
                monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", setting)
                names.append(identify(**options))
            if is_supported and options:
                assert fields_that_differ(*names) == {"extra['scales']"}
            else:
                assert differences(*names) == []


def test_an_attention_backend_that_a_script_registers_is_part_of_the_name(identify: Identify) -> None:
    before = identify()
    try:
        register_backend(AttentionBackendEnum.FLASH_ATTN, "own_attention.Backend")
        assert "extra['class.attention FLASH_ATTN']" in fields_that_differ(before, identify())
    finally:
        AttentionBackendEnum.FLASH_ATTN.clear_override()


@pytest.mark.parametrize("with_media", [False, True])
def test_what_prepares_media_is_part_of_the_name(
    with_media: bool, copied_model: Path, vllm_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(**settings: Any) -> NamespaceSpec:
        with monkeypatch.context() as changed:
            for field, value in {"multimodal_config": MultiModalConfig() if with_media else None, **settings}.items():
                changed.setattr(config.model_config, field, value)
            return namespace_spec(config, cache_config(), ConnectorConfig())

    config = vllm_config(model=copied_model)
    base = name()
    for place, content in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "tekken.json").write_text(content)
    tokenizers = [name(tokenizer=str(tmp_path / place)) for place in "abc"]
    trusting = name(trust_remote_code=True)
    edit_config(copied_model, auto_map={"AutoProcessor": "own/repo--processing.Own"})
    config = vllm_config(model=copied_model)
    foreign, pinned = (name(trust_remote_code=True, code_revision=revision) for revision in (None, "0" * 40))
    assert not is_in_doubt(base) and is_in_doubt(foreign) == is_in_doubt(pinned) == with_media
    assert differences(*tokenizers[:2]) == []
    if with_media:
        assert fields_that_differ(base, tokenizers[0]) == {"extra['model_config.tokenizer']"}
        assert fields_that_differ(*tokenizers[1:]) == {"extra['model_config.tokenizer']"}
        assert fields_that_differ(base, trusting) == {"extra['model_config.trust_remote_code']"}
    else:
        assert [differences(base, each) for each in (*tokenizers, trusting)] == [[], [], [], []]


# Weights


def test_where_a_local_model_lies_does_not_matter(identify: Identify, copied_model: Path) -> None:
    moved = copied_model.rename(copied_model.parent / "by-another-name")
    for place in (moved, f"{moved}/"):
        spec = identify(model=place)
        assert spec.model == "by-another-name"
        assert differences(identify(), spec) == []
        assert identify().fingerprint() == spec.fingerprint()


def test_files_of_the_model_are_another_namespace_but_for_a_stamp_of_their_version(
    identify: Identify, copied_model: Path
) -> None:
    edit_config(copied_model, transformers_version="0.0.1")
    assert differences(identify(), identify(model=copied_model)) == []
    edit_config(copied_model, rms_norm_eps=1e-6)
    assert fields_that_differ(identify(), identify(model=copied_model)) == {"extra['hf_config']"}
    (copied_model / "model.safetensors").open("ab").write(b"other weights")
    assert fields_that_differ(identify(), identify(model=copied_model)) == {"extra['hf_config']", "weights_digest"}


def test_a_draft_from_another_revision_of_the_model_has_weights_of_its_own(
    identify: Identify, tiny_model: Path
) -> None:
    """vLLM reads a draft model from the newest revision, whichever the model itself is served from."""
    draft = {"model": str(tiny_model), "method": "draft_model", "num_speculative_tokens": 2}
    same, newest = (identify(speculative_config=dict(draft), **revision) for revision in ({}, {"revision": "old"}))
    assert DRAFT_WEIGHTS not in dict(same.extra)
    assert dict(newest.extra)[DRAFT_WEIGHTS] == newest.weights_digest
