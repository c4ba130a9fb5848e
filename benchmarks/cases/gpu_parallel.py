"""Several GPUs: does a rank of many load and store as fast as one alone, and do other ranks find what some have stored?

Llama-3.1-8B's shape with random weights. For each tensor-parallel size one engine stores and another loads; vLLM's
in-process CPU offloading stands beside them. What two ranks have stored, four load.

Needs 2 or 4 GPUs with 110 GiB each, and 64 GiB of the host's memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Annotated

import torch
import typer

from benchmarks.cases.gpu import OPTIONS, empty_own_cache, prompt_of, write_model
from benchmarks.harness import measuring as harness
from benchmarks.harness.measuring import Logs, Row, at_least
from testbed.engine import Engine, EngineSpec, kvpool_transfer_config, start_all

POOL_GIB = 24
KV_BYTES, WRITER_KV_BYTES = 11 << 29, 12 << 30
"""A quarter of the writer's blocks may be on their way to the pool at once, and that is to be a whole prompt."""
SAME_RATE = {"shm": 0.9, "tcp": 0.8}
LOADS = ("vllm:kvpool_load_seconds_count", "vllm:kvpool_load_seconds_sum", "vllm:kvpool_loaded_bytes")


def main(
    logs: Logs,
    rounds: Annotated[int, typer.Option(help="Prompts that count.")] = 5,
    tokens: Annotated[int, typer.Option(help="Tokens in a prompt.")] = 20_000,
    transport: Annotated[str, typer.Option(help="shm, or tcp as if the pool were on another host.")] = "shm",
) -> None:
    """Time prompts that are stored and loaded by one rank, by two and by four."""
    model = write_model(logs)
    sizes = [size for size in (1, 2, 4) if size <= torch.cuda.device_count()]
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(harness.kvpool_server(f"{POOL_GIB}GiB"))
        transfer = kvpool_transfer_config(endpoint, load_timeout_ms=20_000, transport=transport)
        specs = {}
        for size in sizes:
            options = {**OPTIONS, "tensor_parallel_size": size, "kv_cache_memory_bytes": KV_BYTES // size}
            writing = {**options, "kv_cache_memory_bytes": WRITER_KV_BYTES // size}
            specs |= {
                _name("writer", size): EngineSpec(model, transfer, writing),
                _name("reader", size): EngineSpec(model, transfer, options),
            }
            offload = {"cpu_bytes_to_use": 8 << 30, "block_size": 16}
            connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
            specs[_name("offloading", size)] = EngineSpec(
                model, {**connector, "kv_connector_extra_config": offload}, options
            )
        engines = start_all(stack, specs, logs)
        rows = [row for size in sizes for row in _measure(engines, size, rounds, tokens)]
        rates = [row.figure for row in rows if row.unit == "GB/s" and isinstance(row.figure, float)]
        rows += [
            at_least(f"TP {size}: a rank's rate over TP 1's", rate / rates[0], "ratio", SAME_RATE[transport])
            for size, rate in zip(sizes[1:], rates[1:], strict=True)
        ]
        if len(sizes) == len((1, 2, 4)):
            rows += _cross(engines, rounds, tokens)
    harness.report("gpu_parallel", rows, rounds=rounds, tokens=tokens)


def _name(who: str, size: int) -> str:
    return f"{who}, TP {size}"


def _measure(engines: Mapping[str, Engine], size: int, rounds: int, tokens: int) -> list[Row]:
    writer, reader, offloading = (engines[_name(who, size)] for who in ("writer", "reader", "offloading"))
    cold: dict[str, list[float]] = {"kvpool": [], "vLLM offloading": []}
    warm: dict[str, list[float]] = {"kvpool": [], "vLLM offloading": []}
    loads: list[dict[str, float]] = []
    for nth in range(rounds + 1):
        prompt = prompt_of(tokens, f"TP {size}, round {nth}")
        cold["kvpool"].append(writer.generate([prompt], max_tokens=1)[0].ttft_s)
        cold["vLLM offloading"].append(offloading.generate([prompt], max_tokens=1)[0].ttft_s)
        for engine in (writer, offloading):
            empty_own_cache(engine)  # Succeeds once all is stored.
        warm["vLLM offloading"].append(_loaded(offloading, prompt))
        empty_own_cache(reader)
        before = reader.metrics()
        warm["kvpool"].append(_loaded(reader, prompt, is_empty=True))
        loads.append({name: after - before[name] for name, after in reader.metrics().items() if name in LOADS})
    del loads[0]  # The first load of a process is another thing.
    count, seconds, nbytes = (sum(load[name] for load in loads) for name in LOADS)
    assert count == rounds * size, f"{count} loads of {size} ranks in {rounds} rounds"
    rows = [Row(f"TP {size}: a rank's load", nbytes / seconds / 1e9, "GB/s")]
    for what, taken in (("cold", cold), ("warm", warm)):
        rows += [
            Row(f"TP {size}: {what} TTFT, {name}", harness.ms(seconds[1:]), "ms") for name, seconds in taken.items()
        ]
    print(*rows, sep="\n", flush=True)
    return rows


def _cross(engines: Mapping[str, Engine], rounds: int, tokens: int) -> list[Row]:
    """What an engine of two ranks has stored, one of four loads."""
    writer, reader = engines[_name("writer", 2)], engines[_name("reader", 4)]
    warm = []
    for nth in range(rounds):
        prompt = prompt_of(tokens, f"TP 2 to 4, round {nth}")
        writer.generate([prompt], max_tokens=1)
        empty_own_cache(writer)
        warm.append(_loaded(reader, prompt))
    return [Row("TP 2 to TP 4: warm TTFT, kvpool", harness.ms(warm), "ms")]


def _loaded(engine: Engine, prompt: list[int], *, is_empty: bool = False) -> float:
    """Seconds to the first token of a prompt that must be loaded; `is_empty`: the engine has nothing of its own."""
    if not is_empty:
        empty_own_cache(engine)
    answer = engine.generate([prompt], max_tokens=1)[0]
    if answer.cached_tokens < len(prompt) * 0.9:
        raise RuntimeError(f"only {answer.cached_tokens} of {len(prompt)} tokens were hits")
    return answer.ttft_s


if __name__ == "__main__":
    typer.run(main)
