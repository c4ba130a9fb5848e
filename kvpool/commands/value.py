"""`kvpool value`: what more memory, or less, would be worth."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kvpool.client.config import DEFAULT_ENDPOINT
from kvpool.commands import common
from kvpool.commands.common import AsJson, Endpoint, within
from kvpool.protocol.errors import InvalidRequestError, KVPoolError
from kvpool.protocol.messages import fields_of
from kvpool.protocol.text import duration_text
from kvpool.report.output import console, count_text, say
from kvpool.report.quotas import size_text
from kvpool.v1 import pool_pb2 as pb

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
        raise KVPoolError(f"the server at {endpoint} estimates no hit ratios; start it with --value-sample 8192")
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
        hits = f"{_hit_ratio(curve):.1%}"
        say(f"The pool, with the policy {report.policy}, hit {hits} of them. The estimates are of LRU.")
    if report.left_out:
        say(f"{report.left_out:,} lookups and puts came too fast and were left out")


def _hit_ratio(curve: pb.ValueCurve) -> float:
    """The ratio that the pool itself has counted; with tiers, blocks that came up from one are hits."""
    return curve.hit_tokens / curve.lookup_tokens if curve.lookup_tokens else 0.0


def _saved_tokens_a_day(report: pb.ValueResponse, curve: pb.ValueCurve, hit_ratio: float) -> float:
    return hit_ratio * curve.lookup_tokens / max(report.seconds, 1.0) * DAY_S


def _table(report: pb.ValueResponse, curve: pb.ValueCurve, prefill: float | None) -> Table:
    of_both = " with tiers" if report.has_tiers else ""
    title = "all tenants" if curve.is_total else f"tenant {curve.tenant or '(none)'}"
    table = Table(title=escape(title))
    for each in curve.estimates:
        saved = _saved_tokens_a_day(report, curve, each.hit_ratio_with_tiers)
        cells = {
            "memory": size_text(int(each.size * report.arena_bytes)),
            "size": f"{each.size:g}x",
            "hits": f"{each.hit_ratio:.1%}",
        }
        if report.has_tiers:
            cells["hits with tiers"] = f"{each.hit_ratio_with_tiers:.1%}"
        cells[f"tokens a day{of_both}"] = count_text(saved)
        if prefill is not None:
            cells[f"GPU-s a day{of_both}"] = count_text(saved / prefill)
        if not table.columns:
            for name in cells:
                table.add_column(name, justify="right")
        table.add_row(*cells.values(), style="bold" if each.size == 1 else None)
    return table


def _as_json(report: pb.ValueResponse, curves: list[pb.ValueCurve], prefill: float | None) -> dict[str, Any]:
    rows = []
    for curve in curves:
        row = fields_of(curve) | {"hit_ratio": _hit_ratio(curve)}
        for each in row["estimates"]:
            saved = _saved_tokens_a_day(report, curve, each["hit_ratio_with_tiers"])
            each["arena_bytes"] = int(each["size"] * report.arena_bytes)
            each["saved_tokens_per_day"] = saved
            each["saved_gpu_seconds_per_day"] = None if prefill is None else saved / prefill
        rows.append(row)
    return fields_of(report) | {"curves": rows}
