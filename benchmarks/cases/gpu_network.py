"""What does a prompt cost an engine on a GPU whose KV lies in a pool across the network? Over loopback, on one host.

Llama-3.1-8B's shape with random weights; the engines share one GPU and take turns. One engine computes and stores over
TCP. Of two that load, one has TCP connections, and the other shares the pool's memory. One engine has no pool.

Needs CUDA, 90 GiB of its memory, and 40 GiB of the host's.
"""

from __future__ import annotations

import contextlib
import random
import statistics
from typing import Annotated

import typer

from benchmarks.cases.gpu import OPTIONS, empty_own_cache, prompt_of, write_model
from benchmarks.harness import measuring as harness
from benchmarks.harness.measuring import Logs, Row, at_most, percentile, time_ratio
from testbed.engine import Engine, EngineSpec, kvpool_transfer_config, start_all

POOL_GIB = 18
LOADERS = ("tcp", "shm")
WARM_REACH_MS, COLD_REACH, DECODING_REACH = 250, 1.02, 1.2
PERCENT = 99


def main(
    logs: Logs,
    rounds: Annotated[int, typer.Option(help="Prompts that count.")] = 5,
    tokens: Annotated[int, typer.Option(help="Tokens in a prompt.")] = 20_000,
    decoding_rounds: Annotated[int, typer.Option(help="Rounds of decoding beside loads.")] = 3,
) -> None:
    """Time prompts that are computed and stored, and that are loaded; and decoding beside the loads."""
    model = write_model(logs)
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(harness.kvpool_server(f"{POOL_GIB}GiB"))
        pooled = {
            transport: EngineSpec(
                model, kvpool_transfer_config(endpoint, load_timeout_ms=20_000, transport=transport), OPTIONS
            )
            for transport in LOADERS
        }
        engines = start_all(stack, {"alone": EngineSpec(model, None, OPTIONS), "writer": pooled["tcp"], **pooled}, logs)
        rows, prompts = _prompts(engines, rounds, tokens)
        rows += _decoding(engines, prompts, decoding_rounds)
    harness.report("gpu_network", rows, rounds=rounds, tokens=tokens)


def _prompts(engines: dict[str, Engine], rounds: int, tokens: int) -> tuple[list[Row], list[list[int]]]:
    """Time to the first token."""
    cold: dict[str, list[float]] = {"alone": [], "writer": []}
    warm: dict[str, list[float]] = {transport: [] for transport in LOADERS}
    prompts = [prompt_of(tokens, f"round {nth}") for nth in range(rounds + 1)]
    for nth, prompt in enumerate(prompts):
        for name in random.Random(nth).sample(list(cold), len(cold)):
            cold[name].append(engines[name].generate([prompt], max_tokens=1)[0].ttft_s)
        empty_own_cache(engines["writer"])  # Succeeds once all is stored.
        for name in random.Random(nth).sample(LOADERS, len(LOADERS)):
            empty_own_cache(engines[name])
            answer = engines[name].generate([prompt], max_tokens=1)[0]
            print(f"round {nth}: {name} hit {answer.cached_tokens} tokens, {answer.ttft_s:.4f} s", flush=True)
            warm[name].append(answer.ttft_s)
    for taken in (*cold.values(), *warm.values()):
        del taken[0]
    return [
        Row("cold TTFT, alone", harness.ms(cold["alone"]), "ms"),
        Row("cold TTFT, kvpool over TCP", harness.ms(cold["writer"]), "ms"),
        Row("warm TTFT, shared memory", harness.ms(warm["shm"]), "ms"),
        at_most("warm TTFT, TCP", harness.ms(warm["tcp"]), "ms", WARM_REACH_MS),
        Row("warm, TCP over shared memory", time_ratio(warm["tcp"], warm["shm"]), "ratio"),
        at_most("cold, kvpool over TCP / alone", time_ratio(cold["writer"], cold["alone"]), "ratio", COLD_REACH),
        Row("cold alone over warm TCP", harness.speed_ratio(warm["tcp"], cold["alone"]), "ratio"),
    ], prompts


def _decoding(engines: dict[str, Engine], prompts: list[list[int]], rounds: int) -> list[Row]:
    """Time between the tokens of eight requests while long prompts are loaded."""
    between: dict[str, list[float]] = {transport: [] for transport in LOADERS}
    for nth in range(rounds):
        for name in random.Random(nth).sample(LOADERS, len(LOADERS)):
            empty_own_cache(engines[name])
            background = [prompt_of(200, f"background {name} {nth} {idx}") for idx in range(8)]
            # Three that take turns do not fit into the engine's own cache.
            taken = engines[name].decode(background, [*prompts[-3:], *prompts[-3:]], max_tokens=200)
            between[name].extend(taken)
            print(f"decoding beside loads over {name}: {statistics.median(taken):.4f} s", flush=True)
    rows = [
        Row(f"between tokens, beside loads over {name}, p{percent}", harness.ms(taken, percent), "ms")
        for name, taken in between.items()
        for percent in (50, PERCENT)
    ]
    share = percentile(between["tcp"], PERCENT) / percentile(between["shm"], PERCENT)
    what = f"between tokens p{PERCENT}, beside loads over TCP / shared memory"
    return [*rows, at_most(what, share, "ratio", DECODING_REACH)]


if __name__ == "__main__":
    typer.run(main)
