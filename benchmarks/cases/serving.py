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
import os
import random
import re
import signal
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cases.gpu import LLAMA_8B, write_model
from benchmarks.harness import measuring as harness
from benchmarks.harness.measuring import Logs
from benchmarks.serving import rows as reported
from benchmarks.serving.arms import ARMS, BASELINE, Setup, Store
from benchmarks.serving.oracle import hit_tokens
from benchmarks.serving.runs import Plan, Run, measure, warm_up
from benchmarks.serving.workloads import WORKLOADS, fitting, routes
from benchmarks.serving.workloads import trace as read_trace
from testbed import tiny_llama
from testbed.engine import EngineError, start_all
from testbed.fork_server import fork_server
from testbed.serving_engine import ServingEngine

START_S = 45.0
"""About how long an arm takes to start and to warm up."""
TRACE = "trace"
CAUSE = re.compile(r"\b\w*(?:Error|Exception): (?!Engine core initialization failed).+")


@dataclass(frozen=True, slots=True)
class Form:
    """One form of the benchmark.

    Args:
        kv_mib: KV cache of each engine.
        memory_mib: of all stores of an arm.
        kv_token_bytes: of the model's KV cache, a token.
        bound_s: of the p90 time to first token, for the rate that keeps it.
        options: further arguments of vLLM.
    """

    name: str
    arms: tuple[str, ...]
    workloads: tuple[str, ...]
    loads: str
    requests: int
    scale: float
    kv_mib: int
    memory_mib: int
    kv_token_bytes: int
    vocabulary: int
    block_tokens: int
    max_model_len: int
    bound_s: float
    options: dict[str, Any]


SHAPE = tiny_llama.Shape()
SMALL = Form(
    name="serving",
    arms=tuple(ARMS),
    workloads=("documents",),
    loads="0.5,1.5",
    requests=48,
    scale=1 / 16,
    kv_mib=24,
    memory_mib=64,
    kv_token_bytes=2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 4,
    vocabulary=SHAPE.vocab,
    block_tokens=32,
    max_model_len=512,
    bound_s=1.0,
    # Not every CPU multiplies bfloat16 at a useful speed.
    options={"dtype": "float32", "max_num_batched_tokens": 512, "max_num_seqs": 16},
)
FULL = Form(
    name="serving-gpu",
    arms=tuple(ARMS),
    workloads=("documents", "random 8K", "system prompt", "8 turns", "30 turns"),
    loads="0.25,0.5,1,1.5,2",
    requests=354,
    scale=1.0,
    kv_mib=8 << 10,
    memory_mib=40 << 10,
    kv_token_bytes=2 * LLAMA_8B["num_hidden_layers"] * LLAMA_8B["num_key_value_heads"] * LLAMA_8B["head_dim"] * 2,
    vocabulary=LLAMA_8B["vocab_size"],
    block_tokens=16,
    max_model_len=32_768,
    bound_s=1.0,
    options={
        "load_format": "dummy",
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
    loads: Annotated[str, typer.Option(help="Rates as multiples of the saturation, which is measured first.")] = "",
    rates: Annotated[str, typer.Option(help="Rates in requests per second, instead of --loads.")] = "",
    requests: Annotated[int, typer.Option(help="Requests of a run; 0: the form's.")] = 0,
    scale: Annotated[float, typer.Option(help="Of the workloads' tokens; 0: the form's.")] = 0.0,
    sticky: Annotated[bool, typer.Option("--sticky", help="A session's requests go to one engine.")] = False,
    kv_mib: Annotated[int, typer.Option(help="KV cache of each engine; 0: the form's.")] = 0,
    memory_mib: Annotated[int, typer.Option(help="All stores' memory in an arm; 0: the form's.")] = 0,
    kvpool: Annotated[str, typer.Option(help="Further settings of kvpool's connector, a JSON object.")] = "{}",
    rounds: Annotated[int, typer.Option(help="Rounds over all arms, which start anew in each.", min=1)] = 1,
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
    benchmark = Benchmark(form, setup, sticky=sticky, trace=trace, deadline=time.monotonic() + budget_s)
    if add:
        benchmark.add_last()
    if rates:
        benchmark.rates = [(float(rate), None) for rate in rates.split(",")]
    else:
        benchmark.loads = [float(load) for load in (loads or form.loads).split(",")]
    with contextlib.nullcontext() if gpu else fork_server(logs):
        benchmark.run(rounds)


class Benchmark:
    """The runs of one form.

    Args:
        deadline: on the monotonic clock; nothing begins that would end later.

    Attributes:
        loads, rates: what is run: multiples of each workload's saturation, or requests per second.
    """

    def __init__(self, form: Form, setup: Setup, *, sticky: bool, trace: Path | None, deadline: float):
        self.loads: list[float] = []
        self.rates: list[tuple[float, float | None]] = []
        self._form, self._setup, self._deadline = form, setup, deadline
        made = {name: WORKLOADS[name](form.requests, form.scale) for name in form.workloads}
        if trace:
            made[TRACE] = read_trace(form.requests, form.scale, path=trace)
        self._requests = {name: fitting(each, form.max_model_len) for name, each in made.items()}
        self._routes = {name: routes(each, setup.engines, sticky=sticky) for name, each in self._requests.items()}
        capacity_tokens = setup.memory_bytes // form.kv_token_bytes
        self._oracles = {
            name: hit_tokens(each, form.block_tokens, capacity_tokens) for name, each in self._requests.items()
        }
        self._settings = {
            "engines": setup.engines,
            "routing": "by session" if sticky else "random",
            "KV cache of each engine (MiB)": form.kv_mib,
            "memory of all stores of an arm (MiB)": form.memory_mib,
            "kvpool's settings": json.dumps(setup.kvpool) if setup.kvpool else "defaults",
            "tokens": f"{form.scale:g} times those of the workload",
            **{
                f"requests of {name!r}": f"{len(each)} of {len(made[name])} fit {form.max_model_len} tokens; "
                f"{self._oracles[name].total / max(1, len(each)):.0f} tokens on average"
                for name, each in self._requests.items()
            },
        }
        self._runs: list[Run] = []
        self._not_run: dict[str, str] = {}
        self._last = harness.last_result(form.name)

    def add_last(self) -> None:
        """Takes the runs of the last result. Raises BadParameter if they were made in another way."""
        facts = (self._last or {}).get("facts", {})
        for name, value in self._settings.items():
            if facts.get(name, value) != value:
                raise typer.BadParameter(f"the last result was measured with {name} {facts[name]!r}, not {value!r}")
        self._runs = [Run(**json.loads(run)) for run in facts.get("runs", ())]

    def run(self, rounds: int) -> None:
        """Runs all arms, each round in another order, and reports."""
        order, picks = list(self._form.arms), random.Random(0)
        for nth in range(rounds):
            for arm in order:
                if arm not in self._not_run and self._has_time(START_S, arm):
                    try:
                        self._run_arm(arm)
                    except RuntimeError as error:
                        self._not_run[arm] = self._reason(arm, error)
                        print(f"{arm} is not run: {self._not_run[arm]}", flush=True)
            if nth == 0 and BASELINE in order:
                order.remove(BASELINE)  # Which measures the saturation, at first.
                order.append(BASELINE)
            picks.shuffle(order)
        at_rates = self._at_rates()
        if not at_rates:
            sys.exit(f"nothing was measured: {self._not_run}")
        self._write()
        harness.show(self._form.name, self._last)

    def _run_arm(self, arm: str) -> None:
        earlier = [run.round for run in self._runs if run.arm == arm and run.rate]
        nth = max(earlier, default=-1) + 1
        with ExitStack() as stack:
            store = ARMS[arm](stack, self._setup)
            engines = self._start(stack, arm, store)
            for number, workload in enumerate(self._requests):
                plan = self._plan(workload, None, None, nth)
                if not number:
                    warm_up(engines, plan)
                if arm == BASELINE and self.loads and not self._saturation(workload):
                    self._measure(arm, store, engines, plan)
                for rate, load in self._rates(workload):
                    self._measure(arm, store, engines, self._plan(workload, rate, load, nth))

    def _start(self, stack: ExitStack, arm: str, store: Store) -> list[ServingEngine]:
        cores = os.cpu_count() or 1
        specs = {}
        for nth in range(self._setup.engines):
            # A core each: threads of one engine that spin would take the other's time.
            own = {} if self._setup.has_gpu else {"VLLM_CPU_OMP_THREADS_BIND": str(nth % cores)}
            specs[f"{arm} {nth}"] = replace(store.engine, environment={**store.engine.environment, **own})
        return list(start_all(stack, specs, self._setup.folder, ServingEngine).values())

    def _measure(self, arm: str, store: Store, engines: Sequence[ServingEngine], plan: Plan) -> None:
        if not self._has_time(plan.expected_s, f"{arm}, {plan.workload} at {plan.rate or 0:g} requests/s"):
            return
        run = measure(arm, store, engines, plan)
        print(run, flush=True)
        self._runs.append(run)
        self._write()

    def _rates(self, workload: str) -> list[tuple[float, float | None]]:
        if self.rates:
            return self.rates
        saturation = self._saturation(workload)
        if not saturation:
            raise RuntimeError(
                f"the saturation of {workload!r} was not measured: run the arm {BASELINE!r}, or give --rates"
            )
        return [(round(load * saturation, 3), load) for load in self.loads]

    def _saturation(self, workload: str) -> float | None:
        """What the engines without connector serve, in requests per second; None: not measured."""
        found = [run.throughput for run in self._runs if run.workload == workload and run.rate is None]
        return found[0] if found else None

    def _plan(self, workload: str, rate: float | None, load: float | None, nth: int) -> Plan:
        requests, to = self._requests[workload], self._routes[workload]
        return Plan(workload, requests, to, self._form.vocabulary, rate, load, nth)

    def _has_time(self, seconds: float, what: str) -> bool:
        if time.monotonic() + seconds <= self._deadline:
            return True
        self._not_run[what] = "its time is over"
        print(f"{what}: not run, its time is over", flush=True)
        return False

    def _reason(self, arm: str, error: RuntimeError) -> str:
        """The first cause that an engine's log names; of an error without log its message."""
        for log in (
            sorted(self._setup.folder.glob(f"{arm.replace(' ', '-')}-*.log")) if isinstance(error, EngineError) else ()
        ):
            if told := CAUSE.search(log.read_text(errors="replace")):
                return told[0]
        return str(error).splitlines()[0]

    def _at_rates(self) -> list[Run]:
        return [run for run in self._runs if run.rate]

    def _write(self) -> None:
        runs = self._at_rates()
        saturations = {name: self._saturation(name) for name in self._requests}
        facts = {
            **self._settings,
            **{f"saturation of {name!r} (requests/s)": rate for name, rate in saturations.items() if rate},
            "not run": "; ".join(f"{name}: {why}" for name, why in self._not_run.items()) or "nothing",
            "runs": [json.dumps(asdict(run)) for run in self._runs],
        }
        rows = reported.rows(runs, self._oracles, self._form.bound_s, has_targets=self._setup.has_gpu)
        harness.write(self._form.name, rows, reported.series(runs), facts, self._last)


def _chosen(names: str, known: Collection[str]) -> tuple[str, ...]:
    chosen = tuple(name.strip() for name in names.split(";" if ";" in names else ",") if name.strip())
    for name in chosen:
        if name not in known:
            raise typer.BadParameter(f"unknown {name!r}; there are {', '.join(known)}")
    return chosen


if __name__ == "__main__":
    typer.run(main)
