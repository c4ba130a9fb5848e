"""Writes a small Llama-like model with random weights: real vLLM without a download.

    python -m testbed.tiny_llama DIRECTORY [--layers N]

The weights are seeded, so two machines make the same model; their spread is wide enough that every output depends on
the whole prompt.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model, as in a Hugging Face Llama config."""

    layers: int = 8
    hidden: int = 512
    intermediate: int = 1536
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    vocab: int = 4096
    max_tokens: int = 8192
    seed: int = 0


INITIALIZER_RANGE = 0.08


def write(directory: Path, shape: Shape | None = None, num_files: int = 1) -> Path:
    """Writes config.json and model.safetensors, or as many files of weights; returns the directory.

    Does nothing if the same model is there.
    """
    shape = shape or Shape()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_tokens,
        "initializer_range": INITIALIZER_RANGE,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "kvpool_seed": shape.seed,
    }
    text = json.dumps(config, indent=2)
    path = directory / "config.json"
    if path.exists() and path.read_text() == text:
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    weights = sorted(_weights(shape).items())
    for nth in range(num_files):
        name = "model.safetensors" if num_files == 1 else f"model-{nth + 1:05}-of-{num_files:05}.safetensors"
        save_file(dict(weights[nth::num_files]), directory / name, metadata={"format": "pt"})
    path.write_text(text)
    return directory


def _weights(shape: Shape) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(shape.seed)

    def random(*size: int) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * INITIALIZER_RANGE).to(torch.bfloat16)

    def ones() -> torch.Tensor:
        return torch.ones(shape.hidden, dtype=torch.bfloat16)

    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {
        "model.embed_tokens.weight": random(shape.vocab, shape.hidden),
        "model.norm.weight": ones(),
        "lm_head.weight": random(shape.vocab, shape.hidden),
    }
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.input_layernorm.weight": ones(),
            f"{at}.post_attention_layernorm.weight": ones(),
            f"{at}.self_attn.q_proj.weight": random(q, shape.hidden),
            f"{at}.self_attn.k_proj.weight": random(kv, shape.hidden),
            f"{at}.self_attn.v_proj.weight": random(kv, shape.hidden),
            f"{at}.self_attn.o_proj.weight": random(shape.hidden, q),
            f"{at}.mlp.gate_proj.weight": random(shape.intermediate, shape.hidden),
            f"{at}.mlp.up_proj.weight": random(shape.intermediate, shape.hidden),
            f"{at}.mlp.down_proj.weight": random(shape.hidden, shape.intermediate),
        }
    return weights


def main(directory: Path, layers: Annotated[int, typer.Option(help="Number of layers.")] = 8) -> None:
    """Write the model and say where."""
    typer.echo(write(directory, Shape(layers=layers)))


if __name__ == "__main__":
    typer.run(main)
