"""`kvpool advise`: the cheapest memory, disk and GPUs for a trace, or for a live server's traffic."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from kvpool.advice import (
    HOUR_S,
    Demand,
    Option,
    Present,
    Prices,
    assumptions,
    choose,
    load_prices,
    options,
    present_option,
    uncertainty_month,
)
from kvpool.commands import common
from kvpool.commands.common import AsJson, Endpoint, duration_text, size_text
from kvpool.commands.output import console, count_text, say
from kvpool.config import DEFAULT_ENDPOINT
from kvpool.errors import InvalidRequestError
from kvpool.option_bounds import within

MAX_SHOWN = 6
MIN_TRAFFIC_S = 60.0
"""Of shorter traffic no month can be told."""


def advise(
    trace: Annotated[
        Path | None,
        typer.Argument(
            help="A recording of kvpool-server --record, or JSON lines with timestamp and hash_ids.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Ask a server, in place of a trace.")] = False,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    prices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML file with your dram_gib_month, disk_gib_month, gpu_hour, prefill_tokens_per_s, peak and "
            "disk_hit_value. Default, also of what it leaves out: round example prices, which are printed.",
        ),
    ] = None,
    target_hit_ratio: Annotated[
        float | None, typer.Option(callback=within(0, 1), help="Hit at least this share of the looked-up tokens.")
    ] = None,
    target_saved_gpu_seconds: Annotated[
        float | None, typer.Option(callback=within(0), help="Save at least so many GPU-seconds a day.")
    ] = None,
    kv_bytes_per_token: Annotated[
        int | None,
        typer.Option(callback=within(1, 1 << 30), help="Of the model; needed with JSON lines, which do not have it."),
    ] = None,
    block_tokens: Annotated[
        int, typer.Option(callback=within(1, 1 << 20), help="Tokens of a block of JSON lines.")
    ] = 512,
    as_json: AsJson = False,
) -> None:
    """Recommend the cheapest memory, disk and GPUs; without a target, the choice with the lowest cost."""
    if live == (trace is not None):
        raise InvalidRequestError("give either a TRACE or --live")
    chosen_prices = Prices() if prices is None else load_prices(prices)
    demand = _of_server(endpoint) if trace is None else _of_trace(trace, kv_bytes_per_token, block_tokens)
    found = options(demand, chosen_prices)
    margin = uncertainty_month(demand, chosen_prices)
    best = choose(found, target_hit_ratio, target_saved_gpu_seconds, margin)
    now = present_option(demand, chosen_prices)
    if as_json:
        common.print_json(
            {
                "chosen": dataclasses.asdict(best),
                "now": None if now is None else dataclasses.asdict(now),
                "options": [dataclasses.asdict(option) for option in found],
                "hit_ratio_uncertainty": demand.uncertainty,
                "month_uncertainty": margin,
                "tokens_per_s": demand.tokens_per_s,
                "seconds": demand.seconds,
                "assumptions": assumptions(chosen_prices),
            }
        )
        return
    console().print(_table(found, best, now))
    for sentence in _sentences(demand, best, margin, given=prices is not None):
        say(sentence)
    for each in assumptions(chosen_prices):
        say(f"  - {each}", indent=4)


def _of_server(endpoint: str) -> Demand:
    with common.client_of(endpoint) as client:
        report = client.admin.value()
        tiers = client.admin.stats().tiers if report.has_tiers else ()
    if not report.enabled:
        raise InvalidRequestError(f"the server at {endpoint} simulates nothing; start it with --value-sample 640")
    if not report.curves or not report.curves[0].estimates:
        raise InvalidRequestError(f"no lookups yet at {endpoint}; try again when engines have used it")
    if report.seconds < MIN_TRAFFIC_S:
        raise InvalidRequestError(
            f"the server at {endpoint} has seen {report.seconds:.0f} s of traffic; wait for {MIN_TRAFFIC_S:.0f} s"
        )
    curve = report.curves[0]
    ratios = [(int(each.size * report.arena_bytes), each.hit_ratio) for each in curve.estimates]
    present = next((each for each in curve.estimates if each.size == 1), None)
    disk_bytes = sum(tier.size_bytes for tier in tiers)
    now = None
    if present is not None:
        now = Present(report.arena_bytes, disk_bytes, present.hit_ratio, present.hit_ratio_with_tiers)
    return Demand(curve.lookup_tokens / report.seconds, _rising(ratios), curve.uncertainty, report.seconds, now)


def _of_trace(trace: Path, kv_bytes_per_token: int | None, block_tokens: int) -> Demand:
    # The client library knows no pool. The replay comes with the server, as other packages' commands do.
    try:
        traces = importlib.import_module("kvpool_server.value.trace_curve")
    except ModuleNotFoundError:
        raise InvalidRequestError("kvpool advise TRACE needs the server's packages on this host") from None
    try:
        found = traces.curve_of_trace(trace, kv_bytes_per_token, block_tokens)
    except (ValueError, OSError) as error:
        raise InvalidRequestError(str(error)) from None
    if found.seconds < MIN_TRAFFIC_S:
        raise InvalidRequestError(
            f"trace {trace} covers {found.seconds:.0f} s; give one of {MIN_TRAFFIC_S:.0f} s or more"
        )
    return Demand(found.lookup_tokens / found.seconds, _rising(found.hit_ratios), found.uncertainty, found.seconds)


def _rising(ratios: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The same, but nothing larger hits less: what looks so is the error of the estimates."""
    rising: list[tuple[int, float]] = []
    for nbytes, ratio in ratios:
        rising.append((nbytes, max(ratio, rising[-1][1]) if rising else ratio))
    return rising


def _table(found: list[Option], best: Option, now: Option | None) -> Table:
    names = ("", "memory", "disk", "hits", "GPUs", "cost a month", "saved a month")
    table = Table(*(Column(name, justify="right") for name in names))
    others = [option for option in found if now is None or not _is_alike(option, now)]
    shown = others[:MAX_SHOWN]
    if best not in shown and best in others:
        shown = [*shown[:-1], best]
    for option in shown if now is None else [now, *shown]:
        mark = "->" if _is_alike(option, best) else ""
        table.add_row(
            f"{mark} now".strip() if option is now else mark,
            size_text(option.memory_bytes),
            size_text(option.disk_bytes) if option.disk_bytes else "-",
            f"{option.hit_ratio:.1%}",
            str(option.gpus),
            _money(option.month_cost),
            _money(option.saved_month),
        )
    return table


def _is_alike(one: Option, other: Option) -> bool:
    return (one.memory_bytes, one.disk_bytes) == (other.memory_bytes, other.disk_bytes)


def _money(amount: float) -> str:
    """A rounded amount, never -0."""
    return f"{round(amount):,}"


def _sentences(demand: Demand, best: Option, margin: float, given: bool) -> Iterator[str]:
    disk = f" and {size_text(best.disk_bytes)} of disk" if best.disk_bytes else ""
    gpus = "1 GPU" if best.gpus == 1 else f"{best.gpus} GPUs"
    yield (
        f"{size_text(best.memory_bytes)} of memory{disk} and {gpus} for prefill hit {best.hit_ratio:.1%} of "
        f"{count_text(demand.tokens_per_s)} tokens a second."
    )
    saved = round(best.saved_month)
    cost = f"{abs(saved):,} a month {'less' if saved > 0 else 'more'}" if saved else "as much"
    yield (
        f"Compared with no pool that costs {cost}, and saves {count_text(best.saved_gpu_s_day)} GPU-seconds of prefill "
        "a day."
    )
    yield f"The advice is from {duration_text(demand.seconds)} of traffic."
    if demand.seconds < HOUR_S:
        yield "Less than an hour is no month: ask again when there has been more."
    yield (
        f"Hit ratios may be off by {100 * demand.uncertainty:.1f} points, which is {_money(margin)} a month. Of "
        "choices whose costs differ by no more than that, or by 1 %, the one that saves most GPU time is chosen."
    )
    if not given:
        yield "The costs are examples, from round prices that no provider has: give yours with --prices FILE."
    yield f"{'Your' if given else 'Example'} prices, and assumptions:"
