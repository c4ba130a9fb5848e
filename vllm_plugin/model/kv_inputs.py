"""Which settings of vLLM can change what a block of KV contains; the table of them is in `kv_fields.py`.

`python -m vllm_plugin.model.kv_inputs` prints the table.

Two engines may share a block only if they would have computed the same function of the same tokens. Differences in
rounding alone (batch sizes, tensor parallelism, compilation, and kernels where no numbers are quantised) do not count:
vLLM's own prefix cache mixes them.

A setting that the table does not know, because a newer vLLM has added it, is part of the identity as soon as it is not
at its default; an environment variable as soon as it is set.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.utils import deep_gemm

from vllm_plugin.model.kv_fields import FIELDS, INDEPENDENT, VARIABLES, Effect
from vllm_plugin.model.plugins import foreign_code, own_classes
from vllm_plugin.model.weights import tokenizer_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ROPE_BY_LENGTH = "longrope"
"""A rope whose factors vLLM chooses by max_model_len, for every position, whatever the architecture."""
_FLOATS = ("auto", "float", "float16", "bfloat16", "float32", "half")


def effect(section: str, field: str) -> tuple[Effect, str]:
    """How a field of vLLM's configuration takes part, and why."""
    for (kind, reason), fields in FIELDS.get(section, {}).items():
        if field in fields:
            return kind, reason
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
        if name in os.environ and variable_effect(name)[0] is Effect.VALUE:
            yield f"environment.{name}", os.environ[name]


def variable_effect(name: str) -> tuple[Effect, str]:
    """How an environment variable of vLLM takes part, and why."""
    for (kind, reason), patterns in VARIABLES.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return kind, reason
    return Effect.VALUE, "not known to kvpool"


def default_of(field: Any) -> Any:
    """What a field is unless somebody sets it."""
    if hasattr(field.default, "get_default"):  # Pydantic's description of a field.
        return field.default.get_default(call_default_factory=True, validated_data={})
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def table() -> str:
    """The fields as a table in Markdown."""
    rows = [
        f"| `{section}` | {', '.join(f'`{name}`' for name in fields)} | {kind.value} | {reason} |"
        for section, parts in FIELDS.items()
        for (kind, reason), fields in parts.items()
    ]
    rows += [
        f"| environment | {', '.join(f'`{name}`' for name in patterns)} | {kind.value} | {reason} |"
        for (kind, reason), patterns in VARIABLES.items()
    ]
    return "\n".join(["| section | fields | part of the identity | because |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
