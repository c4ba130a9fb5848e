"""`kvpool ledger` and `value`: what the pool has saved, held and moved, and what more memory would save."""

from __future__ import annotations

import csv
import datetime as dt
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from kvpool.client.config import DEFAULT_ENDPOINT
from kvpool.commands import common
from kvpool.commands.common import AsJson, Endpoint, minute_text, within
from kvpool.protocol.errors import InvalidRequestError, KVPoolError
from kvpool.protocol.messages import fields_of
from kvpool.protocol.reports import SUMS, Cause, added_up
from kvpool.protocol.text import duration_text, size_text
from kvpool.report.output import console, count_text, say, share_text
from kvpool.v1 import pool_pb2 as pb

GIB = 1 << 30
DAY_S = 86_400
MAX_NAME_CHARS = 16
"""Longer names are folded where the table is wider than the terminal."""
UNKNOWN = "-"
_UNITS = {"m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_FIELDS = ("hour", "tenant", "model")
_AGO = re.compile(r"(\d{1,6})([mhdw])")


class By(StrEnum):
    """What rows are added up by."""

    TENANT = "tenant"
    MODEL = "model"
    HOUR = "hour"
    ALL = "all"
    """Rows as the server has them: by hour, tenant and model."""


def ledger(
    since: Annotated[
        str, typer.Option(help="From when on: 90m, 12h, 30d or 4w ago, or a date such as 2026-03-01, UTC.")
    ] = "30d",
    until: Annotated[str, typer.Option(help="Until when, likewise. Default: now.")] = "",
    by: Annotated[By, typer.Option(help="What rows are added up by; all: nothing.")] = By.TENANT,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, with a column for each cause.")] = False,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    as_json: AsJson = False,
) -> None:
    """Print what the pool has saved, held and moved. Estimates; docs/reference/ledger.md explains each column."""
    if as_csv and as_json:
        raise InvalidRequestError("--csv and --json exclude each other; give one of them")
    now = time.time()
    start, end = moment(since, now), moment(until, now) if until else 0
    with common.client_of(endpoint) as client:
        page = client.admin.ledger(start, end)
    fields = _FIELDS if by is By.ALL else (by.value,)
    rows = added_up(page.rows, fields)
    if as_json:
        told = {"begins": page.begins, "is_persistent": page.is_persistent}
        common.print_json({**told, "rows": [_values(row, fields) for row in rows]})
    elif as_csv:
        _print_csv(rows, fields)
    else:
        _print_table(page, rows, fields, f"ledger of {endpoint}")


def moment(text: str, now: float) -> int:
    """The Unix time that a text such as "30d" or "2026-03-01" means. Raises InvalidRequestError."""
    if found := _AGO.fullmatch(text.strip()):
        return max(0, int(now) - int(found[1]) * _UNITS[found[2]])
    try:
        at = dt.datetime.fromisoformat(text.strip())
    except ValueError:
        raise InvalidRequestError(f"{text!r} is no time; give one such as 90m, 12h, 30d, 4w or 2026-03-01") from None
    return max(0, int((at if at.tzinfo else at.replace(tzinfo=dt.UTC)).timestamp()))


def _values(row: pb.LedgerRow, fields: Sequence[str]) -> dict[str, Any]:
    """A row's fields, the hour as ISO 8601; without those that it is added up over."""
    known = fields_of(row)
    known["hour"] = dt.datetime.fromtimestamp(row.hour, dt.UTC).strftime("%Y-%m-%dT%H:%MZ")
    return {name: known[name] for name in (*fields, *SUMS, "computed_tokens")}


def _print_csv(rows: Sequence[pb.LedgerRow], fields: Sequence[str]) -> None:
    known = [cause.label for cause in Cause]
    labels = [*known, *sorted({cause for row in rows for cause in row.computed_tokens}.difference(known))]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    head = [name for name in _values(pb.LedgerRow(), fields) if name != "computed_tokens"]
    writer.writerow([*head, *(f"computed_{label}_tokens" for label in labels)])
    for row in rows:
        values = _values(row, fields)
        computed = values.pop("computed_tokens")
        writer.writerow([*map(_cell, values.values()), *(computed.get(label, 0) for label in labels)])


def _cell(value: object) -> object:
    """A cell that no spreadsheet takes for a formula: engines choose the names of models."""
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@")):
        return f"'{value}"
    return round(value, 6) if isinstance(value, float) else value


def _print_table(page: pb.LedgerResponse, rows: Sequence[pb.LedgerRow], fields: Sequence[str], title: str) -> None:
    if not rows:
        typer.echo("the ledger has no rows of that time")
    else:
        table, sentences = ledger_table(rows, fields, title, console())
        console().print(table)
        for sentence in sentences:
            say(sentence)
    begins = minute_text(dt.datetime.fromtimestamp(page.begins, dt.UTC))
    kept = f"kept since {begins}" if page.is_persistent else f"in memory since {begins}; --ledger keeps it in a file"
    say(f"The ledger is {kept}.")


@dataclass(frozen=True, slots=True)
class _Number:
    """A column of numbers.

    Args:
        value: of a row; falsy where there is nothing to print.
        text: of a value.
        is_reported: engines tell it; else the server counts it.
        rank: columns of a higher rank are left out first where the table is wider than the terminal.
    """

    name: str
    gloss: str
    rank: int
    value: Callable[[pb.LedgerRow], Any]
    text: Callable[[Any], str]
    is_reported: bool = False


def _gpu_time(seconds: float) -> str:
    return f"{seconds / 3_600:,.1f} h" if seconds >= 3_600 else f"{seconds:,.0f} s"


def _prompt_tokens(row: pb.LedgerRow) -> int:
    return row.loaded_tokens + sum(row.computed_tokens.values())


def _hit_ratio(row: pb.LedgerRow) -> str:
    total = _prompt_tokens(row)
    return share_text(row.loaded_tokens, total) if total else ""


_NUMBERS = (
    _Number("saved", "GPU time, as engines estimate", 0, attrgetter("saved_gpu_seconds"), _gpu_time, True),
    _Number(
        "lost", "GPU time by which loads were slower, likewise", 8, attrgetter("lost_gpu_seconds"), _gpu_time, True
    ),
    _Number(
        "held", "memory, times hours", 2, attrgetter("gib_hours"), lambda hours: f"{size_text(round(hours * GIB))}-h"
    ),
    _Number("stored", "bytes", 7, attrgetter("stored_bytes"), size_text),
    _Number("loaded", "bytes", 4, attrgetter("loaded_bytes"), size_text),
    _Number("hit tokens", "prompt tokens that lookups found", 3, attrgetter("hit_tokens"), count_text),
    _Number(
        "hit ratio", "share of prompt tokens that were loaded", 1, _hit_ratio, lambda ratio: ratio or UNKNOWN, True
    ),
    _Number(
        "evicted", "tokens computed because they had made room", 6,
        lambda row: row.computed_tokens.get(Cause.EVICTED.label, 0), count_text, True,
    ),
    _Number(
        "by others", "tokens looked up in vain because they had made room for other tenants", 5,
        attrgetter("evicted_by_others_tokens"), count_text,
    ),
)  # fmt: skip


def ledger_table(
    rows: Sequence[pb.LedgerRow], fields: Sequence[str], title: str, console: Console
) -> tuple[Table, list[str]]:
    """Rows of a ledger as a table that fits a console, and sentences: what columns mean, and why others are left out.

    Columns are left out that are 0 in each row, that engines tell where none has reported, and that do not fit.
    """
    numbers = [each for each in _NUMBERS if any(map(each.value, rows))]
    hidden: list[str] = []
    table = _drawn(rows, fields, title, numbers, None)
    if not _fits(table, console):
        table = _drawn(rows, fields, title, numbers, MAX_NAME_CHARS)
    while not _fits(table, console) and len(numbers) > 1:
        last = max(numbers, key=lambda each: each.rank)
        numbers.remove(last)
        hidden.append(last.name)
        table = _drawn(rows, fields, title, numbers, MAX_NAME_CHARS)
    sentences = [" ".join(f"{each.name}: {each.gloss}." for each in numbers)] if numbers else []
    has_reports = [_has_report(row) for row in rows]
    if not any(has_reports):
        unknown = ", ".join(each.name for each in _NUMBERS if each.is_reported)
        sentences.append(f"No engine reports to this server: {unknown} are unknown.")
    elif not all(has_reports):
        sentences.append(f"{UNKNOWN}: no engine has reported.")
    if hidden:
        sentences.append(f"Too wide for the terminal: {', '.join(hidden)}. --csv has all columns.")
    return table, sentences


def _fits(table: Table, console: Console) -> bool:
    wide = console.options.update(width=10_000)
    return console.measure(table, options=wide).maximum <= console.width


def _drawn(
    rows: Sequence[pb.LedgerRow], fields: Sequence[str], title: str, numbers: Sequence[_Number], name_chars: int | None
) -> Table:
    heads = ("hour, UTC" if name == "hour" else name for name in fields)
    columns = [Column(head, overflow="fold", max_width=name_chars) for head in heads]
    columns += [Column(each.name.replace(" ", "\n"), justify="right", no_wrap=True) for each in numbers]
    table = Table(*columns, title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        hour = dt.datetime.fromtimestamp(row.hour, dt.UTC).strftime("%m-%d %H:%M")
        names = {"hour": hour, "tenant": row.tenant or "(none)", "model": row.model}
        is_known = _has_report(row)
        cells = (UNKNOWN if each.is_reported and not is_known else each.text(each.value(row)) for each in numbers)
        table.add_row(*(escape(names[name]) for name in fields), *cells)
    return table


def _has_report(row: pb.LedgerRow) -> bool:
    return bool(row.num_requests or _prompt_tokens(row) or row.saved_gpu_seconds or row.lost_gpu_seconds)


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
    rows = [_value_row(curve, report, prefill) for curve in curves]
    if as_json:
        common.print_json(fields_of(report) | {"curves": rows})
        return
    if len(rows) == 2 and tenant is None:
        rows = rows[:1]  # One tenant's curve is that of all.
    shown = [row for row in rows if row["estimates"]]
    if not shown:
        typer.echo(f"no lookups yet at {endpoint}: nothing to estimate")
    for row in shown:
        console().print(_value_table(row, has_tiers=report.has_tiers))
        say(f"{count_text(row['lookup_tokens'])} tokens looked up in about {duration_text(report.seconds)}.")
        hits = f"{row['hit_ratio']:.1%}"
        say(f"The pool, with the policy {report.policy}, hit {hits} of them. The estimates are of LRU.")
    if shown and report.left_out:
        say(f"{report.left_out:,} lookups and puts came too fast and were left out")


def _value_row(curve: pb.ValueCurve, report: pb.ValueResponse, prefill: float | None) -> dict[str, Any]:
    """A curve as JSON; its `hit_ratio` is the pool's own: with tiers, blocks that came up from one are hits."""
    row = fields_of(curve) | {"hit_ratio": curve.hit_tokens / curve.lookup_tokens if curve.lookup_tokens else 0.0}
    tokens_a_day = curve.lookup_tokens / max(report.seconds, 1.0) * DAY_S
    for each in row["estimates"]:
        saved = each["hit_ratio_with_tiers"] * tokens_a_day
        each["arena_bytes"] = int(each["size"] * report.arena_bytes)
        each["saved_tokens_per_day"] = saved
        each["saved_gpu_seconds_per_day"] = None if prefill is None else saved / prefill
    return row


def _value_table(row: dict[str, Any], *, has_tiers: bool) -> Table:
    of_both = " with tiers" if has_tiers else ""
    table = Table(title=escape("all tenants" if row["is_total"] else f"tenant {row['tenant'] or '(none)'}"))
    for each in row["estimates"]:
        cells = {
            "memory": size_text(each["arena_bytes"]),
            "size": f"{each['size']:g}x",
            "hits": f"{each['hit_ratio']:.1%}",
        }
        if has_tiers:
            cells["hits with tiers"] = f"{each['hit_ratio_with_tiers']:.1%}"
        cells[f"tokens a day{of_both}"] = count_text(each["saved_tokens_per_day"])
        if (seconds := each["saved_gpu_seconds_per_day"]) is not None:
            cells[f"GPU-s a day{of_both}"] = count_text(seconds)
        if not table.columns:
            for name in cells:
                table.add_column(name, justify="right")
        table.add_row(*cells.values(), style="bold" if each["size"] == 1 else None)
    return table
