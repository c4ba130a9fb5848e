"""Draws the results: each plot asks one question, and shows the limit or the reach beside what was measured.

The same results give the same bytes: the SVG files carry no date and no random ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update(
    {
        "svg.hashsalt": "kvpool",
        "svg.fonttype": "none",
        "font.size": 10,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "figure.titlesize": 13,
        "grid.color": "#e6e6e6",
        "legend.frameon": False,
        "lines.linewidth": 1.8,
    }
)

from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: E402

Result = Mapping[str, Any]
"""A file of benchmarks/results."""

BLUE, LIGHT_BLUE, ORANGE, RED, GREY, DARK = "#0b62b4", "#5aa9e6", "#e07b00", "#b83232", "#8a8a8a", "#444444"
RATES = {
    "memcpy": (DARK, "-", ""),
    "memcpy + xxh3": (DARK, "--", ""),
    "bare TCP socket": (GREY, "-", ""),
    "bare gRPC stream": (GREY, "--", ""),
    "kvpool shm": (BLUE, "-", "o"),
    "kvpool tcp": (LIGHT_BLUE, "-", "s"),
    "Mooncake Store, TCP": (ORANGE, "-", "^"),
    "Valkey or Redis": (RED, "-", "v"),
}
"""Colour, line and marker of each series of benchmarks.cases.sweep. Limits have no marker."""
ARMS = {
    "none": (GREY, "-", "o"),
    "offloading": (ORANGE, "-", "^"),
    "tiered": (RED, "-", "v"),
    "tiered bounded": (RED, "--", "v"),
    "mooncake": (ORANGE, "--", "D"),
    "lmcache": (DARK, "--", "x"),
    "kvpool shm": (BLUE, "-", "o"),
    "kvpool tcp": (LIGHT_BLUE, "-", "s"),
    "kvpool tcp+tls": (LIGHT_BLUE, "--", "s"),
}
"""Colour, line and marker of each arm of benchmarks.cases.serving."""
SERVED = ": TTFT mean"
LOOKUP = re.compile(r"(\d+) blocks, TP (\d+): (kvpool|mooncake) (p50|p99)")
FLOOR = re.compile(r"Ping|one block")
TTFT = re.compile(r"(cold|warm|own cache) TTFT, ([^,]+).*")
TTFT_KINDS = {"cold": "computed", "warm": "stored before", "own cache": "in its own cache (limit)"}
CLIENTS = re.compile(r"(\d+) clients?, (.+): (per second|p50|p99)")


def draw(name: str, result: Result, folder: Path) -> Path | None:
    """Writes the plot of the benchmark `name`; None if it has none, or the result lacks the figures for it."""
    figure = PLOTS[name](result) if name in PLOTS else None
    if figure is None:
        return None
    return write(figure, folder / f"{name}.svg")


def write(figure: Figure, path: Path) -> Path:
    """Writes a plot as SVG, the same bytes each time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    # Matplotlib ends lines with spaces, which editors and hooks take away.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
    return path


def throughput(result: Result) -> Figure | None:
    """Rate against the size of a chunk, by transport."""
    if not result.get("series"):
        return None
    figure = Figure(figsize=(10, 4.8), layout="constrained")
    batch_mib = result["facts"]["batch_bytes"] >> 20
    figure.suptitle(f"How fast do {batch_mib} MiB of KV cache travel, by size of chunk?", x=0.01, ha="left")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, direction in zip(panels, ("put", "get"), strict=True):
        for series in (each for each in result["series"] if each["plot"] == direction):
            colour, line, marker = RATES[series["name"]]
            label = f"{series['name']} (limit)" if series["limit"] else series["name"]
            width = 1.3 if series["limit"] else 2.2
            axes.plot(series["x"], series["y"], line, color=colour, marker=marker, label=label, linewidth=width)
        axes.set_title(direction)
        axes.set_xscale("log", base=2)
        axes.set_xticks(result["series"][0]["x"])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda kib, _: _size(kib)))
        axes.set_xlabel("chunk size")
        _log_ticks(axes)
    panels[0].set_ylabel("throughput, GB/s (1 GB = 10⁹ B)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def lookups(result: Result) -> Figure | None:
    """Time of a lookup against the number of blocks, at each tensor-parallel size."""
    found = list(_matches(result, LOOKUP))
    if not found:
        return None
    figure = Figure(figsize=(10, 4.8), layout="constrained")
    figure.suptitle("How long does a lookup take, RPC and lease included?", x=0.01, ha="left")
    tp_sizes = sorted({int(match[2]) for match, _ in found})
    panels = figure.subplots(1, len(tp_sizes), sharey=True, squeeze=False)[0]
    floors = [row for row in result["rows"] if FLOOR.search(row["what"])]
    for axes, tp_size in zip(panels, tp_sizes, strict=True):
        here = [(match, row) for match, row in found if int(match[2]) == tp_size]
        for store, colour in (("kvpool", BLUE), ("mooncake", ORANGE)):
            for percentile, line in (("p50", "-"), ("p99", "--")):
                rows = [(int(match[1]), row) for match, row in here if (match[3], match[4]) == (store, percentile)]
                x, y = [blocks for blocks, _ in rows], [row["figure"] for _, row in rows]
                label = f"{'Mooncake Store' if store == 'mooncake' else store}, {percentile}"
                axes.plot(x, y, line, color=colour, marker="o", markersize=4, label=label)
                reaches = [(blocks, _bound(row)) for blocks, row in rows if row["reach"]]
                if reaches:
                    axes.plot(*zip(*reaches, strict=True), line, color=GREY, linewidth=1, label=f"reach, {percentile}")
        for floor, line in zip(floors, (":", "-."), strict=False):
            axes.axhline(floor["figure"], color=DARK, linestyle=line, linewidth=1.2, label=floor["what"])
        axes.set_title(f"tensor-parallel size {tp_size}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({int(match[1]) for match, _ in here}))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda blocks, _: f"{blocks:,.0f}"))
        axes.set_xlabel("blocks in a lookup, all of them hits")
        _log_ticks(axes)
    panels[0].set_ylabel("time, ms")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def first_tokens(result: Result) -> Figure | None:
    """Time to first token by connector: computed, loaded, and from the engine's own cache."""
    figures = {(match[1], match[2]): row["figure"] for match, row in _matches(result, TTFT)}
    if not figures:
        return None
    colours = {"cold": GREY, "warm": BLUE, "own cache": DARK}
    bars = [
        (
            f"{_connector(name)}: {TTFT_KINDS[kind]}",
            ms,
            ORANGE if kind == "warm" and name != "kvpool" else colours[kind],
        )
        for kind in TTFT_KINDS
        for (of_kind, name), ms in figures.items()
        if of_kind == kind
    ]
    figure = Figure(figsize=(10, 1.2 + 0.42 * len(bars)), layout="constrained")
    tokens = result["facts"]["tokens"]
    figure.suptitle(f"How long until the first token of a prompt of {tokens:,} tokens?", x=0.01, ha="left")
    axes = figure.subplots()
    drawn = axes.barh([name for name, _, _ in bars], [ms for _, ms, _ in bars], color=[colour for *_, colour in bars])
    axes.bar_label(drawn, [f"{ms:,.0f} ms" if ms >= 10 else f"{ms:.1f} ms" for _, ms, _ in bars], padding=4)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.1)
    axes.set_xlabel("time to first token, ms (median)")
    return figure


def many_clients(result: Result) -> Figure | None:
    """Throughput and latency against the number of clients at once."""
    found = list(_matches(result, CLIENTS))
    if not found:
        return None
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    figure.suptitle("What do many clients at once get from one server?", x=0.01, ha="left")
    rates, times = figure.subplots(1, 2)
    works = list(dict.fromkeys(match[2] for match, _ in found))
    for work, colour in zip(works, (BLUE, ORANGE, RED), strict=False):
        for measured, axes, line in (("per second", rates, "-"), ("p50", times, "-"), ("p99", times, "--")):
            points = [
                (int(match[1]), row["figure"]) for match, row in found if (match[2], match[3]) == (work, measured)
            ]
            label = work if measured == "per second" else f"{work}, {measured}"
            axes.plot(*zip(*points, strict=True), line, color=colour, marker="o", markersize=4, label=label)
    for axes, unit in ((rates, "all clients together, per second"), (times, "time of each, ms")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({int(match[1]) for match, _ in found}))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:.0f}"))
        axes.set_xlabel("clients at once")
        axes.set_ylabel(unit)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    rates.set_ylim(bottom=0)
    _log_ticks(times)
    return figure


def hit_ratios(result: Result) -> Figure | None:
    """Hit ratio of a replayed trace against the capacity, by policy."""
    lines = [series for series in result.get("series", ()) if series["plot"] == "hit ratio"]
    if not lines:
        return None
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    figure.suptitle("How much of a real service's prompts would a pool of this size have had?", x=0.01, ha="left")
    axes = figure.subplots()
    colours = iter((BLUE, ORANGE, RED, LIGHT_BLUE))
    for series in lines:
        reference = series["limit"] or not series["name"].startswith("kvpool")
        colour = DARK if series["limit"] else GREY if reference else next(colours)
        label = f"{series['name']} (limit)" if series["limit"] else series["name"]
        style = ("--", "") if reference else ("-", "o")
        axes.plot(series["x"], series["y"], style[0], marker=style[1], color=colour, label=label)
    axes.set_xscale("log")
    axes.set_xticks(lines[0]["x"])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:g} %"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity, of the trace's distinct blocks")
    axes.set_ylabel("hits, of all blocks asked for")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def under_load(result: Result) -> Figure | None:
    """Mean time to first token against the rate of requests, by arm, a panel for each workload."""
    lines = [series for series in result.get("series", ()) if series["plot"].endswith(SERVED)]
    workloads = list(dict.fromkeys(series["plot"] for series in lines))
    if not workloads:
        return None
    figure = Figure(figsize=(10, 1 + 3.8 * -(-len(workloads) // 2)), layout="constrained")
    engines = result["facts"]["engines"]
    figure.suptitle(f"How long until the first token, from {engines} engines under load?", x=0.01, ha="left")
    panels = figure.subplots(-(-len(workloads) // 2), min(2, len(workloads)), squeeze=False)
    for axes, workload in zip(panels.flat, workloads, strict=False):
        for series in (each for each in lines if each["plot"] == workload):
            colour, line, marker = ARMS[series["name"]]
            axes.plot(series["x"], series["y"], line, color=colour, marker=marker, label=series["name"])
        axes.set_title(workload.removesuffix(SERVED))
        axes.set_xlim(left=0)
        axes.set_xlabel("requests per second")
        _log_ticks(axes)
    for axes in panels.flat[len(workloads) :]:
        axes.set_axis_off()
    panels[0, 0].set_ylabel("mean time to first token, s")
    by_label = {
        label: line for axes in panels.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=5)
    return figure


PLOTS: dict[str, Callable[[Result], Figure | None]] = {
    "transport": throughput,
    "transport-16-cores": throughput,
    "lookup": lookups,
    "lookup-10-million": lookups,
    "vllm": first_tokens,
    "gpu": first_tokens,
    "clients": many_clients,
    "clients-16-cores": many_clients,
    "replay": hit_ratios,
    "serving": under_load,
    "serving-gpu": under_load,
}


def _matches(result: Result, pattern: re.Pattern[str]) -> Iterator[tuple[re.Match[str], Mapping[str, Any]]]:
    """The rows whose names say that they belong to a plot: it shows the table's figures and no others."""
    for row in result["rows"]:
        if match := pattern.fullmatch(row["what"]):
            yield match, row


def _connector(name: str) -> str:
    return "no pool" if name == "alone" else name


def _bound(row: Mapping[str, Any]) -> float:
    return float(row["reach"].split()[-1])


def _size(kib: float) -> str:
    return f"{kib / 1024:.0f} MiB" if kib >= 1024 else f"{kib:.0f} KiB"


def _log_ticks(axes: Axes) -> None:
    """1, 2 and 5 of each power of ten, as plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
