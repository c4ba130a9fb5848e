"""Which settings of vLLM, and which code beside vLLM's own, can change what a block of KV contains.

The table of settings is in `kv_fields.py`. Code is that of plugins' distributions, and of classes in vLLM's place.

Two engines may share a block only if they would have computed the same function of the same tokens. Differences in
rounding alone (batch sizes, tensor parallelism, compilation, and kernels where no numbers are quantised) do not count:
vLLM's own prefix cache mixes them.

A setting that the table does not know, because a newer vLLM has added it, is part of the identity as soon as it is not
at its default; an environment variable as soon as it is set.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.utils import deep_gemm
from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum

from vllm_plugin.model.kv_fields import FIELDS, INDEPENDENT, VARIABLES, Effect
from vllm_plugin.model.weights import model_directory, tokenizer_digest

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

ROPE_BY_LENGTH = "longrope"
"""A rope whose factors vLLM chooses by max_model_len, for every position, whatever the architecture."""
_FLOATS = ("auto", "float", "float16", "bfloat16", "float32", "half")
_KNOWN = ("vllm", "vllm_plugin")
"""Packages whose releases count by themselves, or change no KV."""
_FOREIGN_CODE = re.compile(r'"([\w.-]+/[\w.-]+)--[\w.]+"')
"""A class in another repository of the hub, as in `auto_map`."""


def effect(section: str, name: str) -> tuple[Effect, str]:
    """How a field of vLLM's configuration takes part, and why; or a variable, of the section "environment"."""
    for how, patterns in (VARIABLES if section == "environment" else FIELDS.get(section, {})).items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return how
    return Effect.VALUE, "not known to kvpool"


def sections(vllm_config: VllmConfig) -> Iterator[tuple[str, Any]]:
    """The parts of an engine's configuration that are looked at field by field."""
    yield "vllm_config", vllm_config
    for name in FIELDS:
        part = getattr(vllm_config.model_config if name == "multimodal_config" else vllm_config, name, None)
        if part is not None:
            yield name, part


def is_quantised(vllm_config: VllmConfig) -> bool:
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


def settings(vllm_config: VllmConfig) -> Iterator[tuple[str, Any]]:
    """The fields that are part of this engine's identity and not at their default, by dotted name."""
    model = vllm_config.model_config
    is_independent = (
        model.architecture in INDEPENDENT and not model.model_class_overrides and not own_classes(vllm_config)
    )
    counting = {Effect.VALUE}
    parallel = vllm_config.parallel_config
    if is_quantised(vllm_config):
        counting.add(Effect.QUANTISED)
        if deep_gemm.is_deep_gemm_supported() and envs.VLLM_USE_DEEP_GEMM_E8M0:
            yield "scales", "powers of two"
        if parallel.enable_expert_parallel:  # What moves tokens between ranks decides which kernels experts have.
            yield "parallel_config.experts", f"{parallel.all2all_backend}, {parallel.data_parallel_size > 1}"
    if not is_independent:
        counting.add(Effect.ARCHITECTURE)
    if not is_independent or model.multimodal_config is not None:
        counting.add(Effect.PROCESSING)
        if model.trust_remote_code and (repository := foreign_code(model)):
            yield "code.in_doubt", f"{repository} may have changed: vLLM runs its newest code"
    is_rope_by_length = ROPE_BY_LENGTH in str(model.hf_config.to_dict())
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


def environment() -> Iterator[tuple[str, str]]:
    """The environment variables of vLLM that are set and part of this engine's identity."""
    from vllm.envs import compile_factors

    for name in compile_factors():  # All that vLLM reads but paths, ports, logs and limits.
        if name in os.environ and effect("environment", name)[0] is Effect.VALUE:
            yield f"environment.{name}", os.environ[name]


def default_of(field: Any) -> Any:
    """What a field is unless somebody sets it."""
    if hasattr(field.default, "get_default"):  # Pydantic's description of a field.
        return field.default.get_default(call_default_factory=True, validated_data={})
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def plugins(vllm_config: VllmConfig) -> dict[str, str]:
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


def foreign_code(model: ModelConfig) -> str:
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
