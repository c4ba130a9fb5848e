"""The table of `kvpool ledger`: what fits the terminal, and what each column means."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from kvpool.protocol.causes import Cause
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


class LedgerTable:
    """Rows of a ledger, as wide as a console.

    Columns are left out that are 0 in each row, that engines tell where none has reported, and that do not fit.

    Args:
        fields: by which rows are added up.
    """

    def __init__(self, rows: Sequence[pb.LedgerRow], fields: Sequence[str], title: str, console: Console):
        self._rows = rows
        self._fields = fields
        self._title = title
        self._numbers = [each for each in _NUMBERS if any(map(each.value, rows))]
        self.table = self._drawn(None)
        self._hidden: list[str] = []
        if not self._fits(console):
            self.table = self._drawn(MAX_NAME_CHARS)
        while not self._fits(console) and len(self._numbers) > 1:
            last = max(self._numbers, key=lambda each: each.rank)
            self._numbers.remove(last)
            self._hidden.append(last.name)
            self.table = self._drawn(MAX_NAME_CHARS)

    def sentences(self) -> Iterator[str]:
        """What the columns mean, and why others are left out."""
        if self._numbers:
            yield " ".join(f"{each.name}: {each.gloss}." for each in self._numbers)
        has_reports = [_has_report(row) for row in self._rows]
        if not any(has_reports):
            unknown = ", ".join(each.name for each in _NUMBERS if each.is_reported)
            yield f"No engine reports to this server: {unknown} are unknown."
        elif not all(has_reports):
            yield f"{UNKNOWN}: no engine has reported."
        if self._hidden:
            yield f"Too wide for the terminal: {', '.join(self._hidden)}. --csv has all columns."

    def _fits(self, console: Console) -> bool:
        wide = console.options.update(width=10_000)
        return console.measure(self.table, options=wide).maximum <= console.width

    def _drawn(self, name_chars: int | None) -> Table:
        columns = [Column(_head(name), overflow="fold", max_width=name_chars) for name in self._fields]
        for each in self._numbers:
            columns.append(Column(each.name.replace(" ", "\n"), justify="right", no_wrap=True))
        table = Table(*columns, title=escape(self._title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for row in self._rows:
            names = {"hour": hour_text(row.hour), "tenant": row.tenant or "(none)", "model": row.model}
            is_known = _has_report(row)
            cells = (UNKNOWN if each.is_reported and not is_known else each.text(row) for each in self._numbers)
            table.add_row(*(escape(names[name]) for name in self._fields), *cells)
        return table


def _has_report(row: pb.LedgerRow) -> bool:
    return bool(row.num_requests or _prompt_tokens(row) or row.saved_gpu_seconds or row.lost_gpu_seconds)


def _head(field: str) -> str:
    return "hour, UTC" if field == "hour" else field


def hour_text(hour: int) -> str:
    """An hour of the last `LEDGER_DAYS`: 11-23 07:00."""
    return dt.datetime.fromtimestamp(hour, dt.UTC).strftime("%m-%d %H:%M")
