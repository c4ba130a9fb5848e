"""What do engines under load gain by a store beside them? Two engines serve the same requests, without and with stores.

Requests arrive in an open loop: at their times, whatever became of the ones before. Arrivals, prompts and routing are
the same for every arm, and all arms have the same memory beside the engines' own caches (`benchmarks.serving.arms`).
Rates are multiples of the saturation: of what the engines without connector serve if all requests come at once. Each
rate has prompts of its own, so that it finds none of an earlier rate's blocks; nothing is cleared, and a bounded store
is full from the second rate on, as in service.

On CPU cores a small form runs. `--gpu` runs Llama-3.1-8B's shape with random weights; two engines need CUDA, 60 GiB of
its memory, and 100 GiB of the host's. The result is written after each run: what ends early leaves what was measured.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cases.gpu import WITH_GRAPHS, write_model
from benchmarks.harness.measuring import Logs
from benchmarks.serving.arms import ARMS, Setup
from benchmarks.serving.benchmark import Benchmark, Form
from benchmarks.serving.workloads import WORKLOADS
from benchmarks.serving.workloads import trace as read_trace
from testbed import tiny_llama
from testbed.fork_server import fork_server

SHAPE = tiny_llama.Shape(layers=4, hidden=256, intermediate=512)
SMALL = Form(
    name="serving",
    arms=tuple(ARMS),
    workloads=("documents",),
    loads="0.7,1.5",
    requests=40,
    scale=1 / 16,
    kv_mib=16,
    memory_mib=64,
    kv_token_bytes=2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 4,
    vocabulary=SHAPE.vocab,
    block_tokens=32,
    max_model_len=512,
    # Not every CPU multiplies bfloat16 at a useful speed.
    options={"dtype": "float32", "max_num_batched_tokens": 512, "max_num_seqs": 16},
)
FULL = Form(
    name="serving-gpu",
    arms=tuple(ARMS),
    workloads=("documents", "random 8K", "system prompt", "8 turns"),
    loads="0.25,0.5,1,1.5,2",
    requests=354,
    scale=1.0,
    kv_mib=8 << 10,
    memory_mib=40 << 10,
    kv_token_bytes=128 << 10,
    vocabulary=128_256,
    block_tokens=16,
    max_model_len=32_768,
    options={
        "load_format": "dummy",
        **WITH_GRAPHS,
        "gpu_memory_utilization": 0.1,  # Only compared with what is free; engines share the GPU.
        "max_num_batched_tokens": 8_192,
        "max_num_seqs": 64,
    },
)


def main(
    logs: Logs,
    gpu: Annotated[bool, typer.Option("--gpu", help="The full form.")] = False,
    engines: Annotated[int, typer.Option(help="Engines that share the device: 1, 2 or 4.", min=1)] = 2,
    arms: Annotated[str, typer.Option(help="Comma-separated; default: all. " + ", ".join(ARMS))] = "",
    workloads: Annotated[str, typer.Option(help="Comma-separated; default: the form's. " + ", ".join(WORKLOADS))] = "",
    trace: Annotated[Path | None, typer.Option(help="Also this trace, in JSON lines.", exists=True)] = None,
    loads: Annotated[
        str, typer.Option(help="Rates as multiples of the saturation, which is measured first; default: the form's.")
    ] = "",
    rates: Annotated[str, typer.Option(help="Rates in requests per second, instead of --loads.")] = "",
    requests: Annotated[int, typer.Option(help="Requests of a run; 0: the form's.")] = 0,
    scale: Annotated[float, typer.Option(help="Of the workloads' tokens; 0: the form's.")] = 0.0,
    sticky: Annotated[bool, typer.Option("--sticky", help="A session's requests go to one engine.")] = False,
    kv_mib: Annotated[int, typer.Option(help="KV cache of each engine; 0: the form's.")] = 0,
    memory_mib: Annotated[int, typer.Option(help="All stores' memory in an arm; 0: the form's.")] = 0,
    kvpool: Annotated[str, typer.Option(help="Further settings of kvpool's connector, a JSON object.")] = "{}",
    rounds: Annotated[int, typer.Option(help="Rounds of each arm, in one start.", min=1)] = 1,
    budget_s: Annotated[float, typer.Option(help="Nothing begins that would end later.")] = float("inf"),
    add: Annotated[bool, typer.Option("--add", help="Keep the last result's runs.")] = False,
) -> None:
    """Measure and report."""
    chosen = FULL if gpu else SMALL
    form = replace(
        chosen,
        arms=_chosen(arms, ARMS) or chosen.arms,
        workloads=_chosen(workloads, WORKLOADS) or (() if trace else chosen.workloads),
        requests=requests or chosen.requests,
        scale=scale or chosen.scale,
        kv_mib=kv_mib or chosen.kv_mib,
        memory_mib=memory_mib or chosen.memory_mib,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end before all was measured"))
    model = write_model(logs) if gpu else tiny_llama.write(logs / "model", SHAPE)
    options = {
        **form.options,
        "block_size": form.block_tokens,
        "max_model_len": form.max_model_len,
        "kv_cache_memory_bytes": form.kv_mib << 20,
    }
    setup = Setup(model, logs, engines, form.memory_mib << 20, options, json.loads(kvpool), gpu)
    asked = {name: WORKLOADS[name](form.requests, form.scale) for name in form.workloads}
    if trace:
        asked["trace"] = read_trace(form.requests, form.scale, path=trace)
    benchmark = Benchmark(
        form,
        setup,
        asked,
        [float(each) for each in (rates or loads or form.loads).split(",")],
        are_loads=not rates,
        is_sticky=sticky,
        deadline=time.monotonic() + budget_s,
    )
    if add:
        benchmark.add_last()
    with contextlib.nullcontext() if gpu else fork_server(logs):
        benchmark.run(rounds)


def _chosen(names: str, known: Collection[str]) -> tuple[str, ...]:
    chosen = tuple(name.strip() for name in names.split(",") if name.strip())
    for name in chosen:
        if name not in known:
            raise typer.BadParameter(f"unknown {name!r}; there are {', '.join(known)}")
    return chosen


if __name__ == "__main__":
    typer.run(main)
