"""The namespace of an engine: everything of its configuration, and of the code that it runs, that its KV depends on.

Both sides of the connector compute it from the configuration that vLLM was given, not from what constructors of models
have since changed in the workers' processes; the workers report their fingerprint, and the scheduler compares it with
its own. `kv_fields.py` says which settings count, `weights.py` what identifies the weights.

Two engines may share a block only if they would have computed the same function of the same tokens. Differences in
rounding alone (batch sizes, tensor parallelism, compilation, and kernels where no numbers are quantised) do not count:
vLLM's own prefix cache mixes them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
import vllm
from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.utils import deep_gemm
from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum

from kvpool.protocol.errors import ConfigError
from kvpool.protocol.hashing import ALGORITHM, DEFAULT_SEED
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.security.name_key import named_by
from vllm_plugin.config import ConnectorConfig
from vllm_plugin.model.groups import group_spec, hash_tokens, make_groups, packs_its_own
from vllm_plugin.model.kv_fields import INDEPENDENT, Effect, default_of, effect, sections
from vllm_plugin.model.weights import Weights, describe_weights, model_directory, tokenizer_digest

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvpool.identity")

MAX_TEXT = 120
"""Settings of more characters stand in the namespace as a digest."""
DRAFT_WEIGHTS = "speculative.weights"
"""Names the draft model's weights: by digest, or MODEL@REVISION."""
_VOLATILE_KEYS = ("transformers_version", "_name_or_path", "name_or_path", "_commit_hash")
_ROPE_BY_LENGTH = "longrope"
"""A rope whose factors vLLM chooses by max_model_len, for every position, whatever the architecture."""
_FLOATS = ("auto", "float", "float16", "bfloat16", "float32", "half")
_KNOWN = ("vllm", "vllm_plugin")
"""Packages whose releases count by themselves, or change no KV."""
_FOREIGN_CODE = re.compile(r'"([\w.-]+/[\w.-]+)--[\w.]+"')
"""A class in another repository of the hub, as in `auto_map`."""


def namespace_spec(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorConfig, stage: int = 0
) -> NamespaceSpec:
    """The namespace of one pipeline stage of an engine; `kv_cache_config` is that of a worker of the stage.

    Raises ConfigError if the model is not served, or if its block hashes differ from process to process.
    """
    groups = make_groups(vllm_config, kv_cache_config)
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    if cache.prefix_caching_hash_algo != ALGORITHM:
        raise ConfigError(
            f"prefix_caching_hash_algo = {cache.prefix_caching_hash_algo!r} may name equal blocks differently in two "
            f"processes; start vLLM with --prefix-caching-hash-algo {ALGORITHM}"
        )
    weights = describe_weights(model, vllm_config.load_config)
    spec = NamespaceSpec(
        model=weights.model,
        revision=weights.revision,
        weights_digest=weights.digest,
        weights_epoch=config.weights_epoch,
        model_dtype=str(model.dtype),
        kv_cache_dtype=cache.cache_dtype,
        page_format=_page_format(vllm_config, kv_cache_config),
        hash_algorithm=ALGORITHM,
        hash_seed=os.environ.get("PYTHONHASHSEED", DEFAULT_SEED),
        hash_block_tokens=hash_tokens(vllm_config, kv_cache_config),
        num_pipeline_stages=parallel.pipeline_parallel_size,
        pipeline_stage=stage,
        groups=tuple(group_spec(group, vllm_config, kv_cache_config, config.num_shards) for group in groups),
        extra=_extra(vllm_config, weights),
        tenant=config.tenant,
        salt=config.salt,
    )
    return named_by(spec, config.name_key())


def is_named(spec: NamespaceSpec) -> bool:
    """Whether a namespace names all weights by the content of their files."""
    names = dict(spec.extra).get(DRAFT_WEIGHTS, "")
    return bool(spec.weights_digest) and "@" not in names and not is_in_doubt(spec)


def is_in_doubt(spec: NamespaceSpec) -> bool:
    """Whether the files that a namespace names may not be those that the engine has loaded."""
    return any(name.endswith("in_doubt") for name, _ in spec.extra)


def _page_format(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """How one KV head's page is packed. GPUs keep token by token; CPU kernels pack for their instruction set."""
    import torch
    from vllm.platforms import current_platform

    if vllm_config.device_config.device_type == "cpu":
        amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
        return f"cpu/{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}{'/amx' if amx else ''}"
    packing = "token,kv"
    if packs_its_own(kv_cache_config):
        # Only the backend knows its order: the same release on the same kind of device chooses and packs alike.
        attention = vllm_config.attention_config
        backend = f"{getattr(attention, 'backend', None)}/{getattr(attention, 'backend_per_kind', None)}"
        shuffle = os.environ.get("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "")
        packing = f"{current_platform.get_device_capability()}/{backend}/{shuffle}"
    if "fp8" in vllm_config.cache_config.cache_dtype:
        packing += f"/{current_platform.fp8_dtype()}"
    return f"{current_platform.device_name}/{packing}"


def _extra(vllm_config: VllmConfig, weights: Weights) -> tuple[tuple[str, str], ...]:
    from vllm.platforms import current_platform

    model = vllm_config.model_config
    extra = {
        "vllm": vllm.__version__,  # A release may mend a model, or how it sees an image.
        "transformers": transformers.__version__,
        **dict(weights.settings),
        "architecture": model.architecture,
        **_plugins(vllm_config),
        "hf_config": _hf_config(model),
        "quantization": str(model.quantization or ""),
    }
    if model.quantization_config:
        extra["quantization_config"] = _canonical(model.quantization_config)
    speculative: Any = vllm_config.speculative_config
    if speculative is not None:
        extra |= _draft(speculative, vllm_config)
    if _is_quantised(vllm_config):
        # Where a device lacks a type, kernels compute with another one.
        extra["device"] = f"{current_platform.device_name}/{current_platform.get_device_capability()}"
    encoder: Any = model.multimodal_config
    if getattr(encoder, "mm_encoder_attn_dtype", None) == "fp8" and not encoder.mm_encoder_fp8_scale_path:
        extra["multimodal.in_doubt"] = "scales that depend on the images before"
    extra |= {name: _canonical(value) for name, value in (*_settings(vllm_config), *_environment())}
    if (private := "vllm_config.additional_config") in extra:
        # It may hold secrets, and the pool shows namespaces to other users.
        extra[private] = hashlib.sha256(extra[private].encode()).hexdigest()
    return tuple(extra.items())


def _draft(speculative: Any, vllm_config: VllmConfig) -> dict[str, str]:
    """The draft model: its layers' KV lies beside the model's own."""
    extra = {"speculative.method": str(speculative.method)}
    draft, model = getattr(speculative, "draft_model_config", None), vllm_config.model_config
    if draft is None or (draft.model, draft.revision) == (model.model, model.revision):
        return extra  # Drafts by the model's own weights, or by no model.
    weights = describe_weights(draft, getattr(speculative, "draft_load_config", None) or vllm_config.load_config)
    extra[DRAFT_WEIGHTS] = weights.digest or f"{weights.model}@{weights.revision}"
    extra |= {f"speculative.{name}": value for name, value in weights.settings}
    extra["speculative.architecture"] = str(draft.architecture)
    extra["speculative.hf_config"] = _hf_config(draft)
    extra["speculative.quantization"] = str(draft.quantization or "")
    return extra


def _hf_config(model: ModelConfig) -> str:
    """The checkpoint's configuration as vLLM reads it, before any model was built from it."""
    try:
        from vllm.transformers_utils.config import get_config

        overrides: Any = model.hf_overrides
        is_function = callable(overrides)
        config = get_config(
            model.hf_config_path or model.model,
            model.trust_remote_code,
            getattr(model, "_hf_config_revision", None) or model.revision,
            model.code_revision,
            model.config_format,
            hf_overrides_kw=(
                {} if is_function else {key: value for key, value in overrides.items() if not isinstance(value, dict)}
            ),
            hf_overrides_fn=overrides if is_function else None,
            token=model.hf_token,
        )
    except Exception as error:
        logger.warning(
            "kvpool cannot read the configuration file of %s (%s): the engine shares KV with engines whose "
            "configuration in memory is equal",
            model.model,
            error,
        )
        config = model.hf_config
    return _canonical({key: value for key, value in config.to_dict().items() if key not in _VOLATILE_KEYS})


def _is_quantised(vllm_config: VllmConfig) -> bool:
    """Whether kernels see weights, activations or KV in a type with scales, of the model or of its draft."""
    model, draft = vllm_config.model_config, vllm_config.speculative_config
    encoder: Any = model.multimodal_config
    caches = {vllm_config.cache_config.cache_dtype, getattr(draft, "kv_cache_dtype", None) or "auto"}
    return bool(
        model.quantization
        or model.quantization_config
        or getattr(getattr(draft, "draft_model_config", None), "quantization", None)
        or getattr(encoder, "mm_encoder_attn_dtype", None)
        or not caches <= {*_FLOATS}
    )


def _settings(vllm_config: VllmConfig) -> Iterator[tuple[str, Any]]:
    """The fields that are part of this engine's identity and not at their default, by dotted name."""
    model = vllm_config.model_config
    is_independent = (
        model.architecture in INDEPENDENT and not model.model_class_overrides and not own_classes(vllm_config)
    )
    counting = {Effect.VALUE}
    parallel = vllm_config.parallel_config
    if _is_quantised(vllm_config):
        counting.add(Effect.QUANTISED)
        if deep_gemm.is_deep_gemm_supported() and envs.VLLM_USE_DEEP_GEMM_E8M0:
            yield "scales", "powers of two"
        if parallel.enable_expert_parallel:  # What moves tokens between ranks decides which kernels experts have.
            yield "parallel_config.experts", f"{parallel.all2all_backend}, {parallel.data_parallel_size > 1}"
    if not is_independent:
        counting.add(Effect.ARCHITECTURE)
    if not is_independent or model.multimodal_config is not None:
        counting.add(Effect.PROCESSING)
        if model.trust_remote_code and (repository := _foreign_code(model)):
            yield "code.in_doubt", f"{repository} may have changed: vLLM runs its newest code"
    is_rope_by_length = _ROPE_BY_LENGTH in str(model.hf_config.to_dict())
    for section, part in sections(vllm_config):
        for field in dataclasses.fields(part):
            kind, _ = effect(section, field.name)
            counts = kind in counting
            if (section, field.name) == ("model_config", "max_model_len"):
                counts = counts or is_rope_by_length
            if not counts:
                continue
            value = getattr(part, field.name, None)
            if (section, field.name) == ("model_config", "generation_config"):
                value = model.try_get_generation_config()  # Its content, wherever it was read from.
            if (section, field.name) == ("model_config", "tokenizer"):
                value = None if value == model.model else tokenizer_digest(str(value), model.tokenizer_revision)
            if value != default_of(field):
                yield f"{section}.{field.name}", value


def _environment() -> Iterator[tuple[str, str]]:
    """The environment variables of vLLM that are set and part of this engine's identity."""
    for name in envs.compile_factors():  # All that vLLM reads but paths, ports, logs and limits.
        if name in os.environ and effect("environment", name)[0] is Effect.VALUE:
            yield f"environment.{name}", os.environ[name]


def _plugins(vllm_config: VllmConfig) -> dict[str, str]:
    """What identifies the code of plugins, by name: entry points of vLLM's groups, and classes.

    A class may also be registered by a script without entry points.
    """
    found = {}
    for distribution in metadata.distributions():
        for point in distribution.entry_points:
            is_loaded = envs.VLLM_PLUGINS is None or point.name in envs.VLLM_PLUGINS
            if point.group.startswith("vllm.") and is_loaded and point.module.partition(".")[0] not in _KNOWN:
                digests = [code(module) for module in sorted({point.module, *_modules(distribution)})]
                found[f"plugin.{point.group}.{point.name}"] = ":".join([point.value, *digests])
    found |= {f"class.{name}": f"{place}:{code(place.partition(':')[0])}" for name, place in own_classes(vllm_config)}
    return found


def _modules(distribution: metadata.Distribution) -> list[str]:
    """The outermost modules and packages that a distribution has installed."""
    if told := distribution.read_text("top_level.txt"):
        return told.split()
    names = {file.parts[0].removesuffix(".py") for file in distribution.files or () if file.suffix == ".py"}
    return [name for name in names if name.isidentifier()]


def own_classes(vllm_config: VllmConfig) -> list[tuple[str, str]]:
    """(what it is, MODULE:CLASS) of architectures, quantisations, attention backends, workers and schedulers that are
    registered or chosen, and not vLLM's own.

    All architectures count: a model may be built of others, and have a draft.
    """
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    found: dict[str, Any] = dict(model.registry.models)
    for each in (model, getattr(speculative, "draft_model_config", None)):
        if name := getattr(each, "quantization", None):
            found[f"quantization {name}"] = get_quantization_config(name)
    for backend in (*AttentionBackendEnum, *MambaAttentionBackendEnum):
        if backend.is_overridden():
            found[f"attention {backend.name}"] = backend.get_path()
    found["worker"] = vllm_config.parallel_config.worker_cls
    found["worker extension"] = vllm_config.parallel_config.worker_extension_cls
    found["scheduler"] = vllm_config.scheduler_config.scheduler_cls
    places = []
    for name, registered in sorted(found.items()):
        place = getattr(registered, "model_cls", registered)
        if isinstance(place, str):
            module, _, class_name = place.rpartition(".")
        else:
            module = str(getattr(place, "module_name", None) or getattr(place, "__module__", ""))
            class_name = str(getattr(place, "class_name", None) or getattr(place, "__qualname__", ""))
        if class_name and module and module.partition(".")[0] != "vllm":
            places.append((name, f"{module}:{class_name}"))
    return places


def _foreign_code(model: ModelConfig) -> str:
    """A repository beside the model's own whose newest code an engine that trusts remote code runs; empty for none."""
    place = model_directory(model)
    for file in sorted(place.glob("*config.json")) if place is not None else ():
        if found := _FOREIGN_CODE.search(file.read_text(errors="replace")):
            return found[1]
    return ""


def code(module: str) -> str:
    """SHA-256 of the files of a module's outermost package, or of its only file or archive; empty without any.

    A namespace package has several directories. Compiled kernels count as sources do.
    """
    outermost = module.partition(".")[0]
    running = sys.modules.get(outermost)
    spec = None if running is not None else util.find_spec(outermost)
    places = getattr(running, "__path__", None) or getattr(spec, "submodule_search_locations", None)
    places = places or filter(None, [getattr(running, "__file__", None) or getattr(spec, "origin", None)])
    found = [(os.path.relpath(file, root), _sha256(file)) for root in map(Path, places) for file in _files(root)]
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest() if found else ""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(place: Path) -> list[Path]:
    """The files of a directory without bytecode; a file by itself; the archive that holds the place."""
    if place.is_dir():
        return [file for file in place.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    return [each for each in (place, *place.parents) if each.is_file()][:1]


def _canonical(value: Any) -> str:
    """A setting as JSON, or its digest if that is long; files that it names stand there as digests of their content."""
    text = json.dumps(_by_content(value), sort_keys=True, separators=(",", ":"), default=_plain)
    return text if len(text) <= MAX_TEXT else hashlib.sha256(text.encode()).hexdigest()


def _by_content(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _by_content(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_by_content(each) for each in value]
    return _sha256(Path(value)) if isinstance(value, str) and os.path.isfile(value) else value


def _plain(value: Any) -> Any:
    """A form of any setting that is equal in every process: no addresses."""
    if callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return _by_content(vars(value) if hasattr(value, "__dict__") else str(value))
