"""The namespace of an engine: everything of its configuration that its KV bytes depend on.

Both sides of the connector compute it from the same configuration objects, so they agree; where the scheduler's do not
say all (several pipeline stages, layers of several kinds in one group), the workers tell it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from typing import TYPE_CHECKING, Any

from kvpool.errors import ConfigError
from kvpool.hashing import ALGORITHM, DEFAULT_SEED
from kvpool.namespace import NamespaceSpec
from vllm_plugin.config import ConnectorConfig
from vllm_plugin.groups import group_spec, hash_tokens, make_groups, packs_its_own
from vllm_plugin.weights import weights_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

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
    digest = weights_digest(model.model, model.revision)
    return NamespaceSpec(
        # Where the weights themselves are known, it does not matter where they lie.
        model=os.path.basename(os.path.normpath(model.model)) if digest and os.path.isdir(model.model) else model.model,
        revision=model.revision or "",
        weights_digest=digest,
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
        extra=_extra(vllm_config),
        tenant=config.tenant,
        salt=config.salt,
    )


def _page_format(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """How one KV head's page is packed. GPUs keep token by token; CPU kernels pack for their instruction set."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    if vllm_config.device_config.device_type == "cpu":
        amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
        return f"cpu/{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}{'/amx' if amx else ''}"
    packing = "token,kv"
    if packs_its_own(kv_cache_config):
        # Nobody but the backend knows its order: the same release on the same kind of device chooses and packs alike.
        backend = getattr(vllm_config.attention_config, "backend", None)
        shuffle = os.environ.get("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "")
        packing = f"{vllm.__version__}/{current_platform.get_device_capability()}/{backend}/{shuffle}"
    if "fp8" in vllm_config.cache_config.cache_dtype:
        packing += f"/{current_platform.fp8_dtype()}"
    return f"{current_platform.device_name}/{packing}"


def _extra(vllm_config: VllmConfig) -> tuple[tuple[str, str], ...]:
    model = vllm_config.model_config
    hf_config = {key: value for key, value in model.hf_config.to_dict().items() if key not in _VOLATILE_KEYS}
    text = _canonical(hf_config)
    extra = {
        "hf_config": hashlib.sha256(text.encode()).hexdigest(),
        "quantization": str(model.quantization or ""),
    }
    # Settings that vLLM adds to what the checkpoint says; absent in some versions, and most often unset.
    for name in ("quantization_config", "model_class_overrides", "code_revision", "multimodal_config"):
        value = getattr(model, name, None)
        if value:
            extra[name] = hashlib.sha256(_canonical(value).encode()).hexdigest()
    if "longrope" in text:
        # vLLM takes LongRoPE's short or long factors, for every position, by this limit.
        extra["max_model_len"] = str(model.max_model_len)
    load_format = str(vllm_config.load_config.load_format)
    if load_format.endswith("dummy"):
        extra["load_format"] = "dummy"
    speculative: Any = vllm_config.speculative_config
    if speculative is not None:
        extra["speculative"] = f"{speculative.method}:{getattr(speculative, 'model', '')}"
    return tuple(extra.items())


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    """A form of any setting that is equal in every process: no addresses."""
    if callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return vars(value) if hasattr(value, "__dict__") else str(value)
