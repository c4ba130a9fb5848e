"""`kvpool bench replay`: the hit ratios of a trace, by eviction policy and by capacity."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvpool_server.cache.eviction import POLICIES, check_policy
from kvpool_server.replay.replay import num_steps, policy_ratios, reference_ratios
from kvpool_server.replay.request import num_blocks, num_distinct, num_prompts, recorded_ratio
from kvpool_server.replay.trace import load

DEFAULT_SHARES = [1, 2, 5, 10, 20, 50]
LIMIT = "clairvoyant"
RECORDED = "recorded"
"""Column of what the recorded pool hit, at a size that a recording does not tell."""

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Replay traces, without a server.")


@app.callback()
def _group() -> None:
    """Measure without a server."""


@app.command("replay")
def command(
    trace: Annotated[
        Path,
        typer.Argument(
            help="A recording of kvpool-server --record, or JSON lines with timestamp (ms) and hash_ids.",
            exists=True,
            dir_okay=False,
        ),
    ],
    policy: Annotated[
        list[str] | None, typer.Option(help=f"{' or '.join(POLICIES)}; repeat it for several. Default: all.")
    ] = None,
    share: Annotated[
        list[float] | None,
        typer.Option(help="Capacity in per cent of the trace's distinct blocks; repeat it for several. Default: six."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw hit ratio against capacity into this SVG or PNG.")] = None,
) -> None:
    """Print the share of a trace's blocks that a pool of each capacity would have hit.

    Of a recording the first row has the share that the recorded pool hit.
    Beside the policies stand plain LRU, block by block, and the clairvoyant limit, which no policy can exceed.
    """
    policies, shares = policy or list(POLICIES), sorted(share or DEFAULT_SHARES)
    try:
        for name in policies:
            check_policy(name)
    except ValueError as error:
        _refuse(str(error))
    if wrong := [each for each in shares if not 0 < each <= 100]:
        _refuse(f"--share {wrong[0]:g} is out of range; give more than 0 and at most 100 per cent")
    if plot is not None and plot.suffix not in (".svg", ".png"):
        _refuse(f"--plot {plot} is neither SVG nor PNG; give a name that ends in .svg or .png")
    if plot is not None and not plot.parent.is_dir():
        _refuse(f"--plot {plot}: the directory {plot.parent} does not exist; create it first")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        _refuse("--plot needs matplotlib; run `pip install matplotlib`")
    try:
        requests = load(trace)
    except (ValueError, OSError) as error:
        _refuse(str(error))
    total, distinct = num_blocks(requests), num_distinct(requests)
    if not total:
        _refuse(f"trace {trace} has no blocks; give one with hash_ids")
    capacities = [max(1, int(distinct * each / 100)) for each in shares]
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replay", total=num_steps(requests, len(capacities), len(policies)))

        def advance() -> None:
            progress.advance(task)

        ratios = {name: policy_ratios(requests, capacities, name, advance) for name in policies}
        ratios |= reference_ratios(requests, capacities, advance)
    title = f"{trace.name}: {num_prompts(requests):,} prompts, {total:,} blocks, {distinct:,} of them distinct"
    _print(title, recorded_ratio(requests), shares, capacities, ratios)
    if plot is not None:
        _draw(plot, shares, ratios)
        typer.echo(f"plot: {plot}")


def _print(
    title: str,
    recorded: float | None,
    shares: list[float],
    capacities: list[int],
    ratios: dict[str, list[float]],
) -> None:
    table = Table(title=title)
    table.add_column("capacity", justify="right")
    table.add_column("blocks", justify="right")
    for name in (*([] if recorded is None else [RECORDED]), *ratios):
        table.add_column(name, justify="right")
    if recorded is not None:
        table.add_row("recorded size", "-", f"{recorded:.3f}", *["-"] * len(ratios))
    for nth, (each, capacity) in enumerate(zip(shares, capacities, strict=True)):
        unknown = [] if recorded is None else ["-"]
        table.add_row(f"{each:g} %", f"{capacity:,}", *unknown, *(f"{column[nth]:.3f}" for column in ratios.values()))
    Console().print(table)


def _draw(path: Path, shares: list[float], ratios: dict[str, list[float]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, column in ratios.items():
        limit = name == LIMIT
        axes.plot(shares, column, "--" if limit else "-o", color="grey" if limit else None, label=name)
    axes.set_xscale("log")
    axes.set_xticks(shares, [f"{each:g} %" for each in shares])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity, of the trace's distinct blocks")
    axes.set_ylabel("hit ratio, of all blocks looked up")
    axes.legend()
    figure.savefig(path)


def _refuse(why: str) -> NoReturn:
    typer.echo(f"kvpool bench replay: {why}", err=True)
    raise typer.Exit(2)
