"""`kvpool ledger`: what the pool has saved, held and moved, by tenant, model or hour."""

from __future__ import annotations

import csv
import datetime as dt
import re
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from kvpool.client.config import DEFAULT_ENDPOINT
from kvpool.commands import common
from kvpool.commands.common import AsJson, Endpoint, minute_text
from kvpool.commands.ledger_table import ledger_table
from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.messages import fields_of
from kvpool.protocol.reports import SUMS, Cause, added_up
from kvpool.report.output import console, say
from kvpool.v1 import pool_pb2 as pb

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
    values = {name: known[name] for name in (*_FIELDS, *SUMS, "computed_tokens")}
    values["hour"] = dt.datetime.fromtimestamp(row.hour, dt.UTC).strftime("%Y-%m-%dT%H:%MZ")
    return {name: value for name, value in values.items() if name in fields or name not in _FIELDS}


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
