"""The namespace of an engine: everything of its configuration that its KV bytes depend on.

Both sides of the connector compute it from the same configuration objects, so they always agree.
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
from vllm_plugin.groups import check_supported, group_spec
from vllm_plugin.weights import weights_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_VOLATILE_KEYS = ("transformers_version", "_name_or_path", "name_or_path", "_commit_hash")


def namespace_spec(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorConfig) -> NamespaceSpec:
    """The engine's namespace.

    Raises:
        ConfigError: the model is not served, or its block hashes differ from process to process.
    """
    check_supported(vllm_config, kv_cache_config)
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    if cache.prefix_caching_hash_algo != ALGORITHM:
        raise ConfigError(
            f"prefix_caching_hash_algo = {cache.prefix_caching_hash_algo!r} may name equal blocks differently in two "
            f"processes; start vLLM with --prefix-caching-hash-algo {ALGORITHM}"
        )
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    digest = weights_digest(model.model, model.revision)
    return NamespaceSpec(
        # Where the weights themselves are known, it does not matter where they lie.
        model=os.path.basename(os.path.normpath(model.model)) if digest and os.path.isdir(model.model) else model.model,
        revision=model.revision or "",
        weights_digest=digest,
        weights_epoch=config.weights_epoch,
        model_dtype=str(model.dtype),
        kv_cache_dtype=f"{spec.dtype}/{cache.cache_dtype}/{spec.kv_quant_mode.name}",
        page_format=_page_format(vllm_config.device_config.device_type),
        hash_algorithm=ALGORITHM,
        hash_seed=os.environ.get("PYTHONHASHSEED", DEFAULT_SEED),
        hash_block_tokens=spec.block_size,
        groups=(group_spec(group, model.get_total_num_kv_heads(), parallel.tensor_parallel_size, config.num_shards),),
        extra=_extra(vllm_config),
        tenant=config.tenant,
        salt=config.salt,
    )


def _page_format(device_type: str) -> str:
    """How one KV head's page is packed. GPUs keep token by token; CPU kernels pack for their instruction set."""
    if device_type != "cpu":
        return "token,kv"
    import torch

    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return f"cpu/{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}{'/amx' if amx else ''}"


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
