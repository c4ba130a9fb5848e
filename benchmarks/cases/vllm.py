"""What a pool does to a real engine: vLLM on the CPU alone, with kvpool, with a dead kvpool, and with Mooncake Store.

Questions: how much does the plugin cost a prompt that nobody has stored (server healthy; server dead)? How fast is a
prompt that the pool has, beside computing it and beside vLLM's MooncakeStoreConnector?

Every round gives one new prompt to each engine in turn, then empties the engines' own caches and gives it again.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from benchmarks.harness import measuring as harness
from benchmarks.harness.measuring import Logs, Row, at_least, at_most, time_ratio
from benchmarks.peers import mooncake_store
from testbed import tiny_llama
from testbed.engine import Answer, Engine, EngineSpec, kvpool_transfer_config
from testbed.ports import free_endpoint

SHAPE = tiny_llama.Shape(hidden=1024, intermediate=2048)
MEMORY = "2GiB"
MOONCAKE_SEGMENT_BYTES = 2 << 30
WARMUPS = 2
FIRST_TOKENS = 64
"""Of the prompt that follows a reset, and is not timed."""
SETTLE_S = 0.6
"""An engine's OpenMP threads spin for 0.2 s after their last work, on the cores that the next engine is to use."""


def main(
    logs: Logs,
    rounds: Annotated[int, typer.Option(help="Prompts that count.")] = 12,
    tokens: Annotated[int, typer.Option(help="Tokens in a prompt.")] = 4096,
) -> None:
    """Time cold and warm prompts in four engines that take turns."""
    print(f"logs: {logs}", flush=True)
    model = tiny_llama.write(logs / "model", SHAPE)
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(harness.kvpool_server(MEMORY))
        dead = free_endpoint()
        master = stack.enter_context(mooncake_store.master())
        specs = {
            "alone": EngineSpec(model),
            "kvpool": EngineSpec(model, kvpool_transfer_config(endpoint)),
            "dead kvpool": EngineSpec(model, kvpool_transfer_config(dead)),
            "Mooncake": mooncake_store.engine(model, master, logs, MOONCAKE_SEGMENT_BYTES, {}),
        }
        engines = {}
        for name, spec in specs.items():
            started = time.monotonic()
            engines[name] = stack.enter_context(Engine(spec, logs / f"{name.replace(' ', '-')}.log"))
            print(f"{name}: started in {time.monotonic() - started:.0f} s", flush=True)
        taken = _measure(engines, rounds, tokens)
    _report(*taken, rounds=rounds, tokens=tokens)


def _measure(
    engines: dict[str, Engine], rounds: int, tokens: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], list[float]]:
    """Seconds to first token: prompts nobody has stored, the same again by engine, and from an engine's own cache."""
    picks = random.Random(0)
    cold: dict[str, list[float]] = {name: [] for name in engines}
    warm: dict[str, list[float]] = {name: [] for name in ("kvpool", "Mooncake")}
    own: list[float] = []
    with harness.progress("prompts", WARMUPS + rounds) as advance:
        for _ in range(WARMUPS + rounds):
            prompt = [picks.randrange(10, SHAPE.vocab) for _ in range(tokens)]
            order = list(engines)
            picks.shuffle(order)
            for name in order:
                cold[name].append(_answer(engines[name], prompt).ttft_s)
            own.append(_cached_answer(engines["alone"], prompt))
            for name in (name for name in order if name in warm):
                # Blocks that are still being stored are in use.
                harness.until_true(engines[name].reset_prefix_cache, "the engine's blocks stay in use")
                _answer(engines[name], prompt[:FIRST_TOKENS][::-1])  # kvpool looks at the weights with it.
                warm[name].append(_cached_answer(engines[name], prompt))
            advance()
    for taken in (*cold.values(), *warm.values(), own):
        del taken[:WARMUPS]
    return cold, warm, own


def _answer(engine: Engine, prompt: Sequence[int]) -> Answer:
    time.sleep(SETTLE_S)
    return engine.generate([prompt])[0]


def _cached_answer(engine: Engine, prompt: Sequence[int]) -> float:
    """Seconds to the first token of a prompt that must be a hit."""
    answer = _answer(engine, prompt)
    if answer.cached_tokens < len(prompt) * 0.9:
        raise RuntimeError(f"only {answer.cached_tokens} of {len(prompt)} tokens were hits")
    return answer.ttft_s


def _report(cold: dict[str, list[float]], warm: dict[str, list[float]], own: list[float], **facts: Any) -> None:
    rows = [Row(f"cold TTFT, {name}", harness.ms(taken), "ms") for name, taken in cold.items()]
    rows += [Row(f"warm TTFT, {name}", harness.ms(taken), "ms") for name, taken in warm.items()]
    rows += [
        Row("own cache TTFT, alone", harness.ms(own), "ms"),
        at_most("cold, kvpool over alone", time_ratio(cold["kvpool"], cold["alone"]), "ratio", 1.03),
        at_most("cold, dead kvpool over alone", time_ratio(cold["dead kvpool"], cold["alone"]), "ratio", 1.03),
        Row("cold, Mooncake over alone", time_ratio(cold["Mooncake"], cold["alone"]), "ratio"),
        at_least("kvpool: cold over warm", time_ratio(cold["alone"], warm["kvpool"]), "ratio", 20),
        Row("Mooncake: cold over warm", time_ratio(cold["alone"], warm["Mooncake"]), "ratio"),
        at_most("warm, kvpool over Mooncake", time_ratio(warm["kvpool"], warm["Mooncake"]), "ratio", 1.3),
    ]
    harness.report("vllm", rows, **facts)


if __name__ == "__main__":
    typer.run(main)
