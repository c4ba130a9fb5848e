"""The namespace of an engine: everything of its configuration that its KV bytes depend on.

Both sides of the connector compute it from the configuration that vLLM was given, not from what constructors of models
have since changed in the workers' processes; the workers report their fingerprint, and the scheduler compares it with
its own. `kv_inputs.py` says which settings count, `weights.py` what identifies the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
import vllm
from vllm.logger import init_logger

from kvpool.protocol.errors import ConfigError
from kvpool.protocol.hashing import ALGORITHM, DEFAULT_SEED
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.security.name_key import named_by
from vllm_plugin.config import ConnectorConfig
from vllm_plugin.model.groups import group_spec, hash_tokens, make_groups, packs_its_own
from vllm_plugin.model.kv_inputs import environment, is_quantised, plugins, settings
from vllm_plugin.model.weights import Weights, describe_weights

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvpool.identity")

MAX_TEXT = 120
"""Settings of more characters stand in the namespace as a digest."""
DRAFT_WEIGHTS = "speculative.weights"
"""Names the draft model's weights: by digest, or MODEL@REVISION."""
_VOLATILE_KEYS = ("transformers_version", "_name_or_path", "name_or_path", "_commit_hash")


def namespace_spec(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorConfig, stage: int = 0
) -> NamespaceSpec:
    """The namespace of one pipeline stage of an engine.

    Args:
        kv_cache_config: of a worker of that stage.

    Raises:
        ConfigError: the model is not served, or its block hashes differ from process to process.
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
        **plugins(vllm_config),
        "hf_config": _short(_hf_config(model)),
        "quantization": str(model.quantization or ""),
    }
    if model.quantization_config:
        extra["quantization_config"] = _short(_canonical(model.quantization_config))
    speculative: Any = vllm_config.speculative_config
    if speculative is not None:
        extra |= _draft(speculative, vllm_config)
    if is_quantised(vllm_config):
        # Where a device lacks a type, kernels compute with another one.
        extra["device"] = f"{current_platform.device_name}/{current_platform.get_device_capability()}"
    encoder: Any = model.multimodal_config
    if getattr(encoder, "mm_encoder_attn_dtype", None) == "fp8" and not encoder.mm_encoder_fp8_scale_path:
        extra["multimodal.in_doubt"] = "scales that depend on the images before"
    extra |= {name: _short(_canonical(value)) for name, value in (*settings(vllm_config), *environment())}
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
    extra["speculative.hf_config"] = _short(_hf_config(draft))
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


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else hashlib.sha256(text.encode()).hexdigest()


def _canonical(value: Any) -> str:
    """A setting as JSON; files that it names stand there as digests of what they contain."""
    return json.dumps(_by_content(value), sort_keys=True, separators=(",", ":"), default=_plain)


def _by_content(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _by_content(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_by_content(each) for each in value]
    is_file = isinstance(value, str) and os.path.isfile(value)
    return hashlib.sha256(Path(value).read_bytes()).hexdigest() if is_file else value


def _plain(value: Any) -> Any:
    """A form of any setting that is equal in every process: no addresses."""
    if callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return _by_content(vars(value) if hasattr(value, "__dict__") else str(value))
