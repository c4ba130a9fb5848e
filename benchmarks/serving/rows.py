"""What is reported of the runs: rows with their targets, and lines over the rate."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from benchmarks.harness.measuring import Estimate, Row, Series, at_least, at_most, estimate
from benchmarks.serving.arms import BASELINE
from benchmarks.serving.oracle import HitTokens
from benchmarks.serving.runs import Run

KVPOOL = ("kvpool shm", "kvpool tcp")
BOUND_S = 1.0
"""Of the p90 time to first token, for the rate that keeps it."""
FIGURES: Mapping[str, tuple[str, Callable[[Run], float]]] = {
    **{f"TTFT {name}": ("s", lambda run, name=name: run.ttft[name]) for name in ("mean", "p50", "p90", "p99")},  # type: ignore[misc]
    **{
        f"time per output token {name}": ("ms", lambda run, name=name: 1e3 * run.tpot[name])  # type: ignore[misc]
        for name in ("mean", "p50", "p90", "p99")
    },
    "hit tokens": ("of all", lambda run: run.hit_tokens / run.prompt_tokens),
    "hit tokens, the engines' own caches": ("of all", lambda run: run.own_hit_tokens / run.prompt_tokens),
    "throughput": ("requests/s", lambda run: run.throughput),
    "CPU, engines": ("s", lambda run: run.engine_cpu),
    "CPU, server": ("s", lambda run: run.server_cpu),
}
"""Name -> unit and figure of a run."""
EQUAL = "answers equal to those without connector"
Ideal = Mapping[tuple[str, float], Mapping[str, Mapping[str, float]]]
"""Times to first token that no arm can beat, by workload and rate: store -> name of the figure -> seconds."""


def rows(runs: Sequence[Run], possible: Mapping[str, HitTokens], ideal: Ideal, *, has_targets: bool) -> list[Row]:
    """Hits that were possible, times to first token, and what the targets are about.

    Args:
        runs: those at a rate, of all rounds and arms.
        possible: hits of each workload.
        has_targets: the targets are for this form of the benchmark.
    """
    found: list[Row] = []
    for workload in dict.fromkeys(run.workload for run in runs):
        of_workload = [run for run in runs if run.workload == workload]
        found += _possible(workload, possible[workload])
        for rate in sorted({run.rate for run in of_workload if run.rate}):
            here = {arm: _rounds(of_workload, arm, rate) for arm in _arms(of_workload)}
            here = {arm: each for arm, each in here.items() if each}
            label = f"{workload}, {_load(next(iter(here.values()))[0])}"
            for name in ("TTFT mean", "TTFT p99"):
                unit, figure = FIGURES[name]
                found += [Row(f"{label}: {name}, {arm}", _over(each, figure), unit) for arm, each in here.items()]
                times = ideal.get((workload, rate), {})
                found += [Row(f"{label}: {name}, {what}", each[name], unit) for what, each in times.items()]
            if has_targets:
                found += _targets(label, here, possible[workload])
        if used := [run.used_bytes for run in of_workload if run.used_bytes]:
            found.append(Row(f"{workload}: files of tiered offloading, at most", max(used) / 2**30, "GiB"))
        found += _capacity(workload, of_workload, ideal, has_targets=has_targets)
    return found


def series(runs: Sequence[Run]) -> list[Series]:
    """Each figure over the rate, a line an arm: medians of the rounds."""
    lines = []
    for workload in dict.fromkeys(run.workload for run in runs):
        of_workload = [run for run in runs if run.workload == workload]
        baselines = {run.key: run for run in of_workload if run.arm == BASELINE}

        def equal(run: Run, baselines: Mapping[tuple[str, float | None, int], Run] = baselines) -> float:
            return run.same_answers(baselines[run.key])

        figures = {**FIGURES, **({EQUAL: ("of all", equal)} if baselines else {})}
        for name, (unit, figure) in figures.items():
            for arm in _arms(of_workload):
                points = [
                    (rate, _median(_rounds(of_workload, arm, rate), figure))
                    for rate in sorted({run.rate for run in of_workload if run.arm == arm and run.rate})
                    if name != EQUAL or all(run.key in baselines for run in _rounds(of_workload, arm, rate))
                ]
                if points:
                    x, y = zip(*points, strict=True)
                    lines.append(Series(f"{workload}: {name}", arm, "requests/s", x, unit, y))
    return lines


def rate_within(points: Sequence[tuple[float, float]], bound: float) -> float:
    """The highest rate up to which a time stays within a bound, interpolated between the rates that were run.

    Args:
        points: (rate, time), by rate.

    Returns:
        0 if no rate keeps the bound, and the last rate if all do.
    """
    kept, kept_time = 0.0, 0.0
    for rate, time in points:
        if time > bound:
            return kept and kept + (rate - kept) * (bound - kept_time) / (time - kept_time)
        kept, kept_time = rate, time
    return kept


def _possible(workload: str, hits: HitTokens) -> list[Row]:
    return [
        Row(f"{workload}: {name} would hit", tokens / hits.total, "of all tokens")
        for name, tokens in (
            ("an infinite cache", hits.infinite),
            ("LRU of the pool's size", hits.lru),
            ("a clairvoyant of the pool's size", hits.clairvoyant),
        )
    ]


def _targets(label: str, here: Mapping[str, list[Run]], hits: HitTokens) -> Iterator[Row]:
    """Of one workload and rate."""
    mean, p99 = FIGURES["TTFT mean"][1], FIGURES["TTFT p99"][1]
    token_p99, throughput = FIGURES["time per output token p99"][1], FIGURES["throughput"][1]
    is_loaded = (next(iter(here.values()))[0].load or 0) >= 1
    compared: list[tuple[str, str, str, Callable[[Run], float], Callable[..., Row]]] = []
    if not hits.infinite:
        for arm in KVPOOL:
            compared.append(("throughput", arm, BASELINE, throughput, partial(at_least, bound=0.98)))
            compared.append(("time per output token p99", arm, BASELINE, token_p99, partial(at_most, bound=1.1)))
    elif is_loaded:
        for name, figure in (("TTFT mean", mean), ("TTFT p99", p99)):
            compared.append((name, "kvpool shm", "offloading", figure, partial(at_most, bound=0.5)))
            compared.append((name, "kvpool shm", "tiered bounded", figure, partial(at_most, bound=0.8)))
            compared.append((name, "kvpool shm", "tiered", figure, Row))  # Its files are not bounded.
        compared.append(("TTFT mean", "kvpool tcp", "kvpool shm", mean, partial(at_most, bound=1.3)))
        compared.append(("TTFT mean", "kvpool tcp+tls", BASELINE, mean, partial(at_most, bound=1.0)))
    for name, ours, theirs, figure, row in compared:
        beside = {run.round: run for run in here.get(theirs, ())}
        ratios = [figure(run) / figure(beside[run.round]) for run in here.get(ours, ()) if run.round in beside]
        if ratios:
            yield row(f"{label}: {name}, {ours} over {theirs}", _figure(ratios), "ratio")
    for arm in (arm for arm in KVPOOL if arm in here and hits.clairvoyant):
        ratios = [run.hit_tokens / hits.clairvoyant for run in here[arm]]
        yield at_least(f"{label}: hit tokens, {arm} over a clairvoyant's", _figure(ratios), "ratio", 0.95)


def _capacity(workload: str, runs: Sequence[Run], ideal: Ideal, *, has_targets: bool) -> list[Row]:
    """Requests per second within the bound, and kvpool's over those of others; not of arms that ran beyond it alone."""
    points: dict[str, list[tuple[float, float]]] = {}
    for arm in _arms(runs):
        times: dict[float, list[float]] = {}
        for run in runs:
            if run.arm == arm:
                times.setdefault(run.rate or 0, []).append(run.ttft["p90"])
        points[arm] = [(rate, statistics.mean(each)) for rate, each in sorted(times.items())]
    for (of, at), stores in sorted(ideal.items()):
        for store, figures in stores.items():
            if of == workload and "TTFT p90" in figures:
                points.setdefault(store, []).append((at, figures["TTFT p90"]))
    rates = {name: rate_within(each, BOUND_S) for name, each in points.items()}
    what = f"requests per second at p90 TTFT <= {BOUND_S:g} s"
    found = [Row(f"{workload}: {what}, {name}", rate, "1/s") for name, rate in rates.items() if rate]
    for theirs, bound in (("offloading", 1.3), (BASELINE, 2.0)) if has_targets else ():
        if rates.get("kvpool shm") and rates.get(theirs):
            ratio = rates["kvpool shm"] / rates[theirs]
            found.append(at_least(f"{workload}: {what}, kvpool shm over {theirs}", ratio, "ratio", bound))
    return found


def _over(runs: Sequence[Run], figure: Callable[[Run], float]) -> float | Estimate:
    return _figure([figure(run) for run in runs])


def _figure(samples: Sequence[float]) -> float | Estimate:
    """Of one round or several."""
    return estimate(samples) if len(samples) > 1 else samples[0]


def _median(runs: Sequence[Run], figure: Callable[[Run], float]) -> float:
    return estimate([figure(run) for run in runs]).figure


def _arms(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.arm for run in runs))


def _rounds(runs: Sequence[Run], arm: str, rate: float) -> list[Run]:
    return sorted((run for run in runs if run.arm == arm and run.rate == rate), key=lambda run: run.round)


def _load(run: Run) -> str:
    return f"{run.load:g} x saturation" if run.load else f"{run.rate:g} requests/s"
