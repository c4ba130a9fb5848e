"""What kvpool does to an engine on a real GPU, beside none, vLLM's own in-process CPU offloading, and Mooncake.

Llama-3.1-8B's shape with random weights; the engines share one GPU and take turns. Questions: what does a prompt cost
that is stored, and one that another engine has stored; and what do loads and stores do to those who decode?

Needs CUDA, 130 GiB of its memory, and 100 GiB of the host's.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import measuring as harness
from benchmarks.harness.measuring import Logs, Row, at_most, time_ratio
from benchmarks.peers import mooncake_store
from testbed.engine import Engine, EngineSpec, kvpool_transfer_config, start_all

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
WITH_GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
"""As in service, a step that only decodes is one launch. Compilation, which adds minutes to a start, stays off."""

OPTIONS: dict[str, Any] = {
    **WITH_GRAPHS,
    "load_format": "dummy",
    "block_size": 16,
    "gpu_memory_utilization": 0.1,  # Only compared with what is free; engines share the GPU.
    "kv_cache_memory_bytes": 6 << 30,  # 49,152 tokens: two documents of the eight.
    "max_model_len": 24_000,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 12,
}
POOL_GIB = 24
DECODING_ROUNDS = 4
WARM_REACH_MS = 83
COLD_REACH = 1.02
FIRST_TOKENS = 64


def main(
    logs: Logs,
    rounds: Annotated[int, typer.Option(help="Prompts that count.")] = 7,
    tokens: Annotated[int, typer.Option(help="Tokens in a prompt.")] = 20_000,
) -> None:
    """Time prompts and decoding in engines that take turns on one GPU."""
    model = write_model(logs)
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(mooncake_store.master())
        endpoint = stack.enter_context(harness.kvpool_server(f"{POOL_GIB}GiB"))
        pooled = pooled_engine(model, endpoint)
        specs = {
            "alone": EngineSpec(model, None, OPTIONS),
            "kvpool": pooled,
            "second kvpool": pooled,
            "vLLM offloading": offloading_engine(model),
            "Mooncake": mooncake_store.engine(model, master, logs, POOL_GIB << 30, OPTIONS),
        }
        engines = start_all(stack, specs, logs)
        prompts, rows, samples = _measure_prompts(engines, rounds, tokens)
        rows += _measure_decoding(engines, prompts, DECODING_ROUNDS)
    harness.report("gpu", rows, rounds=rounds, tokens=tokens, samples=samples)


def pooled_engine(model: Path, endpoint: str) -> EngineSpec:
    """An engine with kvpool's connector."""
    return EngineSpec(model, kvpool_transfer_config(endpoint, load_timeout_ms=20_000), OPTIONS)


def offloading_engine(model: Path) -> EngineSpec:
    """An engine with vLLM's own connector to the host's memory."""
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": POOL_GIB << 30, "block_size": 16},
    }
    return EngineSpec(model, transfer, OPTIONS)


def write_model(folder: Path) -> Path:
    """Writes the model's shape, for engines that make weights up; its folder."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(LLAMA_8B))
    return model


def prompt_of(tokens: int, name: str) -> list[int]:
    """Random token ids; the same for the same name."""
    picks = random.Random(name)
    return [picks.randrange(10, 100_000) for _ in range(tokens)]


def empty_own_cache(engine: Engine) -> None:
    """Waits until all is stored, because blocks that are being stored are in use.

    After a reset kvpool compares the weights with the first prompt. Here that is one that nobody times.
    """
    harness.until_true(engine.reset_prefix_cache, "the engine's blocks stay in use")
    engine.generate([prompt_of(FIRST_TOKENS, "first")], max_tokens=1)


def _measure_prompts(
    engines: Mapping[str, Engine], rounds: int, tokens: int
) -> tuple[list[list[int]], list[Row], dict[str, dict[str, list[float]]]]:
    """Cold: computed, and stored. Warm: in kvpool, by the engine that has not computed it."""
    loaders = {"kvpool": "second kvpool", "vLLM offloading": "vLLM offloading", "Mooncake": "Mooncake"}
    cold: dict[str, list[float]] = {name: [] for name in ("alone", *loaders)}
    warm: dict[str, list[float]] = {name: [] for name in loaders}
    prompts = [prompt_of(tokens, f"round {nth}") for nth in range(rounds + 1)]
    own: list[float] = []
    picks = random.Random(0)
    for nth, prompt in enumerate(prompts):
        # In any order: the GPU is slower for who comes after a pause.
        for name in picks.sample(list(cold), len(cold)):
            cold[name].append(engines[name].generate([prompt], max_tokens=1)[0].ttft_s)
        own.append(engines["alone"].generate([prompt], max_tokens=1)[0].ttft_s)
        for name, loader in picks.sample(list(loaders.items()), len(loaders)):
            empty_own_cache(engines[name])  # Succeeds once all is stored.
            empty_own_cache(engines[loader])
            answer = engines[loader].generate([prompt], max_tokens=1)[0]
            print(f"round {nth}: {name} hit {answer.cached_tokens} tokens, {answer.ttft_s:.4f} s", flush=True)
            warm[name].append(answer.ttft_s)
    for taken in (*cold.values(), *warm.values(), own):
        del taken[0]
    rows = [Row(f"cold TTFT, {name}", harness.ms(taken), "ms") for name, taken in cold.items()]
    rows += [Row(f"warm TTFT, {name}", harness.ms(warm[name]), "ms") for name in ("vLLM offloading", "Mooncake")]
    rows += [
        Row("own cache TTFT, alone", harness.ms(own), "ms"),
        at_most("warm TTFT, kvpool, another process", harness.ms(warm["kvpool"]), "ms", WARM_REACH_MS),
        at_most("cold, kvpool over alone", time_ratio(cold["kvpool"], cold["alone"]), "ratio", COLD_REACH),
        Row("cold, vLLM offloading over alone", time_ratio(cold["vLLM offloading"], cold["alone"]), "ratio"),
        Row("cold, Mooncake over alone", time_ratio(cold["Mooncake"], cold["alone"]), "ratio"),
        at_most("warm, kvpool over vLLM offloading", time_ratio(warm["kvpool"], warm["vLLM offloading"]), "ratio", 1.0),
        Row("cold alone over warm kvpool", harness.speed_ratio(warm["kvpool"], cold["alone"]), "ratio"),
    ]
    return prompts, rows, {"cold": cold, "warm": warm}


def _measure_decoding(engines: Mapping[str, Engine], prompts: Sequence[Sequence[int]], rounds: int) -> list[Row]:
    """Time between tokens of eight requests while long prompts are loaded, and while they are computed and stored."""
    between: dict[str, list[float]] = {}
    cases = [(name, what) for name in ("alone", "kvpool", "vLLM offloading") for what in ("loads", "stores")]
    for nth in range(rounds):
        for name, what in random.Random(nth).sample(cases, len(cases)):
            engine = engines[name]
            arrivals = [prompt_of(len(prompts[0]), f"{name} {nth} {idx}") for idx in range(3)]
            if what == "loads":
                # Three that take turns do not fit into the engine's own cache. Alone: decoding that nothing disturbs.
                arrivals = [] if name == "alone" else [*prompts[-3:], *prompts[-3:]]
            empty_own_cache(engine)
            background = [prompt_of(200, f"background {what} {nth} {idx}") for idx in range(8)]
            before = engine.metrics()
            label = f"{name}, {'undisturbed' if not arrivals else 'beside ' + what}"
            taken = engine.decode(background, arrivals, max_tokens=200)
            between.setdefault(label, []).extend(taken)
            print(f"{label}: {statistics.median(taken):.4f} s; {_computed(before, engine.metrics())}", flush=True)
    return [
        Row(f"between tokens, {label}, p{percent}", harness.ms(taken, percent), "ms")
        for label, taken in sorted(between.items())
        for percent in (50, 99)
    ]


def _computed(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Tokens that kvpool's connector had computed since, by cause."""
    marked = (name for name in after if "kvpool_computed_tokens:" in name)
    return {name.rpartition(":")[2]: after[name] - before.get(name, 0.0) for name in marked}


if __name__ == "__main__":
    typer.run(main)
