"""The table of `kvpool ledger`: what fits the terminal, and what each column means."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from kvpool.protocol.reports import Cause
from kvpool.report.output import count_text, share_text
from kvpool.report.quotas import size_text
from kvpool.v1 import pool_pb2 as pb

GIB = 1 << 30
MAX_NAME_CHARS = 16
"""Longer names are folded where the table is wider than the terminal."""
UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class _Number:
    """A column of numbers.

    Args:
        value: 0 where there is nothing to print.
        is_reported: engines tell it; else the server counts it.
        rank: columns of a higher rank are left out first where the table is wider than the terminal.
    """

    name: str
    gloss: str
    rank: int
    value: Callable[[pb.LedgerRow], float]
    text: Callable[[pb.LedgerRow], str]
    is_reported: bool = False


def _gpu_time(seconds: float) -> str:
    return f"{seconds / 3_600:,.1f} h" if seconds >= 3_600 else f"{seconds:,.0f} s"


def _evicted(row: pb.LedgerRow) -> int:
    return row.computed_tokens.get(Cause.EVICTED.label, 0)


def _prompt_tokens(row: pb.LedgerRow) -> int:
    return row.loaded_tokens + sum(row.computed_tokens.values())


_NUMBERS = (
    _Number(
        "saved", "GPU time, as engines estimate", 0,
        lambda row: row.saved_gpu_seconds, lambda row: _gpu_time(row.saved_gpu_seconds), True,
    ),
    _Number(
        "lost", "GPU time by which loads were slower, likewise", 8,
        lambda row: row.lost_gpu_seconds, lambda row: _gpu_time(row.lost_gpu_seconds), True,
    ),
    _Number(
        "held", "memory, times hours", 2,
        lambda row: row.gib_hours, lambda row: f"{size_text(round(row.gib_hours * GIB))}-h",
    ),
    _Number("stored", "bytes", 7, lambda row: row.stored_bytes, lambda row: size_text(row.stored_bytes)),
    _Number("loaded", "bytes", 4, lambda row: row.loaded_bytes, lambda row: size_text(row.loaded_bytes)),
    _Number(
        "hit tokens", "prompt tokens that lookups found", 3,
        lambda row: row.hit_tokens, lambda row: count_text(row.hit_tokens),
    ),
    _Number(
        "hit ratio", "share of prompt tokens that were loaded", 1,
        _prompt_tokens, lambda row: share_text(row.loaded_tokens, _prompt_tokens(row)), True,
    ),
    _Number(
        "evicted", "tokens computed because they had made room", 6,
        _evicted, lambda row: count_text(_evicted(row)), True,
    ),
    _Number(
        "by others", "tokens looked up in vain because they had made room for other tenants", 5,
        lambda row: row.evicted_by_others_tokens, lambda row: count_text(row.evicted_by_others_tokens),
    ),
)  # fmt: skip


def ledger_table(
    rows: Sequence[pb.LedgerRow], fields: Sequence[str], title: str, console: Console
) -> tuple[Table, list[str]]:
    """Rows of a ledger as a table that fits a console, and sentences: what columns mean, and why others are left out.

    Columns are left out that are 0 in each row, that engines tell where none has reported, and that do not fit.

    Args:
        fields: by which rows are added up.
    """
    numbers = [each for each in _NUMBERS if any(map(each.value, rows))]
    hidden = []
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
    rows: Sequence[pb.LedgerRow],
    fields: Sequence[str],
    title: str,
    numbers: Sequence[_Number],
    name_chars: int | None,
) -> Table:
    heads = ("hour, UTC" if name == "hour" else name for name in fields)
    columns = [Column(head, overflow="fold", max_width=name_chars) for head in heads]
    columns += [Column(each.name.replace(" ", "\n"), justify="right", no_wrap=True) for each in numbers]
    table = Table(*columns, title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        hour = dt.datetime.fromtimestamp(row.hour, dt.UTC).strftime("%m-%d %H:%M")
        names = {"hour": hour, "tenant": row.tenant or "(none)", "model": row.model}
        is_known = _has_report(row)
        cells = (UNKNOWN if each.is_reported and not is_known else each.text(row) for each in numbers)
        table.add_row(*(escape(names[name]) for name in fields), *cells)
    return table


def _has_report(row: pb.LedgerRow) -> bool:
    return bool(row.num_requests or _prompt_tokens(row) or row.saved_gpu_seconds or row.lost_gpu_seconds)
