"""The table of every field of vLLM's configuration, and how it takes part in the identity of KV.

`Effect.NONE` needs a reason that holds for every model: only then may two engines differ in the field and share blocks.

A setting that the table does not know, because a newer vLLM has added it, is part of the identity as soon as it is not
at its default; an environment variable as soon as it is set.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Effect(enum.Enum):
    """How a setting takes part in the identity of an engine's KV."""

    NAMED = "always"
    """Part of every identity: a field of `NamespaceSpec`, or what it is resolved to."""
    VALUE = "if not default"
    ARCHITECTURE = "by architecture"
    """As with `VALUE`, unless the architecture is one of `INDEPENDENT`."""
    PROCESSING = "by architecture, and with media"
    """As with `VALUE`, unless the architecture is one of `INDEPENDENT` and sees nothing but text."""
    QUANTISED = "if numbers are quantised"
    """As with `VALUE` where weights, activations or KV are quantised."""
    NONE = "never"


Fields = Mapping[tuple[Effect, str], tuple[str, ...]]

_CAPACITY = (Effect.NONE, "how much is kept or computed at a time, not what")
_KERNELS = (Effect.QUANTISED, "which kernels compute; where numbers are quantised, kernels choose types and scales")
_EXECUTION = (Effect.NONE, "how the same kernels are run")
_OUTPUT = (Effect.NONE, "what happens to logits after the KV is written")
_TOKENS = (Effect.NONE, "how text becomes tokens; block hashes name the tokens themselves")
_TOKENIZER = (Effect.PROCESSING, "some models compute with it, and it may prepare images and sounds")
_SERVING = (Effect.NONE, "serving, paths and access")

# fmt: off
FIELDS: Mapping[str, Fields] = {
    "model_config": {
        (Effect.NAMED, "the weights: a digest of their bytes, else name, commit and loader"): (
            "model", "model_weights", "revision",
        ),
        (Effect.NAMED, "read again from where it lies: constructors of models change the copy in memory"): (
            "hf_config", "hf_text_config", "hf_config_path", "config_format",
        ),
        (Effect.NAMED, "the architecture that vLLM resolved it to"): ("model_impl",),
        (Effect.NAMED, "the type of activations, and of KV unless another is set"): ("dtype",),
        (Effect.NAMED, "how weights and activations are quantised"): ("quantization", "quantization_config"),
        (Effect.NAMED, "its own section below"): ("multimodal_config",),
        (Effect.VALUE, "overrides of the checkpoint's configuration, rope scaling among them"): ("hf_overrides",),
        (Effect.VALUE, "the code that is run"): ("code_revision", "model_class_overrides"),
        (Effect.VALUE, "what a token attends to"): ("disable_sliding_window",),
        (Effect.VALUE, "attributes that vLLM derives from the checkpoint"): (
            "is_submodel_config", "word_embeddings_untied_by_checkpoint",
        ),
        (Effect.ARCHITECTURE, "Llama 4 scales its queries by it, LongRoPE chooses its factors"): ("max_model_len",),
        (Effect.ARCHITECTURE, "Llama 4 reads attn_temperature_tuning from it"): (
            "generation_config", "override_generation_config",
        ),
        (Effect.PROCESSING, "whether code of the checkpoint may replace vLLM's"): ("trust_remote_code",),
        _TOKENIZER: ("tokenizer", "tokenizer_mode", "tokenizer_revision"),
        (Effect.ARCHITECTURE, "adapters for pooling may replace layers"): ("runner", "convert"),
        (Effect.ARCHITECTURE, "random numbers in a forward pass"): ("seed",),
        _TOKENS: ("skip_tokenizer_init", "enable_prompt_embeds"),
        _OUTPUT: (
            "return_sampling_mask", "max_logprobs", "logprobs_mode", "use_fp64_gumbel", "enable_trace_replay",
            "logits_processors", "io_processor_plugin", "renderer_num_workers", "pooler_config",
        ),
        _EXECUTION: ("enforce_eager", "disable_cascade_attn"),
        _CAPACITY: ("spec_target_max_model_len",),
        _SERVING: (
            "allowed_local_media_path", "allowed_media_domains", "allow_deprecated_quantization", "hf_token",
            "served_model_name", "enable_sleep_mode", "sleep_preserve_parameter_names", "sleep_mode_backend",
            "sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend", "enable_cumem_allocator",
        ),
    },
    "multimodal_config": {
        (Effect.VALUE, "how an image, a video or a sound becomes embeddings"): (
            "language_model_only", "media_io_kwargs", "mm_processor_kwargs", "mm_device_do_normalize",
            "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "interleave_mm_strings", "video_pruning_rate",
            "video_pruning_method", "allow_missing_mm_embeddings", "mm_hasher_algorithm",
        ),
        _CAPACITY: (
            "limit_per_prompt", "mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb",
            "mm_ipc_gpu_memory_gb", "skip_mm_profiling", "mm_encoder_only",
        ),
        _KERNELS: ("mm_encoder_attn_backend",),
        _EXECUTION: ("mm_encoder_tp_mode",),
        _SERVING: (
            "enable_mm_embeds", "mm_tensor_ipc", "mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin",
        ),
    },
    "load_config": {
        (Effect.NAMED, "part of what weights are (weights.py), where it decides which files are read"): (
            "load_format", "download_dir", "model_loader_extra_config",
        ),
        (Effect.NONE, "how files are read, not which; every weight file counts, also an ignored one"): (
            "safetensors_load_strategy", "safetensors_prefetch_num_threads", "safetensors_prefetch_block_size",
            "device", "ignore_patterns", "use_tqdm_on_load", "pt_load_map_location",
        ),
    },
    "cache_config": {
        (Effect.NAMED, "block sizes, types and layouts of the KV-cache groups"): (
            "block_size", "user_specified_block_size", "cache_dtype", "kv_cache_dtype_skip_layers", "kv_cache_layout",
            "sliding_window", "mamba_page_size_padded", "skip_page_size_padded", "mamba_block_size",
            "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode", "effective_attention_block_size",
            "is_attention_free",
        ),
        (Effect.NAMED, "how blocks are named"): ("prefix_caching_hash_algo", "hash_block_size", "prefix_match_unit"),
        (Effect.VALUE, "which layers see the tokens of a prompt"): ("kv_sharing_fast_prefill", "swa_bounded_replay"),
        (Effect.VALUE, "what a state is made of"): (
            "use_replayssm", "use_kda_recoverssm", "replayssm_buffer_len", "enable_mamba_shared_prefix_checkpoint",
        ),
        _CAPACITY: (
            "gpu_memory_utilization", "num_gpu_blocks_override", "enable_prefix_caching",
            "prefix_cache_retention_interval", "num_gpu_blocks", "num_cpu_blocks", "kv_cache_size_tokens",
            "kv_cache_max_concurrency", "cache_hit_alignment_tokens", "kv_cache_memory_bytes", "kv_offloading_size",
            "kv_offloading_backend", "simple_cpu_offload_num_blocks", "_block_size_resolved",
        ),
    },
    "attention_config": {
        (Effect.VALUE, "what a token attends to, and in which precision"): (
            "use_non_causal", "indexer_kv_dtype", "indexer_sparse_logits", "hisparse_config",
            "use_prefill_query_quantization", "disable_flashinfer_q_quantization",
        ),
        _KERNELS: (
            "backend", "backend_per_kind", "minimax_m3_msa_decode_backend", "flash_attn_version",
            "use_trtllm_attention", "mla_prefill_backend", "trtllm_ragged_backend",
        ),
        _EXECUTION: (
            "flash_attn_max_num_splits_for_cuda_graph", "tokenspeed_mla_min_split_kv",
            "tq_max_kv_splits_for_cuda_graph", "sparse_mla_force_mqa", "sparse_mla_prefill_workspace_factor",
            "flex_attn_block_m", "flex_attn_block_n", "flex_attn_q_block_size", "flex_attn_kv_block_size",
            "indexer_tp_shard_min_rows", "minimax_m3_indexer_cp",
        ),
    },
    "mamba_config": {
        (Effect.VALUE, "how states are rounded"): ("enable_stochastic_rounding", "stochastic_rounding_philox_rounds"),
        _KERNELS: ("backend", "ssu_algorithm"),
    },
    "kernel_config": {
        _KERNELS: ("moe_backend", "linear_backend", "linear_backend_per_quant"),
        _EXECUTION: (
            "ir_op_priority", "enable_flashinfer_autotune", "enable_rocm_segmented_attn_autotune",
            "enable_cutedsl_warmup", "enable_jit_warmup", "sparse_indexer_topk_backend",
        ),
    },
    "speculative_config": {
        (Effect.NAMED, "draft layers are groups of their own; the draft model's weights and configuration"): (
            "method", "model", "revision", "code_revision", "quantization", "kv_cache_dtype", "draft_model_config",
            "draft_load_config", "target_model_config",
        ),
        (Effect.VALUE, "what draft layers are given"): (
            "index_share_for_mtp_iteration", "parallel_drafting", "use_heterogeneous_vocab",
        ),
        _CAPACITY: (
            "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "max_model_len", "prompt_lookup_max",
            "prompt_lookup_min", "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob", "dspark_draft_topk",
            "disable_eagle_block_drop",
        ),
        (Effect.NONE, "with a connector vLLM keeps hashes without lookahead"): ("disable_lookahead_block_hashes",),
        _OUTPUT: (
            "rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length",
            "enable_adaptive_verification", "draft_sample_method", "draft_lm_head_quantization",
            "fly_entropy_threshold", "fly_entropy_top_k", "fly_window_size", "xpress_topc",
        ),
        _KERNELS: ("moe_backend", "attention_backend"),
        _EXECUTION: (
            "enforce_eager", "draft_tensor_parallel_size", "tensor_parallel_size", "disable_padded_drafter_batch",
            "use_local_argmax_reduction", "target_parallel_config", "draft_parallel_config",
        ),
    },
    "lora_config": {
        (Effect.VALUE, "which layers an adapter reaches, and in which precision"): (
            "lora_dtype", "target_modules", "enable_tower_connector_lora",
        ),
        (Effect.NONE, "an adapter is named by the block hashes and by its content, request by request"): (
            "max_lora_rank", "max_loras", "fully_sharded_loras", "max_cpu_loras", "default_mm_loras",
            "specialize_active_lora", "enable_mixed_moe_lora_format", "enable_moe_shared_loras", "max_lora_cls_labels",
        ),
    },
    "vllm_config": {
        (Effect.NAMED, "its own section of this table"): (
            "model_config", "cache_config", "load_config", "attention_config", "mamba_config", "kernel_config",
            "speculative_config", "lora_config", "quant_config",
        ),
        (Effect.NAMED, "the platform, and how its kernels pack a page"): ("device_config",),
        (Effect.VALUE, "what a model computes"): ("engram_config", "diffusion_config", "additional_config"),
        (
            Effect.NONE,
            "how ranks divide the work; context parallelism is refused; classes beside vLLM's own count, and how "
            "experts of quantised models are divided",
        ): ("parallel_config",),
        _EXECUTION: ("compilation_config", "optimization_level", "performance_mode"),
        _CAPACITY: ("scheduler_config", "offload_config"),
        _OUTPUT: ("aux_output_config", "watermark_config", "structured_outputs_config", "reasoning_config"),
        (Effect.NONE, "new weights in a running engine are a reset"): ("weight_transfer_config",),
        _SERVING: (
            "observability_config", "logging_config", "profiler_config", "kv_transfer_config", "kv_events_config",
            "ec_transfer_config", "ec_manager_config", "instance_id", "shutdown_timeout", "watchdog_config",
        ),
    },
}

VARIABLES: Fields = {
    (Effect.NONE, "set by vLLM itself in some of its processes; kernels that compute the same function"): (
        "VLLM_USE_AOT_COMPILE", "VLLM_USE_BREAKABLE_CUDAGRAPH", "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
        "VLLM_USE_TRITON_AWQ", "VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ROCM_USE_SKINNY_GEMM",
        "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE",
    ),
    (Effect.NONE, "the layout of KV heads and the model's kind stand in the groups"): (
        "VLLM_MLA_DISABLE", "VLLM_KV_CACHE_LAYOUT", "VLLM_PP_LAYER_PARTITION",
    ),
    (Effect.NAMED, "part of the page format"): ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",),
    (Effect.NAMED, "as vLLM resolves it, if numbers are quantised"): ("VLLM_USE_DEEP_GEMM_E8M0",),
    _CAPACITY: ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_DP_*", "VLLM_USE_V2_MODEL_RUNNER"),
    _SERVING: (
        "CMAKE_BUILD_TYPE", "CUDA_HOME", "NVCC_THREADS", "RAY_*", "VERBOSE", "VLLM_ALLOW_*", "VLLM_BUILD_*",
        "VLLM_CONFIGURE_LOGGING", "VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_GC_DEBUG", "VLLM_IMAGE_TAG", "VLLM_KV_EVENTS_*",
        "VLLM_LOG_*", "VLLM_LOOPBACK_IP", "VLLM_LORA_RESOLVER_*", "*MOONCAKE_*", "VLLM_NCCL_*", "VLLM_NIXL_*",
        "VLLM_P2P_*", "VLLM_PROCESS_NAME_PREFIX", "VLLM_RAY_*", "VLLM_USAGE_SOURCE", "VLLM_USE_SPINLOOP_EXT",
        "VLLM_TRACE_FUNCTION", "VLLM_*_TIMEOUT*", "VLLM_*_PROFILING",
    ),
}
"""The same of environment variables, by pattern; those that vLLM itself keeps out of `compile_factors` are left out."""

INDEPENDENT = (
    # The model and the modules that it is built from read none of these settings.
    "ApertusForCausalLM", "Cohere2ForCausalLM", "CohereForCausalLM", "Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM",
    "Exaone4ForCausalLM", "FalconH1ForCausalLM", "FalconMambaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
    "GemmaForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM", "GptOssForCausalLM", "GraniteForCausalLM",
    "GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM", "GraniteMoeSharedForCausalLM", "InternLM3ForCausalLM",
    "JambaForCausalLM", "Lfm2ForCausalLM", "LlamaForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM",
    "MiMoForCausalLM", "Ministral3ForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "NemotronForCausalLM",
    "NemotronHForCausalLM", "OlmoeForCausalLM", "Phi3ForCausalLM", "PhiMoEForCausalLM", "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "StableLmForCausalLM",
    # `max_model_len` only sizes a buffer of the sparse indexer, which DeepSeek V3.2 alone has.
    "DeepseekForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
    # `max_model_len` only sizes the CUDA graphs of the image encoder; the language model is a listed one.
    "Gemma3ForConditionalGeneration", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
)
# fmt: on
"""vLLM's own architectures whose KV depends on no setting that is `Effect.ARCHITECTURE`, read in vLLM 0.32, and why."""


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


def default_of(field: Any) -> Any:
    """What a field is unless somebody sets it."""
    if hasattr(field.default, "get_default"):  # Pydantic's description of a field.
        return field.default.get_default(call_default_factory=True, validated_data={})
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()
