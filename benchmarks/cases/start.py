"""How much later does an engine start that names its weights?

Engines with Llama-3.1-8B's layers start from one checkpoint in the page cache, in turns: without a connector, with
kvpool on a host that has never read the checkpoint, and with kvpool on one that has. A start begins after the imports
and ends with the answer to a first prompt. CUDA graphs and compilation are off: nothing else delays the engine while
kvpool reads.

32 layers are 16 GB, which needs CUDA and 32 GiB of its memory; `--layers 1` (2.5 GB) starts on a CPU.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cases.gpu import prompt_of
from benchmarks.harness import measuring as harness
from benchmarks.harness.measuring import Logs, Row, alternate, at_most, estimate, timed
from testbed.engine import Engine, EngineSpec, kvpool_transfer_config
from testbed.tiny_llama import Shape, write

NUM_FILES = 4  # Of the checkpoint that is published.
PROMPT_TOKENS = 500
REACH_S = 1.0


def main(
    logs: Logs,
    layers: Annotated[int, typer.Option(help="Layers of the model; 32 are 16 GB.", min=1)] = 32,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Time the start of engines, and report how much later those with kvpool answer."""
    shape = Shape(layers, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=128_256)
    model = write(logs / "checkpoint", shape, num_files=NUM_FILES)
    nbytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(harness.kvpool_server("2GiB"))
        known = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prompts = (prompt_of(PROMPT_TOKENS, f"start {nth}") for nth in itertools.count())  # None is in the pool.
        options = {"enforce_eager": True, "max_model_len": 2048, "kv_cache_memory_bytes": 1 << 30}

        def start(name: str, cache: Path | None = None) -> float:
            environment = {"VLLM_CACHE_ROOT": str(logs / "vllm-cache")}
            if cache is not None:
                environment["XDG_CACHE_HOME"] = str(cache)
            transfer = kvpool_transfer_config(endpoint) if cache else None
            spec = EngineSpec(model, transfer, options, environment, in_process=True)
            with Engine(spec, logs / f"{name.replace(' ', '-')}.log") as engine:
                answered = timed(lambda: engine.generate([next(prompts)], max_tokens=1))
            print(f"{name}: {engine.start_s:.2f} s, first answer {answered:.2f} s", flush=True)
            return engine.start_s + answered

        def start_on_new_host() -> float:
            with tempfile.TemporaryDirectory() as cache:
                return start("never read", Path(cache))

        start("warm-up", known)
        measures = {
            "no connector": lambda: start("no connector"),
            "kvpool, weights never read": start_on_new_host,
            "kvpool, weights known": lambda: start("known", known),
        }
        taken = alternate(measures, rounds, what="starts", warmups=0)
    alone = taken.pop("no connector")
    rows = [Row("start, no connector", estimate(alone), "s")]
    for name, seconds in taken.items():
        later = estimate([a - b for a, b in zip(seconds, alone, strict=True)])
        rows += [Row(f"start, {name}", estimate(seconds), "s"), at_most(f"{name}: later by", later, "s", REACH_S)]
    harness.report("start", rows, rounds=rounds, layers=layers, weight_bytes=nbytes)


if __name__ == "__main__":
    typer.run(main)
