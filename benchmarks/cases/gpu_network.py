"""What does a prompt cost an engine on a GPU whose KV lies in a pool across the network? Over loopback, on one host.

Llama-3.1-8B's shape with random weights; the engines share one GPU and take turns. One engine computes and stores over
TCP. Of three that load, one has TCP connections, one shares the pool's memory, and one shares the memory of another
server beside it, which reads what it lacks from the pool over TCP (`--tier peers:…`). One engine has no pool.

`--connections 8,4,2` also loads over so many connections (`stream_connections`), with an engine for each number, one
after the other: which number disturbs those who decode least, and what does it cost a load?

Needs CUDA, 110 GiB of its memory, and 50 GiB of the host's.
"""

from __future__ import annotations

import contextlib
import random
import statistics
from typing import Annotated, Any

import typer

from benchmarks.cases.gpu import OPTIONS, empty_own_cache, prompt_of, write_model
from benchmarks.harness import measuring as harness
from benchmarks.harness.measuring import Logs, Row, at_most, percentile, time_ratio
from testbed.engine import Engine, EngineSpec, kvpool_transfer_config, start_all

POOL_GIB = 18
WRITER = {**OPTIONS, "kv_cache_memory_bytes": 12 << 30}
"""A prompt of `max_model_len` is stored as a whole: a quarter of the blocks may be pinned at once, see
`max_pinned_fraction`."""
BLOCK_TOKENS = int(OPTIONS["block_size"])
BESIDE_GIB = 6
"""Of the other server: two prompts."""
PEER = "peer"
LOADERS = ("tcp", "shm", PEER)
WARM_REACH_MS, COLD_REACH, DECODING_REACH = 200, 1.02, 1.2
PEER_REACH_MS, PEER_REACH = 350, 1.3
PERCENT = 99


def main(
    logs: Logs,
    rounds: Annotated[int, typer.Option(help="Prompts that count.")] = 5,
    tokens: Annotated[int, typer.Option(help="Tokens in a prompt.")] = 20_000,
    decoding_rounds: Annotated[int, typer.Option(help="Rounds of decoding beside loads.")] = 3,
    connections: Annotated[str, typer.Option(help="Also load over so many connections, for instance 8,4,2.")] = "",
) -> None:
    """Time prompts that are computed and stored, and that are loaded; and decoding beside the loads."""
    model = write_model(logs)
    counts = [int(count) for count in connections.split(",") if count]

    def pooled(transport: str, options: dict[str, Any] = OPTIONS, stream_connections: int = 0) -> EngineSpec:
        config = kvpool_transfer_config(
            beside if transport == PEER else endpoint,
            load_timeout_ms=20_000,
            transport="shm" if transport == PEER else transport,
            stream_connections=stream_connections,
            decline_slow_loads=False,  # The first load of an engine is slow.
        )
        return EngineSpec(model, config, options)

    with harness.kvpool_server(f"{POOL_GIB}GiB") as endpoint, _beside(endpoint) as beside:
        specs = {"alone": EngineSpec(model, None, OPTIONS), "writer": pooled("tcp", WRITER)}
        with contextlib.ExitStack() as stack:
            engines = start_all(stack, specs | {transport: pooled(transport) for transport in LOADERS}, logs)
            rows, prompts = _prompts(engines, rounds, tokens)
            rows += _decoding(engines, prompts, decoding_rounds)
        for count in counts:
            name = f"tcp, {count} connections"
            with contextlib.ExitStack() as stack:
                engines = start_all(stack, {name: pooled("tcp", stream_connections=count)}, logs)
                loads = [load(engines[name], name, prompt) for prompt in prompts]
                rows.append(Row(f"warm TTFT, {name}", harness.ms(loads[1:]), "ms"))
                taken = [each for nth in range(decoding_rounds) for each in _decode(engines[name], name, nth, prompts)]
                rows += _between_rows(name, taken)
    harness.report("gpu_network", rows, rounds=rounds, tokens=tokens)


def _beside(owner: str) -> contextlib.AbstractContextManager[str]:
    """A server that reads from the owner over TCP, and keeps what was used last."""
    return harness.kvpool_server(f"{BESIDE_GIB}GiB", "--tier", f"peers:peer={owner},transport=tcp", "--policy", "lru")


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
            warm[name].append(load(engines[name], name, prompt))
    for taken in (*cold.values(), *warm.values()):
        del taken[0]
    return [
        Row("cold TTFT, alone", harness.ms(cold["alone"]), "ms"),
        Row("cold TTFT, kvpool over TCP", harness.ms(cold["writer"]), "ms"),
        Row("warm TTFT, shared memory", harness.ms(warm["shm"]), "ms"),
        at_most("warm TTFT, TCP", harness.ms(warm["tcp"]), "ms", WARM_REACH_MS),
        Row("warm, TCP over shared memory", time_ratio(warm["tcp"], warm["shm"]), "ratio"),
        at_most("warm TTFT, held by another server", harness.ms(warm[PEER]), "ms", PEER_REACH_MS),
        at_most("warm, held by another server over TCP", time_ratio(warm[PEER], warm["tcp"]), "ratio", PEER_REACH),
        at_most("cold, kvpool over TCP / alone", time_ratio(cold["writer"], cold["alone"]), "ratio", COLD_REACH),
        Row("cold alone over warm TCP", harness.speed_ratio(warm["tcp"], cold["alone"]), "ratio"),
    ], prompts


def load(engine: Engine, name: str, prompt: list[int]) -> float:
    """Time to the first token of a prompt that is loaded. Raises RuntimeError unless all of it was stored."""
    empty_own_cache(engine)
    answer = engine.generate([prompt], max_tokens=1)[0]
    print(f"{name} hit {answer.cached_tokens} tokens, {answer.ttft_s:.4f} s", flush=True)
    expected = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS  # An engine computes the last token itself.
    if answer.cached_tokens < expected:
        raise RuntimeError(
            f"{name} loaded {answer.cached_tokens} tokens of a prompt of {len(prompt)}, and {expected} were to be "
            "stored; give the writer a larger kv_cache_memory_bytes (it pins max_pinned_fraction of its blocks at "
            "most while it stores them), or see in its log why it stored fewer"
        )
    return answer.ttft_s


def _decoding(engines: dict[str, Engine], prompts: list[list[int]], rounds: int) -> list[Row]:
    """Time between the tokens of eight requests while long prompts are loaded, by transport in turns."""
    between: dict[str, list[float]] = {transport: [] for transport in LOADERS}
    for nth in range(rounds):
        for name in random.Random(nth).sample(LOADERS, len(LOADERS)):
            between[name] += _decode(engines[name], name, nth, prompts)
    rows = [row for name, taken in between.items() for row in _between_rows(name, taken)]
    share = percentile(between["tcp"], PERCENT) / percentile(between["shm"], PERCENT)
    what = f"between tokens p{PERCENT}, beside loads over TCP / shared memory"
    return [*rows, at_most(what, share, "ratio", DECODING_REACH)]


def _decode(engine: Engine, name: str, nth: int, prompts: list[list[int]]) -> list[float]:
    """Seconds between the tokens of one round."""
    empty_own_cache(engine)
    background = [prompt_of(200, f"background {name} {nth} {idx}") for idx in range(8)]
    # Three that take turns do not fit into the engine's own cache.
    taken = engine.decode(background, [*prompts[-3:], *prompts[-3:]], max_tokens=200)
    print(f"decoding beside loads over {name}: {statistics.median(taken):.4f} s", flush=True)
    return taken


def _between_rows(name: str, taken: list[float]) -> list[Row]:
    return [
        Row(f"between tokens, beside loads over {name}, p{percent}", harness.ms(taken, percent), "ms")
        for percent in (50, PERCENT)
    ]


if __name__ == "__main__":
    typer.run(main)
