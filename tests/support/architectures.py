"""What kvpool makes of each architecture in vLLM's registry: `python -m tests.support.architectures --write`.

A model is built without weights, on PyTorch's meta device, as the last rank of each tensor-parallel size; its attention
layers say what they keep. The configurations are those of Transformers' and vLLM's classes, with fewer layers and with
heads that sixteen ranks can divide. A process that builds models is of no other use: it has replaced vLLM's groups of
ranks, and modules for images and sound that a CPU install lacks.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "architectures.md"
BEGIN = "<!-- rows of tests/support/architectures.py -->"
TP_SIZES = (1, 2, 4, 8, 16)
MAX_LAYERS = 8
HEADS, KV_HEADS = 16, 4
ABSENT = ("torchvision", "torchaudio", "timm", "terratorch")
"""Modules that models import for images and sound, which no KV cache depends on."""

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
}
"""For architectures whose configuration only their checkpoints bring: vLLM reads the same names from any class."""

MISSING: dict[str, Any] = {
    "activation_function": "silu",
    "apply_residual_connection_post_layernorm": False,
    "decoder_sparse_step": 1,
    "head_dim": 64,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "index_head_dim": 128,
    "index_kpool_always_select_tail": True,
    "index_n_heads": 64,
    "index_topk": 64,
    "layer_norm_eps": 1e-5,
    "mlp_layer_types": ["dense"] * 4,
    "moe_shared_expert_intermediate_size": 512,
    "norm_after": False,
    "num_heads": 1,
    "route_norm": True,
    "route_scale": 1.0,
    "short_conv_kernel_size": 4,
    "use_embed_norm": False,
    "vocab_size": 2048,
    "zero_expert_type": None,
    "attention_other_setting": None,
    "block_dim": 1024,
    "block_ff_dim": 2048,
    "block_auto_adjust_ff_dim": False,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": None,
    "conv_dim": 1024,
    "conv_bias": False,
    "conv_L_cache": 3,
    "depth_modulation": None,
    "dim_model_base": 256,
    "embedding_dropout": 0.0,
    "embedding_size": 2048,
    "ffn_hidden_size": 2048,
    "final_logit_softcapping": None,
    "first_k_dense_replace": 1,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "hybrid_override_pattern": "M*-M",
    "image_token_id": 0,
    "kv_channels": 64,
    "kv_lora_rank": 512,
    "layer_norm_epsilon": 1e-5,
    "layer_group_size": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "layernorm_epsilon": 1e-5,
    "max_position_embedding": 2048,
    "mla_scale_kv_lora": 1.0,
    "mla_scale_q_lora": 1.0,
    "moe_intermediate_size": 512,
    "moe_layer_freq": 1,
    "moe_num_experts": 16,
    "moe_router_enable_expert_bias": False,
    "moe_top_k": 2,
    "multi_query_attention": True,
    "multi_query_group_num": KV_HEADS,
    "n_group": 1,
    "n_inner": 2048,
    "n_layer": 4,
    "n_positions": 2048,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "norm_bias": False,
    "num_attention_groups": KV_HEADS,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_layers": 4,
    "num_local_experts": 16,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 1,
    "padded_vocab_size": 2048,
    "partial_rotary_factor": 1.0,
    "position_embedding_type": "rotary",
    "post_layer_norm": True,
    "q_lora_rank": None,
    "qk_layernorm": False,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "query_pre_attn_scalar": 64,
    "rmsnorm": True,
    "rope_theta": 10000.0,
    "rotary_dim": 64,
    "routed_scaling_factor": 1.0,
    "scale_depth": 1.0,
    "scale_emb": 1.0,
    "score_func": "sigmoid",
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "seq_length": 2048,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "swa_head_dim": 64,
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": 2 * KV_HEADS,
    "swa_v_head_dim": 64,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "type_vocab_size": 2,
    "use_bias": False,
    "use_cache": True,
    "use_mup": False,
    "use_qk_norm": False,
    "use_qkv_bias": False,
    "v_head_dim": 64,
    "weight_tying": False,
}
"""Settings that vLLM's classes read and a configuration above lacks."""

FIXED: dict[str, dict[str, Any]] = {
    "LlamaBidirectionalModel": {"pooling": "avg"},
    "LlamaBidirectionalForSequenceClassification": {"pooling": "avg"},
    "Mamba2ForCausalLM": {"n_groups": 1},
    "NemotronForCausalLM": {"num_key_value_heads": KV_HEADS},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 64},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 64},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4},
    "MiMoV2FlashForCausalLM": {
        "hybrid_layer_pattern": [0, 1] * 4,
        "moe_layer_freq": 0,
        "v_head_dim": 192,
        "swa_head_dim": 192,
        "swa_v_head_dim": 192,
    },
    "MiMoV2ForCausalLM": {"moe_layer_freq": 0, "v_head_dim": 64},
}
"""Settings of one architecture."""


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one architecture.

    Args:
        caches: kinds of its layers' caches, with the number of KV heads of the whole model.
        sizes: tensor-parallel sizes that were built; those joined by "=" share blocks.
        verdict: "agrees", or why not.
    """

    architecture: str
    caches: str
    sizes: str
    verdict: str


def judge(architecture: str) -> Row:
    """Builds an architecture and compares what its layers keep with what kvpool cuts and groups.

    Raises:
        AssertionError: they disagree: ranks would load heads that are not theirs.
    """
    from kvpool.protocol.errors import ConfigError

    engines: dict[int, tuple[Any, dict[str, Any], dict[str, Any]]] = {}
    missing: dict[str, list[str]] = {}
    for tp_size in TP_SIZES:
        try:
            engines[tp_size] = build(architecture, tp_size)
        except Exception as error:
            if tp_size == 1:
                return Row(architecture, "", "", f"not built: {_one_line(error)}")
            missing.setdefault(_one_line(error), []).append(str(tp_size))
    kept = engines[1][1]
    caches = ", ".join(sorted({_cache(spec) for spec in kept.values()}))
    if not kept:
        return Row(architecture, "none", "", "refused: has no KV cache")
    groups: dict[int, list[tuple[Any, list[str]]]] = {}
    for tp_size, (config, specs, replicas) in engines.items():
        try:
            groups[tp_size] = _groups(config, specs)
        except ConfigError as error:
            return Row(architecture, caches, str(tp_size), f"refused: {_one_line(error)}")
        except Exception as error:
            if tp_size == 1:
                return Row(architecture, caches, "", f"not built: groups: {_one_line(error)}")
            missing.setdefault(_one_line(error), []).append(str(tp_size))
            continue
        for name, replica in replicas.items():
            assert replica == max(1, tp_size // kept[name].num_kv_heads), (architecture, tp_size, name, replica)
    _compare(architecture, {size: engines[size][1] for size in groups}, groups)
    but = "; ".join(f"{', '.join(sizes)} not built: {why}" for why, sizes in missing.items())
    return Row(architecture, caches, _sharing(groups), f"agrees ({but})" if but else "agrees")


_SETTLED: dict[str, dict[str, Any]] = {}
"""Architecture -> its settings, with those that were missing."""


def build(architecture: str, tp_size: int) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """One rank of an engine: its configuration, its layers' specs, and how many ranks vLLM gives each layer's heads."""
    settings = _SETTLED.setdefault(architecture, tiny_config(architecture))
    for _ in range(40):
        try:
            return _build(architecture, settings, tp_size)
        except AttributeError as error:
            match = re.search(r"object has no attribute '(\w+)'", str(error))
            name = match[1] if match else ""
            if name not in MISSING or name in settings:
                raise
            settings[name] = MISSING[name]
    raise AssertionError(f"{architecture}: settings are missing without end")


def tiny_config(architecture: str) -> dict[str, Any]:
    """A configuration for an architecture: of the class that Transformers has for it, or Llama's."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    model_type = _model_types().get(architecture)
    plain = re.sub("(ForCausalLM|ForConditionalGeneration|Model|ChatModel)$", "", architecture).lower()
    own = next((each for each in _CONFIG_REGISTRY if re.sub("[-_]", "", each) == plain), None)
    settings = dict(LLAMA)
    with contextlib.suppress(Exception):  # Some classes have no defaults.
        if model_type in CONFIG_MAPPING:
            settings = CONFIG_MAPPING[model_type]().to_dict()
        elif own is not None:
            settings = _CONFIG_REGISTRY[own]().to_dict()
    return {**_shrink(settings), **FIXED.get(architecture, {}), "architectures": [architecture]}


def _shrink(settings: dict[str, Any]) -> dict[str, Any]:
    small = {
        name: _shrink(value)
        if isinstance(value, dict) and re.search("text|llm|language|thinker|decoder", name)
        else value
        for name, value in settings.items()
    }
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        count = small.get(name)
        if isinstance(count, int) and count > MAX_LAYERS and not small.get("per_layer_config"):
            small[name] = MAX_LAYERS
            for other, value in small.items():
                if isinstance(value, list) and len(value) == count:
                    small[other] = value[:MAX_LAYERS]
    hidden = "n_embd" if "n_embd" in small else "hidden_size"
    for name in ("num_attention_heads", "n_head", "n_heads"):
        count = small.get(name)
        if isinstance(count, int) and count % HEADS:
            head_dim = small.get("head_dim") or max(HEADS, (small.get(hidden) or 1024) // count)
            small[name] = HEADS
            if isinstance(small.get(hidden), int):
                small[hidden] = HEADS * head_dim
    if isinstance(small.get("num_key_value_heads"), int):
        small["num_key_value_heads"] = min(KV_HEADS, small["num_key_value_heads"])
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if isinstance(small.get(name), int) and 0 < small[name] < HEADS:
            small[name] = HEADS
    return small


def _model_types() -> dict[str, str]:
    """Transformers' class of a model -> its `model_type`."""
    from transformers.models.auto import modeling_auto

    types: dict[str, str] = {}
    for name in dir(modeling_auto):
        if name.endswith("MAPPING_NAMES"):
            for model_type, classes in getattr(modeling_auto, name).items():
                for each in [classes] if isinstance(classes, str) else classes:
                    types.setdefault(each, model_type)
    return types


def _build(architecture: str, settings: dict[str, Any], tp_size: int) -> tuple[Any, dict[str, Any], dict[str, int]]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(settings, default=str))
        config = EngineArgs(
            model=directory,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_num_batched_tokens=1 << 20,
            max_num_seqs=4,
            enable_prefix_caching=True,
            load_format="dummy",
            prefix_caching_hash_algo="sha256_cbor",
            limit_mm_per_prompt=None,
        ).create_engine_config()
        config.parallel_config.tensor_parallel_size = tp_size
        # What only the CPU lacks is nothing to the model.
        config.cache_config.enable_prefix_caching = config.scheduler_config.enable_chunked_prefill = True
        config.cache_config.mamba_cache_mode = "align"
        config.cache_config.kv_cache_layout = "LBHNC"
        if _has_drafts(architecture):
            object.__setattr__(config, "speculative_config", _drafting(config))
        with _rank(tp_size), set_current_vllm_config(config), torch.device("meta"):
            model = initialize_model(vllm_config=config)
            layers = config.compilation_config.static_forward_context
            specs = {
                name: spec
                for name, layer in layers.items()
                if hasattr(layer, "get_kv_cache_spec") and (spec := layer.get_kv_cache_spec(config)) is not None
            }
    replicas = {}
    names = {id(layer): name for name, layer in layers.items() if name in specs}
    for module in model.modules():
        children = list(module.children())
        counts = [child.num_kv_head_replicas for child in children if hasattr(child, "num_kv_head_replicas")]
        replicas |= {names[id(child)]: counts[0] for child in children if id(child) in names and len(counts) == 1}
    return config, specs, replicas


def _has_drafts(architecture: str) -> bool:
    from vllm.model_executor.models import registry

    return architecture in registry._SPECULATIVE_DECODING_MODELS


def _drafting(config: Any) -> Any:
    """As if the draft model were drafting for itself."""
    return _Drafting(
        draft_model_config=config.model_config,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
        draft_parallel_config=config.parallel_config,
        draft_load_config=config.load_config,
        num_speculative_tokens=1,
        method="eagle",
        quantization=None,
        use_eagle=lambda: True,
        use_eagle_block_drop=lambda: True,
    )


class _Drafting(SimpleNamespace):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda: False) if name.startswith("use") else None


@contextlib.contextmanager
def _rank(tp_size: int) -> Iterator[None]:
    """vLLM's code runs as the last of `tp_size` ranks."""
    from vllm.distributed import parallel_state

    group = parallel_state._TP
    parallel_state._EP = parallel_state._EPLB = group
    group.world_size, group.rank_in_group = tp_size, tp_size - 1
    try:
        yield
    finally:
        group.world_size, group.rank_in_group = 1, 0


def _groups(config: Any, specs: dict[str, Any]) -> list[tuple[Any, list[str]]]:
    """The pool's groups as `group_spec` describes them, each with its layers; vLLM makes the engine's groups."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_plugin.model.groups import group_spec, make_groups, stage_layers

    # vLLM scales block sizes in place of the layers' own specs.
    engine_groups = get_kv_cache_groups(config, copy.deepcopy(specs))
    cache = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=engine_groups, kv_cache_layout="LBHNC")
    described = []
    for group in make_groups(config, cache):
        layers = stage_layers(group, cache)
        for name, spec in layers:
            window = getattr(specs[name], "sliding_window", None) if group.kind.window_tokens else 0
            assert (group.kind.window_tokens or 0) == window, (name, window, group.kind)
            chunk = getattr(specs[name], "attention_chunk_size", None)
            assert not chunk or group.kind.reach_tokens in (chunk, 0), (name, chunk, group.kind)
            assert getattr(spec, "head_size", 0) == getattr(specs[name], "head_size", 0)
        described.append((group_spec(group, config, cache, 0), [name for name, _ in layers]))
    return described


def _compare(
    architecture: str, kept: dict[int, dict[str, Any]], groups: dict[int, list[tuple[Any, list[str]]]]
) -> None:
    """Whether each rank of each size loads its own heads of what ranks of each size store under an equal name."""
    from vllm_plugin.model.groups import rank_shards

    for writer, reader in itertools.product(groups, groups):
        if [spec for spec, _ in groups[writer]] != [spec for spec, _ in groups[reader]]:
            continue
        for spec, names in groups[writer]:
            written = [rank_shards(spec, rank, writer) for rank in range(writer)]
            times = Counter(
                shard
                for one in written
                if one.writes
                for shard in range(one.shards.start, one.shards.start + one.shards.count)
            )
            assert times == Counter(range(spec.num_shards)), (architecture, writer, times)
            for name in names:
                total = getattr(kept[1][name], "num_kv_heads", None)
                if total is None:
                    assert writer == reader or spec.num_shards == 1, (architecture, name)
                    continue
                stored: dict[int, list[int]] = {}
                for rank, one in enumerate(written):
                    if one.writes:
                        held = _held(kept[writer][name].num_kv_heads, total, rank, writer)
                        for nth, shard in enumerate(range(one.shards.start, one.shards.start + one.shards.count)):
                            each = len(held) // one.shards.count
                            stored[shard] = held[nth * each : (nth + 1) * each] if each else held
                for rank in range(reader):
                    mine = rank_shards(spec, rank, reader).shards
                    loaded = [head for shard in range(mine.start, mine.start + mine.count) for head in stored[shard]]
                    held = _held(kept[reader][name].num_kv_heads, total, rank, reader)
                    assert loaded == held, (architecture, writer, reader, name, rank, loaded, held)


def _held(count: int, total: int, rank: int, tp_size: int) -> list[int]:
    """The heads of a layer that a rank holds, by their number."""
    if count == total:
        return list(range(total))  # All of them, on every rank.
    assert count == max(1, total // tp_size), f"{count} of {total} heads on each of {tp_size} ranks"
    return list(range(rank * total // tp_size, rank * total // tp_size + count))


def _cache(spec: Any) -> str:
    name = type(spec).__name__.removesuffix("Spec")
    heads = getattr(spec, "num_kv_heads", None)
    return name if heads is None else f"{name} {heads}"


def _sharing(groups: dict[int, list[tuple[Any, list[str]]]]) -> str:
    alike: list[list[int]] = []
    for size, described in groups.items():
        for those in alike:
            if [spec for spec, _ in groups[those[0]]] == [spec for spec, _ in described]:
                those.append(size)
                break
        else:
            alike.append([size])
    return ", ".join("=".join(map(str, those)) for those in alike)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = re.sub(r"(/tmp|/root|/work|/home)\S*|0x[0-9a-f]+|\[type=.*", "", text)
    return f"{type(error).__name__}: {text.replace('|', '/')[:100].strip()}"


def prepare() -> None:
    """Makes this process one that builds models."""
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="CRITICAL", TRANSFORMERS_VERBOSITY="critical")
    import importlib.machinery
    import importlib.util

    import torch
    import transformers  # noqa: F401  (first: it looks for what is installed)

    for name in ABSENT:
        if importlib.util.find_spec(name) is None:
            sys.meta_path.append(_Stubs(name))
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform

    registry._LazyRegisteredModel.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(
        self.load_model_cls()
    )
    from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl

    make_impl = MLACommonImpl.__init__

    known = set(inspect.signature(make_impl).parameters)

    def make_dense(self: Any, *args: Any, **options: Any) -> None:
        make_impl(self, *args, **{name: value for name, value in options.items() if name in known})

    MLACommonImpl.__init__ = make_dense
    choose = CpuPlatform.get_attn_backend_cls.__func__  # type: ignore[attr-defined]

    def choose_dense(cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> Any:
        return choose(cls, selected_backend, attn_selector_config._replace(use_sparse=False), num_heads)

    CpuPlatform.get_attn_backend_cls = classmethod(choose_dense)
    torch.cpu._is_amx_tile_supported = lambda: True
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
        initialize_model_parallel(1, 1)


class _Stubs:
    """Finds a module that is not installed, and all below it: each name in it is a mock."""

    def __init__(self, name: str):
        self._name = name

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        import importlib.machinery

        if name.split(".")[0] == self._name:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__name__, module.__spec__, module.__version__ = [], spec.name, spec, "0"
        return module

    def exec_module(self, module: Any) -> None:
        pass


def rows_of_page() -> dict[str, list[str]]:
    """Architecture -> its name, caches, sizes and outcome."""
    rows = re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \| ([\w, ]+) \|$", PAGE.read_text(), re.MULTILINE)
    found = {
        name: [name, caches.strip(), sizes.strip(), outcome]
        for caches, sizes, outcome, names in rows[1:]
        for name in names.split(", ")
    }
    return found


def _without_errors(verdict: str) -> str:
    """Why a model is not built depends on what else is installed, so the page does not say it."""
    if sizes := re.findall(r"(\d+(?:, \d+)*) not built", verdict):
        return f"agrees ({', '.join(sizes)} not built)"
    if verdict.startswith("refused: ConfigError"):
        return "refused: the engine does not start"
    return "not built" if verdict.startswith("not built") else verdict


def write_page(rows: list[list[str]]) -> None:
    """Writes the outcomes to the page, one row for all architectures that have the same caches, sizes and outcome."""
    counts = Counter(row[3].split(":")[0].split(" (")[0] for row in rows)
    summary = (
        f"{len(rows)} architectures: " + ", ".join(f"{count} {name}" for name, count in counts.most_common()) + "."
    )
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, caches, sizes, verdict in rows:
        alike.setdefault((_without_errors(verdict), caches, sizes), []).append(name)
    table = ["| KV caches, with KV heads of the model | TP sizes | outcome | architectures |", "|---|---|---|---|"]
    for outcome, caches, sizes in sorted(alike):
        names = ", ".join(alike[outcome, caches, sizes])
        table.append(f"| {caches} | {sizes} | {outcome} | {names} |")
    before, _ = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{summary}\n\n" + "\n".join(table) + "\n")


def main(names: list[str]) -> None:
    prepare()
    from vllm.model_executor.models.registry import ModelRegistry

    rows = []
    for name in [each for each in names if each != "--write"] or sorted(ModelRegistry.get_supported_archs()):
        try:
            row = judge(name)
        except AssertionError as error:
            row = Row(name, "", "", f"DISAGREES: {_one_line(error)}")
        rows.append([row.architecture, row.caches, row.sizes, row.verdict])
        print(json.dumps(rows[-1]), flush=True)
    if names == ["--write"]:
        write_page(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
