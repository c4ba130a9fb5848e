"""The tables of a ledger's file with what held-out hits have measured, by hour, model and tenant.

A row of `first_token_times` is that of one size class, loaded or held out. Rows of made-up sizes, which only a damaged
file has, are left out.
"""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Mapping

from kvpool.ledger import HOUR_S
from kvpool.reports import MAX_SIZE_CLASS, Agreement, FirstTokenTimes
from kvpool_server.pairs import MAX_LABEL_CHARS, Pair
from kvpool_server.reports.totals import MAX_TOTAL, Measurements

Measured = Mapping[tuple[int, Pair], Measurements]
"""By hour, and model and tenant."""

MAX_SUM = 1e300
"""Of seconds, and of their squares."""
_AGREEMENT = tuple(each.name for each in dataclasses.fields(Agreement))
_TIMES = ("count", "sum_seconds", "sum_square_seconds")
COLUMNS = {
    "first_token_times": ("hour", "tenant", "model", "size_class", "held_out", *_TIMES),
    "agreement": ("hour", "tenant", "model", *_AGREEMENT),
}
_KEYS = {"first_token_times": COLUMNS["first_token_times"][:5], "agreement": COLUMNS["agreement"][:3]}
TABLES = ";".join(
    f"CREATE TABLE {name} ({', '.join(columns)}, PRIMARY KEY ({', '.join(_KEYS[name])})) WITHOUT ROWID"
    for name, columns in COLUMNS.items()
)
_INTEGER, _NUMBER, _TEXT = "'integer'", "'integer', 'real'", "'text'"
_KEY_TYPES = {"hour": _INTEGER, "tenant": _TEXT, "model": _TEXT}
TYPES = {
    "first_token_times": {
        **_KEY_TYPES, "size_class": _INTEGER, "held_out": _INTEGER, "count": _INTEGER, "sum_seconds": _NUMBER,
        "sum_square_seconds": _NUMBER,
    },
    "agreement": {**_KEY_TYPES, **dict.fromkeys(_AGREEMENT, _INTEGER)},
}  # fmt: skip
_MOST = {
    "count": MAX_TOTAL,
    "sum_seconds": MAX_SUM,
    "sum_square_seconds": MAX_SUM,
    **dict.fromkeys(_AGREEMENT, MAX_TOTAL),
}
_ASKED = f"""
hour > :since AND hour < :until AND (:tenant IS NULL OR tenant = :tenant)
AND length(tenant) <= {MAX_LABEL_CHARS} AND length(model) <= {MAX_LABEL_CHARS}
"""


def add(db: sqlite3.Connection, measured: Measured) -> None:
    """Adds figures to the rows of their hours, in the transaction under way. Raises sqlite3.Error."""
    all_times, agreements = [], []
    for (hour, pair), each in measured.items():
        key = hour, pair.tenant, pair.model
        for times in each.first_token_times.values():
            sums = times.count, times.sum_seconds, times.sum_square_seconds
            all_times.append((*key, times.size_class, int(times.held_out), *sums))
        if any(counts := dataclasses.astuple(each.agreement)):
            agreements.append((*key, *counts))
    db.executemany(_upsert("first_token_times", _TIMES), all_times)
    db.executemany(_upsert("agreement", _AGREEMENT), agreements)


def read(db: sqlite3.Connection, since: int, until: int, tenant: str | None) -> dict[Pair, Measurements]:
    """What was measured in hours that end after `since` and begin before `until`, by model and tenant.

    Args:
        tenant: only that tenant's; None: all.
    """
    asked = {"since": since - HOUR_S, "until": until, "tenant": tenant}
    found: dict[Pair, Measurements] = {}
    for of_tenant, model, size_class, held_out, count, *sums in db.execute(
        f"SELECT tenant, model, size_class, held_out, {_totals(_TIMES)} FROM first_token_times "
        f"WHERE {_ASKED} AND {_sound(_TIMES)} AND size_class BETWEEN 0 AND {MAX_SIZE_CLASS} AND held_out IN (0, 1) "
        "GROUP BY tenant, model, size_class, held_out",
        asked,
    ):
        times = FirstTokenTimes(size_class, bool(held_out), min(MAX_TOTAL, int(count)), *sums)
        found.setdefault(Pair(model, of_tenant), Measurements()).add([times])
    for of_tenant, model, *counts in db.execute(
        f"SELECT tenant, model, {_totals(_AGREEMENT)} FROM agreement WHERE {_ASKED} AND {_sound(_AGREEMENT)} "
        "GROUP BY tenant, model",
        asked,
    ):
        agreement = Agreement(*(min(MAX_TOTAL, int(count)) for count in counts))
        found.setdefault(Pair(model, of_tenant), Measurements()).add([], agreement)
    return found


def delete_before(db: sqlite3.Connection, hour: int) -> None:
    """Deletes the rows of earlier hours."""
    for name in COLUMNS:
        db.execute(f"DELETE FROM {name} WHERE hour < ?", (hour,))


def _upsert(table: str, names: tuple[str, ...]) -> str:
    columns = COLUMNS[table]
    sums = ", ".join(f"{name} = min({_MOST[name]!r}, {name} + excluded.{name})" for name in names)
    return (
        f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))}) "
        f"ON CONFLICT ({', '.join(_KEYS[table])}) DO UPDATE SET {sums}"
    )


def _totals(names: tuple[str, ...]) -> str:
    return ", ".join(f"total({name})" for name in names)


def _sound(names: tuple[str, ...]) -> str:
    return " AND ".join(f"{name} BETWEEN 0 AND {_MOST[name]!r}" for name in names)
