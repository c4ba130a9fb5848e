"""Writes small models with random weights, one of each cache layout that vLLM knows.

    python -m testbed.tiny_models DIRECTORY [SHAPE ...]

Every function below gives the Hugging Face config of one shape; Transformers makes the modules and their names. The
weights are seeded and their spread is wide enough that every output depends on the whole prompt. `write` puts a shape
into DIRECTORY/SHAPE; run it with `skip_tokenizer_init` and prompts given as token ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

INITIALIZER_RANGE = 0.08
VOCAB = 2048
STATE_DECAY = -7.0
"""Logarithm of what a recurrent state loses a token: it remembers a thousand tokens, so a wrong state shows."""
WINDOW = 100
"""Deliberately no multiple of a block."""
IMAGE_TOKEN = 3
"""Stands for an image in a prompt of the idefics3 shape."""
IMAGE_PATCHES = 64
IMAGE_TOKENS = IMAGE_PATCHES + 3
"""What vLLM puts in its place: a token per patch, and three around them."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _config(model_type: str, **fields: Any) -> PretrainedConfig:
    return CONFIG_MAPPING[model_type](**{**SIZES, "initializer_range": INITIALIZER_RANGE, **fields})


def llama() -> PretrainedConfig:
    """Full attention alone."""
    return _config("llama", num_hidden_layers=4)


def gemma3() -> PretrainedConfig:
    """Five sliding-window layers to one of full attention."""
    return _config("gemma3_text", num_hidden_layers=6, sliding_window=WINDOW, query_pre_attn_scalar=64)


def gemma2() -> PretrainedConfig:
    """Sliding-window and full attention in turns, with soft caps."""
    return _config(
        "gemma2", num_hidden_layers=4, sliding_window=WINDOW, query_pre_attn_scalar=64, tie_word_embeddings=True
    )


def olmo3() -> PretrainedConfig:
    """Three sliding-window layers to one of full attention, no soft caps."""
    return _config("olmo3", num_hidden_layers=4, sliding_window=WINDOW)


def gpt_oss() -> PretrainedConfig:
    """Sliding-window and full attention in turns, with sinks, over a mixture of experts."""
    return _config("gpt_oss", num_hidden_layers=4, sliding_window=128, num_local_experts=4, num_experts_per_tok=2)


def mistral() -> PretrainedConfig:
    """Sliding windows alone."""
    return _config("mistral", num_hidden_layers=4, sliding_window=WINDOW)


def llama4() -> PretrainedConfig:
    """Three chunked-local layers to one of full attention."""
    return _config(
        "llama4_text",
        num_hidden_layers=4,
        attention_chunk_size=128,
        intermediate_size_mlp=512,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
    )


def qwen3_next() -> PretrainedConfig:
    """Three gated-delta-net layers to one of full attention. The CPU kernel wants bfloat16."""
    return _config(
        "qwen3_next",
        num_hidden_layers=4,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
    )


MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 32, "mamba_n_groups": 1}


def granite_hybrid() -> PretrainedConfig:
    """Mamba2 layers with one of full attention. On a CPU, steps must be no longer than a block (of 96)."""
    return _config(
        "granitemoehybrid",
        num_hidden_layers=4,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=512,
        mamba_expand=2,
        **MAMBA,
    )


def falcon_h1() -> PretrainedConfig:
    """Mamba2 and full attention side by side in every layer."""
    return _config("falcon_h1", num_hidden_layers=3, mamba_d_ssm=512, **MAMBA)


def nemotron_h() -> PretrainedConfig:
    """Mamba2, feed-forward and full attention as layers of their own."""
    return _config(
        "nemotron_h",
        num_hidden_layers=6,
        hybrid_override_pattern="M-M*-M",
        mamba_num_heads=8,
        mamba_head_dim=64,
        ssm_state_size=32,
        n_groups=1,
    )


def jamba() -> PretrainedConfig:
    """Mamba1 layers with one of full attention. vLLM has no CPU kernel for them."""
    return _config(
        "jamba",
        num_hidden_layers=4,
        attn_layer_period=4,
        attn_layer_offset=2,
        num_experts=1,
        num_experts_per_tok=1,
        mamba_dt_rank=16,
        use_mamba_kernels=False,
    )


def mamba2() -> PretrainedConfig:
    """Mamba2 alone."""
    return _config("mamba2", num_hidden_layers=4, num_heads=8, head_dim=64, state_size=32, n_groups=1, expand=2)


def lfm2() -> PretrainedConfig:
    """Short convolutions with one layer of full attention."""
    kinds = ["conv", "conv", "full_attention", "conv"]
    return _config(
        "lfm2",
        num_hidden_layers=4,
        layer_types=kinds,
        block_dim=256,
        block_ff_dim=512,
        block_auto_adjust_ff_dim=False,
        conv_dim=256,
    )


DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
}


def deepseek_v2() -> PretrainedConfig:
    """Latent attention (MLA). Without AMX a CPU runs it with blocks of 16 and no prefix cache of its own."""
    return _config("deepseek_v2", num_hidden_layers=3, **DEEPSEEK)


def glm4_moe() -> PretrainedConfig:
    """Full attention; the last layer predicts further tokens (MTP) for speculative decoding."""
    return _config(
        "glm4_moe",
        num_hidden_layers=4,
        num_nextn_predict_layers=1,
        moe_intermediate_size=128,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=2,
    )


def gemma3n() -> PretrainedConfig:
    """Sliding-window and full attention; the last layers share the cache of earlier ones."""
    return _config(
        "gemma3n_text",
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.0] * 6,
        sliding_window=WINDOW,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=32,
        laurel_rank=16,
        tie_word_embeddings=True,
    )


def gemma4() -> PretrainedConfig:
    """Sliding-window layers, and full attention with heads twice as wide: blocks of 64 and of 32 tokens."""
    return _config(
        "gemma4_text",
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        sliding_window=WINDOW,
        global_head_dim=128,
        num_kv_shared_layers=0,
        attention_k_eq_v=False,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=0,
    )


SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    make.__name__: make
    for make in (
        llama,
        gemma3,
        gemma2,
        olmo3,
        gpt_oss,
        mistral,
        llama4,
        qwen3_next,
        granite_hybrid,
        falcon_h1,
        nemotron_h,
        jamba,
        mamba2,
        lfm2,
        deepseek_v2,
        glm4_moe,
        gemma3n,
        gemma4,
    )
}


def write(name: str, directory: Path) -> Path:
    """Writes config.json and the weights of one shape, draft head or adapter; returns their directory.

    Keeps what is there.

    Args:
        name: a key of `SHAPES` or of `ADDITIONS`.
        directory: gets a folder of that name.
    """
    target = directory / name
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory) as scratch:
        unfinished = Path(scratch) / name
        unfinished.mkdir()
        if name in ADDITIONS:
            ADDITIONS[name](unfinished)
        else:
            _write_model(SHAPES[name](), unfinished)
        unfinished.rename(target)
    return target


def _write_model(config: PretrainedConfig, target: Path) -> None:
    _write_weights(AutoModelForCausalLM, config, target)
    if getattr(config, "num_nextn_predict_layers", 0):
        _make_last_layer_predict(target, config)


def _write_weights(auto_class: Any, config: PretrainedConfig, target: Path) -> None:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = auto_class.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(STATE_DECAY)
            elif parameter.ndim > 1:
                parameter.normal_(std=INITIALIZER_RANGE)
    model.save_pretrained(target)


def _make_last_layer_predict(target: Path, config: PretrainedConfig) -> None:
    path = target / "model.safetensors"
    weights, hidden = load_file(path), config.hidden_size
    config.num_hidden_layers -= 1
    at = f"model.layers.{config.num_hidden_layers}"
    weights |= _random({f"{at}.eh_proj.weight": (hidden, 2 * hidden)}, seed=1)
    weights |= {f"{at}.{norm}.weight": torch.ones(hidden) for norm in ("enorm", "hnorm", "shared_head.norm")}
    save_file(weights, path, metadata={"format": "pt"})
    config.save_pretrained(target)


def mimo_v2(target: Path) -> None:
    """Full attention with one KV head, and sliding windows with two. Transformers gives all layers the same number."""
    pattern = [0, 1, 1, 0]
    heads = {0: 1, 1: 2}
    config = _config(
        "mimo_v2_flash",
        num_hidden_layers=len(pattern),
        hybrid_layer_pattern=pattern,
        sliding_window=WINDOW,
        sliding_window_size=WINDOW,
        num_key_value_heads=heads[0],
        swa_num_key_value_heads=heads[1],
        swa_num_attention_heads=SIZES["num_attention_heads"],
        v_head_dim=SIZES["head_dim"],
        swa_head_dim=SIZES["head_dim"],
        swa_v_head_dim=SIZES["head_dim"],
        partial_rotary_factor=1.0,
        layernorm_epsilon=1e-5,
        moe_layer_freq=0,
    )
    hidden, intermediate, q = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, hidden),
        "lm_head.weight": (VOCAB, hidden),
    }
    norms = ["model.norm.weight"]
    for layer, is_sliding in enumerate(pattern):
        at, kv = f"model.layers.{layer}", heads[is_sliding] * config.head_dim
        sizes |= _layer(at, hidden, intermediate, q, kv)
        norms += [f"{at}.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")]
    weights = _random(sizes, seed=1) | {name: torch.ones(hidden) for name in norms}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config.architectures = ["MiMoV2FlashForCausalLM"]
    config.save_pretrained(target)


def _layer(at: str, hidden: int, intermediate: int, q: int, kv: int, qkv_inputs: int = 1) -> dict[str, tuple[int, ...]]:
    """The weights of a Llama-like layer."""
    return {
        f"{at}.self_attn.q_proj.weight": (q, qkv_inputs * hidden),
        f"{at}.self_attn.k_proj.weight": (kv, qkv_inputs * hidden),
        f"{at}.self_attn.v_proj.weight": (kv, qkv_inputs * hidden),
        f"{at}.self_attn.o_proj.weight": (hidden, q),
        f"{at}.mlp.gate_proj.weight": (intermediate, hidden),
        f"{at}.mlp.up_proj.weight": (intermediate, hidden),
        f"{at}.mlp.down_proj.weight": (hidden, intermediate),
    }


def eagle(target: Path) -> None:
    """An EAGLE head for the llama shape: one layer behind a projection of token and hidden state."""
    config = llama()
    config.num_hidden_layers = 1
    _write_head(target, config, "LlamaForCausalLM", "layers.0", fc_inputs=2, qkv_inputs=1)


def eagle3(target: Path) -> None:
    """An EAGLE3 head for the llama shape, with twice its KV heads: one cache group, pages of two sizes."""
    config = llama()
    config.num_hidden_layers = 1
    config.num_key_value_heads *= 2
    config.eagle_aux_hidden_state_layer_ids = [1, 2, 3]
    config.draft_vocab_size = VOCAB
    _write_head(target, config, "LlamaForCausalLMEagle3", "midlayer", fc_inputs=3, qkv_inputs=2)


def _write_head(
    target: Path, config: PretrainedConfig, architecture: str, layer: str, fc_inputs: int, qkv_inputs: int
) -> None:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    sizes = {"fc.weight": (hidden, fc_inputs * hidden), **_layer(layer, hidden, intermediate, q, kv, qkv_inputs)}
    norms = [f"{layer}.post_attention_layernorm.weight"]
    if architecture.endswith("Eagle3"):
        sizes["lm_head.weight"] = (VOCAB, hidden)
        norms += [f"{layer}.input_layernorm.weight", f"{layer}.hidden_norm.weight", "norm.weight"]
    weights = _random(sizes, seed=1) | {name: torch.ones(hidden) for name in norms}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [architecture]
    config.save_pretrained(target)


def lora_a(target: Path) -> None:
    """An adapter for the llama shape."""
    _write_adapter(target, seed=2)


def lora_b(target: Path) -> None:
    """Another adapter for the llama shape."""
    _write_adapter(target, seed=3)


def _write_adapter(target: Path, seed: int, rank: int = 8) -> None:
    base = llama()
    hidden, kv = base.hidden_size, base.num_key_value_heads * base.head_dim
    sizes: dict[str, tuple[int, ...]] = {}
    for layer in range(base.num_hidden_layers):
        for module, rows in (("q_proj", base.num_attention_heads * base.head_dim), ("v_proj", kv)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            sizes |= {f"{at}.lora_A.weight": (rank, hidden), f"{at}.lora_B.weight": (rows, rank)}
    save_file(_random(sizes, seed), target / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (target / "adapter_config.json").write_text(json.dumps(config, indent=2))


def idefics3(target: Path) -> None:
    """The llama shape behind a vision tower, with the tokenizer and image processor that vLLM needs for images."""
    # Other releases of Transformers, which GPUs' vLLM may bring, lack some of these classes.
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import (
        AutoModelForImageTextToText,
        Idefics3Config,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        PreTrainedTokenizerFast,
    )

    side, patch = 128, 16
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": side,
        "patch_size": patch,
    }
    config = Idefics3Config(vision_config=vision, text_config=llama(), image_token_id=IMAGE_TOKEN, scale_factor=1)
    _write_weights(AutoModelForImageTextToText, config, target)
    names = dict(enumerate(("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"), IMAGE_TOKEN))
    words = {names.get(token, f"<{token}>"): token for token in range(VOCAB)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="<0>")))
    images = Idefics3ImageProcessorPil(
        do_image_splitting=False, size={"longest_edge": side}, max_image_size={"longest_edge": side}
    )
    Idefics3Processor(images, tokenizer, image_seq_len=IMAGE_PATCHES).save_pretrained(target)


def _random(sizes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator) * INITIALIZER_RANGE for name, size in sizes.items()}


ADDITIONS: dict[str, Callable[[Path], None]] = {
    make.__name__: make for make in (mimo_v2, idefics3, eagle, eagle3, lora_a, lora_b)
}
"""What needs more than a config: a model of several head counts, one of images, and heads and adapters for llama."""


def main(directory: Path, shapes: Annotated[list[str] | None, typer.Argument(help="All without any.")] = None) -> None:
    """Write the models and say where."""
    for name in shapes or [*SHAPES, *ADDITIONS]:
        typer.echo(write(name, directory))


if __name__ == "__main__":
    typer.run(main)
