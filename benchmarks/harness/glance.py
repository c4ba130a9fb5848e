"""The first screen of docs/explanation/benchmarks.md: one table and four plots, of kvpool, its peers and the limit.

Each bar is one row of a committed result, which the table names. A question without its results is left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.harness.plots import BLUE, DARK, GREY, ORANGE, write

OURS, PEER, NONE, LIMIT = "kvpool", "peer", "without a pool", "limit"
COLOURS = {OURS: BLUE, PEER: ORANGE, NONE: GREY, LIMIT: DARK}


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of a result.

    Attributes:
        kind: OURS, PEER, NONE or LIMIT.
        result: where it is not the question's: name of the result's file.
    """

    label: str
    row: str
    kind: str
    result: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """One plot, and one row of the table.

    Attributes:
        result: name of the result's file.
        is_time: less is better.
        told: how it was measured, in a sentence.
    """

    name: str
    title: str
    result: str
    is_time: bool
    bars: tuple[Bar, ...]
    told: str


QUESTIONS = (
    Question(
        "under-load",
        "How long until the first token, of two engines that get more requests than their GPU computes?",
        "serving-gpu",
        True,
        (
            Bar("no pool", "documents, 1.5 x saturation: TTFT mean, none", NONE),
            Bar("vLLM offloading, in each engine", "documents, 1.5 x saturation: TTFT mean, offloading", PEER),
            Bar("vLLM tiered offloading, files", "documents, 1.5 x saturation: TTFT mean, tiered bounded", PEER),
            Bar("kvpool, over TCP, encrypted", "documents, 1.5 x saturation: TTFT mean, kvpool tcp+tls", OURS),
            Bar("kvpool, over TCP", "documents, 1.5 x saturation: TTFT mean, kvpool tcp", OURS),
            Bar("kvpool, shared memory", "documents, 1.5 x saturation: TTFT mean, kvpool shm", OURS),
            Bar("limit: a pool that costs nothing", "documents, 1.5 x saturation: TTFT mean, ideal pool", LIMIT),
        ),
        "Means of 354 questions about documents, half as many again a second as the GPU computes. All have the same "
        "memory; the limit is simulated. Not drawn: Mooncake's connector, over TCP, took tens of seconds.",
    ),
    Question(
        "first-token",
        "How long until the first token of a prompt of 20,000 tokens?",
        "gpu",
        True,
        (
            Bar("computed, no pool", "cold TTFT, alone", NONE),
            Bar("Mooncake's connector, over TCP", "warm TTFT, Mooncake", PEER),
            Bar("vLLM offloading, in one process", "warm TTFT, vLLM offloading", PEER),
            Bar("kvpool, from another process", "warm TTFT, kvpool, another process", OURS),
            Bar("limit: the engine's own cache", "own cache TTFT, alone", LIMIT),
        ),
        "One GPU, a model of Llama 3.1 8B's shape. Offloading shares nothing with other processes. Mooncake's "
        "connector used TCP with its connection pool, no RDMA.",
    ),
    Question(
        "bytes",
        "How fast does one client load blocks over TCP?",
        "transport-16-cores",
        False,
        (
            Bar("Mooncake Store", "Mooncake Store, TCP get", PEER),
            Bar("kvpool", "tcp get", OURS),
            Bar("limit of one connection: a bare socket", "bare socket get", LIMIT),
            Bar("limit of eight: bare sockets", "8 connections, bare get", LIMIT, "network-16-cores"),
        ),
        "A host with 16 cores, loopback. kvpool takes up to eight connections and verifies checksums; Mooncake's "
        "client and the sockets verify none. The limit of eight is from another run on such a host.",
    ),
    Question(
        "lookup",
        "How long does a lookup of 8,192 blocks take, for eight tensor-parallel ranks?",
        "lookup",
        True,
        (
            Bar("Mooncake Store", "8192 blocks, TP 8: mooncake p50", PEER),
            Bar("kvpool", "8192 blocks, TP 8: kvpool p50, beside mooncake", OURS),
            Bar("limit: a call that does nothing", "Ping, a call of its own: p50", LIMIT),
        ),
        "Two cores, a million entries. kvpool is asked once for all ranks, and gives a lease; Mooncake is asked for "
        "each rank's keys, without a lease.",
    ),
)


def section(results: Path, plots: Path, page: Path) -> list[str]:
    """Lines of the page: the table, the plots, and how many targets were met.

    Args:
        results: folder of the results' files.
        plots: folder that gets the plots.
        page: which links to them.
    """
    asked = [(question, figures) for question in QUESTIONS if (figures := _figures(question, results))]
    if not asked:
        return []
    lines = [
        "## At a glance",
        "",
        "| question | kvpool | best peer | without a pool | limit | result |",
        "|---|---|---|---|---|---|",
        *(_row(question, figures, results, page) for question, figures in asked),
        "",
        _targets(results),
        "",
    ]
    for question, figures in asked:
        path = write(_plot(question, figures), plots / f"glance-{question.name}.svg")
        lines += [f"![{question.title}]({os.path.relpath(path, page.parent)})", "", question.told, ""]
    return lines


def _figures(question: Question, results: Path) -> dict[str, tuple[float, str]]:
    """Row -> figure and unit of all bars; empty if the result or a row is missing."""
    rows: dict[str, tuple[float, str]] = {}
    for name in {question.result, *(bar.result for bar in question.bars if bar.result)}:
        path = results / f"{name}.json"
        if not path.exists():
            return {}
        rows |= {row["what"]: (row["figure"], row["unit"]) for row in json.loads(path.read_text())["rows"]}
    found = {bar.row: rows[bar.row] for bar in question.bars if bar.row in rows}
    return found if len(found) == len(question.bars) else {}


def _row(question: Question, figures: dict[str, tuple[float, str]], results: Path, page: Path) -> str:
    cells = [_best(question, figures, kind) for kind in (OURS, PEER, NONE, LIMIT)]
    link = os.path.relpath(results / f"{question.result}.md", page.parent)
    return f"| {question.title} | **{cells[0]}** | {' | '.join(cells[1:])} | [{question.result}]({link}) |"


def _best(question: Question, figures: dict[str, tuple[float, str]], kind: str) -> str:
    """The best figure of a kind: of limits the hardest one to reach."""
    found = [figures[bar.row] for bar in question.bars if bar.kind == kind]
    if not found:
        return ""
    return _text(*(min(found) if question.is_time else max(found)))


def _text(figure: float, unit: str) -> str:
    return f"{figure:,.0f} {unit}" if figure >= 100 else f"{figure:.3g} {unit}"


def _plot(question: Question, figures: dict[str, tuple[float, str]]) -> Figure:
    figure = Figure(figsize=(9, 1.1 + 0.42 * len(question.bars)), layout="constrained")
    figure.suptitle(question.title, x=0.01, ha="left")
    axes = figure.subplots()
    values = [figures[bar.row] for bar in question.bars]
    drawn = axes.barh(
        [bar.label for bar in question.bars],
        [value for value, _ in values],
        color=[COLOURS[bar.kind] for bar in question.bars],
    )
    axes.bar_label(drawn, [_text(value, unit) for value, unit in values], padding=4)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.12)
    axes.set_xlabel(f"{values[0][1]} ({'less' if question.is_time else 'more'} is better)")
    return figure


def _targets(results: Path) -> str:
    """How many of the targets that were set before measuring have been met."""
    verdicts = list(_verdicts(results))
    met, missed = verdicts.count("yes"), verdicts.count("no")
    return (
        f"{len(verdicts)} targets were set before measuring: {met} are met, {missed} are not, and "
        f"{len(verdicts) - met - missed} lie within the noise. The page of each result names those that were missed."
    )


def _verdicts(results: Path) -> Iterator[str]:
    for path in sorted(results.glob("*.json")):
        for row in json.loads(path.read_text())["rows"]:
            if row["met"] is not None:
                yield {True: "yes", False: "no"}.get(row["met"], "noise")
