"""All runs of the benchmark: the arms one after the other, each with its engines and its store, and the result."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import typer

from benchmarks.harness import measuring as harness
from benchmarks.serving import rows as reported
from benchmarks.serving.arms import ARMS, BASELINE, Setup, Store
from benchmarks.serving.ideal import Device, first_token_times
from benchmarks.serving.oracle import HitTokens, hit_tokens
from benchmarks.serving.runs import Plan, Run, measure, warm_up
from benchmarks.serving.workloads import Request, fitting, routes
from testbed.engine import EngineError, start_all
from testbed.serving_engine import ServingEngine

START_S = 60.0
"""About how long an arm takes to start and to warm up."""
BURST_S = 60.0
"""About how long all requests of a workload take that come at once."""
CAUSE = re.compile(r"\b\w*(?:Error|Exception): (?!Engine core initialization failed).+")
NOT_RUN, OF_WORKLOAD = "not run: ", "requests of "
EARLIER = "added to runs of the commits"


@dataclass(frozen=True, slots=True)
class Form:
    """One form of the benchmark.

    Args:
        kv_mib: KV cache of each engine.
        loads: multiples of the saturation, comma-separated.
        requests: of a run.
        scale: what the workloads' lengths are multiplied with.
        memory_mib: of all stores of an arm.
        kv_token_bytes: of the model's KV cache, a token.
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
    options: dict[str, Any]


class Benchmark:
    """The runs of one form.

    Args:
        asked: the requests of each workload.
        rates: what each workload is run at, in requests per second; with `are_loads` multiples of its saturation.
        is_sticky: the requests of a session go to one engine.
        deadline: on the monotonic clock; nothing begins that would end later.
    """

    def __init__(
        self,
        form: Form,
        setup: Setup,
        asked: Mapping[str, Sequence[Request]],
        rates: Sequence[float],
        *,
        are_loads: bool,
        is_sticky: bool,
        deadline: float,
    ):
        self._form, self._setup, self._deadline = form, setup, deadline
        self._given, self._are_loads = rates, are_loads
        self._requests = {name: fitting(each, form.max_model_len) for name, each in asked.items()}
        self._routes = {name: routes(each, setup.engines, sticky=is_sticky) for name, each in self._requests.items()}
        blocks = form.block_tokens, setup.memory_bytes // form.kv_token_bytes
        self._possible = {name: hit_tokens(each, *blocks) for name, each in self._requests.items()}
        self._facts: dict[str, Any] = {
            "device": _device() if setup.has_gpu else "CPU",
            "engines": setup.engines,
            "routing": "by session" if is_sticky else "random",
            "KV cache of each engine (MiB)": form.kv_mib,
            "memory of all stores of an arm (MiB)": form.memory_mib,
            "kvpool's settings": json.dumps(setup.kvpool) if setup.kvpool else "defaults",
        }
        for name, each in self._requests.items():
            self._facts[OF_WORKLOAD + name] = (
                f"{len(each)}, with {self._possible[name].total / len(each):,.0f} tokens on average; "
                f"{len(asked[name]) - len(each)} more are longer than {form.max_model_len:,} tokens"
            )
        self._runs: list[Run] = []
        self._ideal: dict[tuple[str, float], dict[str, Mapping[str, float]]] = {}
        self._last = harness.last_result(form.name)

    def add_last(self) -> None:
        """Takes over the runs of the last result. Raises BadParameter if they were made in another way."""
        last, self._last = self._last, None  # A result is not compared with a part of itself.
        facts = (last or {}).get("facts", {})
        for name, value in self._facts.items():
            if facts.get(name, value) != value:
                raise typer.BadParameter(f"the last result was measured with {name} {facts[name]!r}, not {value!r}")
        self._facts |= {name: value for name, value in facts.items() if name.startswith((NOT_RUN, OF_WORKLOAD))}
        commits = facts.get(EARLIER, "").split(", ")
        self._facts[EARLIER] = ", ".join(dict.fromkeys([*filter(None, commits), (last or {}).get("commit", "")[:12]]))
        self._runs = [Run(**json.loads(run)) for run in facts.get("runs", ())]
        self._possible |= {name: HitTokens(**each) for name, each in facts.get("possible", {}).items()}
        self._ideal = {(workload, rate): times for workload, rate, times in facts.get("ideal", ())}

    def run(self, rounds: int) -> None:
        """Runs all arms, in each as many rounds, and reports."""
        for arm in self._form.arms:  # The first of them is the baseline, which measures the saturation.
            if not self._has_time(START_S, arm):
                continue
            try:
                self._run_arm(arm, rounds)
            except Exception as error:  # Whatever ends one arm, the others are measured.
                self._leave_out(arm, self._reason(arm, error))
        if not any(run.rate for run in self._runs):
            sys.exit("nothing was measured")
        self._write()
        harness.show(self._form.name, self._last)

    def _run_arm(self, arm: str, rounds: int) -> None:
        done = (run.round for run in self._runs if run.arm == arm and run.rate and run.workload in self._requests)
        first = 1 + max(done, default=-1)
        with ExitStack() as stack:
            store = ARMS[arm](stack, self._setup)
            engines = self._start(stack, arm, store)
            warm_up(engines, self._plan(next(iter(self._requests)), None, None, first))
            for nth in range(first, first + rounds):  # In one start, which takes longer than a round.
                for workload in self._requests:
                    if arm == BASELINE and self._are_loads and not self._saturation(workload):
                        self._measure(arm, store, engines, self._plan(workload, None, None, nth))
                    for rate, load in self._rates(workload):
                        self._measure(arm, store, engines, self._plan(workload, rate, load, nth))

    def _start(self, stack: ExitStack, arm: str, store: Store) -> list[ServingEngine]:
        cores = len(os.sched_getaffinity(0))
        specs = {}
        for nth in range(self._setup.engines):
            # A core each: threads of one engine that spin would take the other's time.
            own = {} if self._setup.has_gpu else {"VLLM_CPU_OMP_THREADS_BIND": str(nth % cores)}
            specs[f"{arm} {nth}"] = replace(store.engine, environment={**store.engine.environment, **own})
        return list(start_all(stack, specs, self._setup.folder, ServingEngine).values())

    def _measure(self, arm: str, store: Store, engines: Sequence[ServingEngine], plan: Plan) -> None:
        # Engines that are slower than the requests come need longer, and those of the baseline are the slowest.
        slower = min(plan.rate or 0, self._saturation(plan.workload) or plan.rate or 0)
        seconds = 1.2 * len(plan.requests) / slower if slower else BURST_S
        if self._has_time(seconds, f"{arm}, {plan.workload}, {plan.rate or 0:.3g} requests/s"):
            self._runs.append(measure(arm, store, engines, plan))
            if plan.rate:
                self._find_ideal(plan.workload, plan.rate)
            print(self._runs[-1], flush=True)
            self._write()

    def _rates(self, workload: str) -> list[tuple[float, float | None]]:
        """Requests per second, and the multiple of the saturation that they are."""
        if not self._are_loads:
            return [(rate, None) for rate in self._given]
        if not (saturation := self._saturation(workload)):
            raise RuntimeError(f"{workload} has no saturation: run the arm {BASELINE!r} first, or give --rates")
        return [(round(load * saturation, 3), load) for load in self._given]

    def _saturation(self, workload: str) -> float | None:
        """What the engines without connector serve, in requests per second; None: not measured."""
        found = [run.throughput for run in self._runs if run.workload == workload and run.rate is None]
        return found[0] if found else None

    def _find_ideal(self, workload: str, rate: float) -> None:
        """What the best stores could reach on this device, whose speed is that of the saturation."""
        found = [run for run in self._runs if run.workload == workload and run.rate is None]
        times = self._ideal.get((workload, rate), {}).get("ideal pool", {})
        if not found or "TTFT p90" in times:  # Which results of earlier commits lack.
            return
        tokens_s = (found[0].prompt_tokens - found[0].hit_tokens) / found[0].seconds
        own, stores = self._form.kv_mib << 20, self._setup.memory_bytes // self._setup.engines
        self._ideal[workload, rate] = {
            f"ideal {name}": first_token_times(
                self._requests[workload],
                self._routes[workload],
                rate,
                Device(
                    tokens_s,
                    self._form.options["max_num_batched_tokens"],
                    self._form.block_tokens,
                    memory_bytes // self._form.kv_token_bytes,
                ),
                is_shared=is_shared,
            )
            for name, memory_bytes, is_shared in (("private stores", own + stores, False), ("pool", own, True))
        }

    def _plan(self, workload: str, rate: float | None, load: float | None, nth: int) -> Plan:
        requests, to = self._requests[workload], self._routes[workload]
        return Plan(workload, requests, to, self._form.vocabulary, rate, load, nth)

    def _has_time(self, seconds: float, what: str) -> bool:
        self._facts.pop(NOT_RUN + what, None)  # Of the last result.
        has_time = time.monotonic() + seconds <= self._deadline
        if not has_time:
            self._leave_out(what, "its time is over")
        return has_time

    def _leave_out(self, what: str, why: str) -> None:
        self._facts[NOT_RUN + what] = why
        print(f"{what} is not run: {why}", flush=True)

    def _reason(self, arm: str, error: Exception) -> str:
        """The error, and what an engine's log names as its cause."""
        logs = sorted(self._setup.folder.glob(f"{arm.replace(' ', '-')}-?.log"))
        causes = [cause for log in logs for cause in CAUSE.findall(log.read_text(errors="replace"))]
        return ": ".join([str(error).partition("\n")[0], *(causes[-1:] if isinstance(error, EngineError) else ())])

    def _write(self) -> None:
        runs = [run for run in self._runs if run.rate]
        facts = {
            **self._facts,
            **{
                f"saturation of {run.workload} (requests/s)": round(run.throughput, 3)
                for run in self._runs
                if run.rate is None
            },
            "possible": {name: asdict(each) for name, each in self._possible.items()},
            "ideal": [[*key, times] for key, times in self._ideal.items()],
            "runs": [json.dumps(asdict(run)) for run in self._runs],
        }
        rows = reported.rows(runs, self._possible, self._ideal, has_targets=self._setup.has_gpu)
        harness.write(self._form.name, rows, reported.series(runs), facts, self._last)


def _device() -> str:
    """Name of the GPU."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
