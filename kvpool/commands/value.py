"""`kvpool value`: what more memory, or less, would be worth."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from kvpool.commands import common
from kvpool.commands.common import AsJson, Endpoint, duration_text, printable, size_text
from kvpool.commands.output import console, count_text, say
from kvpool.config import DEFAULT_ENDPOINT
from kvpool.errors import ConfigError, InvalidRequestError
from kvpool.option_bounds import within
from kvpool.value import ValueCurve, ValueReport

DAY_S = 86_400


def value(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    tenant: Annotated[
        str | None, typer.Option(help="Only this tenant's curve. Default: all tenants together, then each.")
    ] = None,
    prefill: Annotated[
        float | None,
        typer.Option(
            callback=within(1), help="Tokens that one GPU prefills a second; says how many GPU-seconds hits save."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what smaller and larger arenas would hit, as the server estimates it from its own traffic."""
    with common.client_of(endpoint) as client:
        report = client.admin.value()
    if not report.enabled:
        raise ConfigError(f"the server at {endpoint} estimates no hit ratios; start it with --value-sample 8192")
    curves = [curve for curve in report.curves if tenant is None or (curve.tenant == tenant and not curve.is_total)]
    if tenant is not None and not curves:
        raise InvalidRequestError(f"the server has no curve of tenant {tenant!r}; without --tenant all are shown")
    if as_json:
        common.print_json(_as_json(report, curves, prefill))
        return
    if len(curves) == 2 and tenant is None:
        curves = curves[:1]  # One tenant's curve is that of all.
    shown = [curve for curve in curves if curve.estimates]
    if not shown:
        typer.echo(f"no lookups yet at {endpoint}: nothing to estimate")
        return
    for curve in shown:
        console().print(_table(report, curve, prefill))
        say(f"{count_text(curve.lookup_tokens)} tokens looked up in about {duration_text(report.seconds)}.")
        say(f"The pool, with the policy {report.policy}, hit {curve.hit_ratio:.1%} of them. The estimates are of LRU.")
    if report.left_out:
        say(f"{report.left_out:,} lookups and puts came too fast and were left out")


def _name(curve: ValueCurve) -> str:
    if curve.is_total:
        return "all tenants"
    return f"tenant {printable(curve.tenant) or '(none)'}"


def _table(report: ValueReport, curve: ValueCurve, prefill: float | None) -> Table:
    of_both = " with tiers" if report.has_tiers else ""
    names = ["memory", "size", "hits", *(["hits with tiers"] if of_both else []), f"tokens a day{of_both}"]
    names += [f"GPU-s a day{of_both}"] if prefill is not None else []
    table = Table(*(Column(name, justify="right") for name in names), title=escape(_name(curve)))
    for each in curve.estimates:
        saved = _saved_tokens_a_day(report, curve, each.hit_ratio_with_tiers)
        cells = [size_text(int(each.size * report.arena_bytes)), f"{each.size:g}x", f"{each.hit_ratio:.1%}"]
        cells += [f"{each.hit_ratio_with_tiers:.1%}"] if report.has_tiers else []
        cells += [count_text(saved)]
        cells += [count_text(saved / prefill)] if prefill is not None else []
        table.add_row(*cells, style="bold" if each.size == 1 else None)
    return table


def _saved_tokens_a_day(report: ValueReport, curve: ValueCurve, hit_ratio: float) -> float:
    return hit_ratio * curve.lookup_tokens / max(report.seconds, 1.0) * DAY_S


def _as_json(report: ValueReport, curves: list[ValueCurve], prefill: float | None) -> dict[str, Any]:
    listed = []
    for curve in curves:
        estimates = []
        for each in curve.estimates:
            saved = _saved_tokens_a_day(report, curve, each.hit_ratio_with_tiers)
            estimates.append(
                {
                    **dataclasses.asdict(each),
                    "arena_bytes": int(each.size * report.arena_bytes),
                    "saved_tokens_per_day": saved,
                    "saved_gpu_seconds_per_day": None if prefill is None else saved / prefill,
                }
            )
        listed.append({**dataclasses.asdict(curve), "hit_ratio": curve.hit_ratio, "estimates": estimates})
    return {**dataclasses.asdict(report), "curves": listed}
