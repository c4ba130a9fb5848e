"""What kvpool does to an engine on a real GPU, beside no pool and beside vLLM's own in-process CPU offloading.

Llama-3.1-8B's shape with random weights; the engines share one GPU and take turns. Needs CUDA and about 80 GiB of its
memory.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import harness
from benchmarks.engine import Engine, EngineSpec, kvpool_transfer_config
from benchmarks.harness import Row

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "block_size": 16,
    "gpu_memory_utilization": 0.2,
    "max_model_len": 24_000,
    "max_num_batched_tokens": 8192,
}
OFFLOAD_GIB = 16


def main(
    rounds: Annotated[int, typer.Option(help="Prompts that count.")] = 5,
    tokens: Annotated[int, typer.Option(help="Tokens in a prompt.")] = 20_000,
    memory: Annotated[str, typer.Option(help="Size of the pool.")] = "16GiB",
    logs: Annotated[Path | None, typer.Option(help="Where the engines' logs go; default: a new folder.")] = None,
) -> None:
    """Time cold and warm prompts in engines that take turns on one GPU."""
    logs = logs or Path(tempfile.mkdtemp(prefix="kvpool-gpu-"))
    model = logs / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(LLAMA_8B))
    offload = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": OFFLOAD_GIB << 30, "block_size": 16},
    }
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(harness.kvpool_server(memory))
        specs = {
            "alone": EngineSpec(model, None, OPTIONS),
            "kvpool": EngineSpec(model, kvpool_transfer_config(endpoint, load_timeout_ms=20_000), OPTIONS),
            "vLLM offloading": EngineSpec(model, offload, OPTIONS),
        }
        engines = {}
        for name, spec in specs.items():
            started = time.monotonic()
            engines[name] = stack.enter_context(Engine(spec, logs / f"{name.replace(' ', '-')}.log"))
            print(f"{name}: started in {time.monotonic() - started:.0f} s", flush=True)
        cold, warm = _measure(engines, rounds, tokens)
    rows = [Row(f"cold TTFT, {name}", statistics.median(taken) * 1e3, "ms") for name, taken in cold.items()]
    rows += [Row(f"warm TTFT, {name}", statistics.median(taken) * 1e3, "ms") for name, taken in warm.items()]
    for name in warm:
        rows.append(Row(f"cold, {name} over alone", 1 / harness.speed_ratio(cold[name], cold["alone"]), "ratio"))
        rows.append(Row(f"{name}: cold alone over warm", harness.speed_ratio(warm[name], cold["alone"]), "ratio"))
    harness.report("gpu", rows, rounds=rounds, tokens=tokens, samples={"cold": cold, "warm": warm})


def _measure(
    engines: dict[str, Engine], rounds: int, tokens: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    picks = random.Random(0)
    cold: dict[str, list[float]] = {name: [] for name in engines}
    warm: dict[str, list[float]] = {name: [] for name in engines if name != "alone"}
    for nth in range(-1, rounds):
        prompt = [picks.randrange(10, 100_000) for _ in range(tokens)]
        for name, engine in engines.items():
            ttft_s = engine.generate([prompt])[0].ttft_s
            if nth >= 0:
                cold[name].append(ttft_s)
        for name in warm:
            harness.until_true(engines[name].reset_prefix_cache, "the engine's blocks stay in use")
            answer = engines[name].generate([prompt])[0]
            print(f"round {nth + 1}: {name} hit {answer.cached_tokens} tokens, {answer.ttft_s:.3f} s", flush=True)
            if nth >= 0:
                warm[name].append(answer.ttft_s)
    return cold, warm


if __name__ == "__main__":
    typer.run(main)
