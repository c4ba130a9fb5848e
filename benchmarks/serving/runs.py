"""One run: engines serve a workload at one rate, and what that took."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.cases.server import cpu_s
from benchmarks.harness.measuring import percentile, until_true
from benchmarks.serving.arms import Store
from benchmarks.serving.workloads import Request, prompt
from testbed.serving_engine import Served, ServingEngine, TimedPrompt

LEAD_S = 0.5
"""Between the last command to an engine and the run's begin."""
OVERTIME_S = 300.0
STORED_S = 60.0
"""How long the first prompts may take to be stored: blocks that are being stored are in use."""
PERCENTS = (50, 90, 99)
CAUSES = "vllm:kvpool_computed_tokens:"
PREFIX_HITS = "vllm:prefix_cache_hits"
LOADS, LOAD_SECONDS = "vllm:kvpool_load_seconds_count", "vllm:kvpool_load_seconds_sum"
ENGINE_CPU, SERVER_CPU = "engine CPU", "server CPU"
DIGEST_DIGITS = 4
WARM_UP_SEED = 1
JSON_TOKENS_A_S = 2e6
"""How fast prompts reach an engine's process, at least."""


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one run; times in seconds.

    Args:
        rate: requests per second; None: all at once.
        load: the rate over the saturation's; None where the rate was given.
        ttft, tpot: time to first token and per output token: "mean", "p50", "p90", "p99".
        hit_tokens: prompt tokens that were not computed; `own_hit_tokens` of them were in the engine's own cache.
        seconds: from the first arrival to the last token.
        late: the longest time between an arrival and its submission.
        used_bytes: of the store, after the run.
        causes: tokens that were computed, by what kept kvpool from loading them.
        digests: a few digits of each answer.
        load_s: that kvpool took for a load, on average, in the worker; 0: there was none.
    """

    workload: str
    arm: str
    round: int
    rate: float | None
    load: float | None
    requests: int
    prompt_tokens: int
    ttft: Mapping[str, float]
    tpot: Mapping[str, float]
    hit_tokens: int
    own_hit_tokens: int
    seconds: float
    late: float
    engine_cpu: float
    server_cpu: float
    used_bytes: int | None
    causes: Mapping[str, int]
    digests: str
    load_s: float = 0.0

    @property
    def key(self) -> tuple[str, float | None, int]:
        """What runs of all arms have in common that are compared."""
        return self.workload, self.rate, self.round

    @property
    def throughput(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds

    def same_answers(self, other: Run) -> float:
        """Share of the requests whose answers equal those of another run."""
        digits = range(0, len(self.digests), DIGEST_DIGITS)
        equal = sum(self.digests[at : at + DIGEST_DIGITS] == other.digests[at : at + DIGEST_DIGITS] for at in digits)
        return equal / self.requests

    def __str__(self) -> str:
        rate = "all at once" if self.rate is None else f"{self.rate:.2f}/s"
        causes = ", ".join(f"{name} {count:,}" for name, count in self.causes.items())
        return (
            f"{self.workload}, {rate}, {self.arm}: TTFT mean {self.ttft['mean']:.3f} p90 {self.ttft['p90']:.3f} "
            f"p99 {self.ttft['p99']:.3f} s, hit {self.hit_tokens / self.prompt_tokens:.3f} "
            f"(own {self.own_hit_tokens / self.prompt_tokens:.3f}), {self.throughput:.2f} requests/s, "
            f"{self.seconds:.1f} s, CPU {self.engine_cpu:.1f} + {self.server_cpu:.1f} s, late {self.late * 1e3:.0f} ms"
            + (f", a load {self.load_s * 1e3:.0f} ms" if self.load_s else "")
            + (f"; computed: {causes}" if causes else "")
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run, the same for all arms.

    Args:
        routes: the engine of each request.
        seed: of the tokens.
    """

    workload: str
    requests: Sequence[Request]
    routes: Sequence[int]
    vocabulary: int
    rate: float | None
    load: float | None
    round: int

    @property
    def seed(self) -> int:
        return zlib.crc32(repr((self.workload, self.rate, self.round)).encode())

    def asked(self, request: Request, seed: int) -> tuple[list[int], int]:
        """Prompt and length of the answer."""
        return prompt(request, seed, self.vocabulary).tolist(), request.max_tokens


def warm_up(engines: Sequence[ServingEngine], plan: Plan, prompts: int = 4) -> None:
    """Has each engine compute and store some prompts, and load what it stored: the first load of a process is slow."""
    requests = random.Random(0).sample(list(plan.requests), min(prompts, len(plan.requests)))
    timed = [TimedPrompt(0.0, *plan.asked(request, WARM_UP_SEED)) for request in requests]
    for _ in range(2):
        _serve(engines, [timed] * len(engines))
        for engine in engines:
            until_true(engine.reset_prefix_cache, "the engine's blocks stay in use", STORED_S)


def measure(arm: str, store: Store, engines: Sequence[ServingEngine], plan: Plan) -> Run:
    """One run."""
    timed = [
        TimedPrompt(request.at / plan.rate if plan.rate else 0.0, *plan.asked(request, plan.seed))
        for request in plan.requests
    ]
    shares = [
        [each for each, route in zip(timed, plan.routes, strict=True) if route == nth] for nth in range(len(engines))
    ]
    before = _counters(engines, store)
    answers = [iter(share) for share in _serve(engines, shares)]
    served = [next(answers[route]) for route in plan.routes]
    grown = {name: count - before.get(name, 0) for name, count in _counters(engines, store).items()}
    used_bytes = store.used_bytes()
    store.clear()
    return Run(
        workload=plan.workload,
        arm=arm,
        round=plan.round,
        rate=plan.rate,
        load=plan.load,
        requests=len(served),
        prompt_tokens=sum(request.num_tokens for request in plan.requests),
        ttft=_distribution([each.ttft_s for each in served]),
        tpot=_distribution([each.tpot_s for each in served]),
        hit_tokens=sum(each.cached_tokens for each in served),
        own_hit_tokens=round(grown[PREFIX_HITS]),
        seconds=max(each.at_s + answer.last_s for each, answer in zip(timed, served, strict=True)),
        late=max(each.late_s for each in served),
        engine_cpu=grown[ENGINE_CPU],
        server_cpu=grown[SERVER_CPU],
        used_bytes=used_bytes,
        causes={name.removeprefix(CAUSES): round(n) for name, n in grown.items() if name.startswith(CAUSES) and n},
        digests="".join(f"{zlib.crc32(repr(each.tokens).encode()) & 0xFFFF:04x}" for each in served),
        load_s=grown[LOAD_SECONDS] / grown[LOADS] if grown.get(LOADS) else 0.0,
    )


def _serve(engines: Sequence[ServingEngine], shares: Sequence[Sequence[TimedPrompt]]) -> list[list[Served]]:
    """The answers of each engine to its share, all engines from one time on."""
    longest_s = max((share[-1].at_s for share in shares if share), default=0.0)
    tokens = sum(len(each.tokens) for share in shares for each in share)
    begin = time.monotonic() + LEAD_S + tokens / JSON_TOKENS_A_S
    threads = ThreadPoolExecutor(len(engines))
    running = [
        threads.submit(engine.serve, share, begin, longest_s + OVERTIME_S)
        for engine, share in zip(engines, shares, strict=True)
    ]
    try:
        return [each.result() for each in running]
    except BaseException:
        for engine in engines:
            engine.kill()  # Ends its thread's wait.
        raise
    finally:
        threads.shutdown()


def _counters(engines: Sequence[ServingEngine], store: Store) -> dict[str, float]:
    """What has been counted so far, over all engines, and CPU seconds."""
    counters = {PREFIX_HITS: 0.0}
    for engine in engines:
        for name, count in engine.metrics().items():
            if name in (PREFIX_HITS, LOADS, LOAD_SECONDS) or name.startswith(CAUSES):
                counters[name] = counters.get(name, 0) + count
    counters[ENGINE_CPU] = sum(cpu_s(engine.pid) for engine in engines)
    counters[SERVER_CPU] = sum(map(cpu_s, store.servers))
    return counters


def _distribution(seconds: Sequence[float]) -> dict[str, float]:
    figures = {f"p{percent}": percentile(seconds, percent) for percent in PERCENTS}
    return {"mean": sum(seconds) / len(seconds), **figures}
