"""The file of a usage ledger: SQLite, written by one thread, for one server at a time.

A row is one hour of one model and tenant. Beside the rows the file has each reporter's newest number, which is written
with the figures of its reports: a report that is sent again after a restart of the server counts once. CHECKs of the
tables hold the type and the bounds of each value. (STRICT tables hold types alone, and need SQLite 3.37.)

Without a path the same tables are in memory.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from kvpool.protocol.errors import ConfigError
from kvpool.protocol.reports import HOUR_S, LEDGER_DAYS, MAX_AMOUNT, REPORTER_BYTES, SUMS
from kvpool.security.files import open_private
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.observability.usage import MAX_LABEL_CHARS, MAX_PAIRS
from kvpool_server.reports.engines import MAX_REPORTERS, MAX_TOTAL

MAX_ROWS = LEDGER_DAYS * 24 * (MAX_PAIRS + 1)
"""The oldest hours are deleted beyond that, and beyond `LEDGER_DAYS`."""
MAX_UNIX_S = 10**10
"""Latest hour of a row, and latest begin of a ledger."""
MAX_CAUSE_CHARS = 64
MAX_INTEGER = (1 << 63) - 1
"""The largest integer of SQLite."""
APPLICATION_ID = 0x6B76706C
FORMAT = 3
"""Of the tables; another bound in a CHECK is another format."""
LOCK_S = 10.0
"""How long a predecessor may take to let go of the file."""

Reporter = tuple[str, bytes]
"""Tenant, and the reporter's id."""


def _column(name: str, kind: str, most: float) -> str:
    """A column of one type whose values are 0 to `most`; of texts and blobs the lengths are."""
    value = name if kind in ("INTEGER", "REAL") else f"length({name})"
    return f"{name} {kind} NOT NULL CHECK (typeof({name}) = '{kind.lower()}' AND {value} BETWEEN 0 AND {most})"


_AMOUNTS = ("saved_gpu_seconds", "lost_gpu_seconds", "gib_hours")
BOUNDS = {name: MAX_AMOUNT if name in _AMOUNTS else MAX_TOTAL for name in SUMS}
_KEY = "hour, tenant, model"
_KEY_COLUMNS = ", ".join(
    [_column("hour", "INTEGER", MAX_UNIX_S), *(_column(name, "TEXT", MAX_LABEL_CHARS) for name in ("tenant", "model"))]
)
_SUM_COLUMNS = ", ".join(
    _column(name, "REAL" if name in _AMOUNTS else "INTEGER", most) for name, most in BOUNDS.items()
)
_TABLES = {
    "usage": f"{_KEY_COLUMNS}, {_SUM_COLUMNS}, PRIMARY KEY ({_KEY})",
    "computed": f"{_KEY_COLUMNS}, {_column('cause', 'TEXT', MAX_CAUSE_CHARS)}, "
    f"{_column('tokens', 'INTEGER', MAX_TOTAL)}, PRIMARY KEY ({_KEY}, cause)",
    # A reporter's tenant is no label: a namespace bounds its length.
    "reporters": f"{_column('tenant', 'TEXT', MAX_INTEGER)}, {_column('reporter', 'BLOB', REPORTER_BYTES)}, "
    f"{_column('sequence', 'INTEGER', MAX_INTEGER)}, {_column('seen', 'INTEGER', MAX_UNIX_S)}, "
    "PRIMARY KEY (tenant, reporter)",
    "begun": f"{_column('at', 'INTEGER', MAX_UNIX_S)} PRIMARY KEY",
}
_ADD_USAGE = f"INSERT INTO usage VALUES (?, ?, ?{', ?' * len(SUMS)}) ON CONFLICT ({_KEY}) DO UPDATE SET " + ", ".join(
    f"{name} = min({most}, {name} + excluded.{name})" for name, most in BOUNDS.items()
)
_ADD_COMPUTED = (
    f"INSERT INTO computed VALUES (?, ?, ?, ?, ?) ON CONFLICT ({_KEY}, cause) DO UPDATE SET "
    f"tokens = min({MAX_TOTAL}, tokens + excluded.tokens)"
)
_ADD_REPORTER = (
    "INSERT INTO reporters VALUES (?, ?, ?, ?) ON CONFLICT (tenant, reporter) DO UPDATE SET "
    "sequence = excluded.sequence, seen = excluded.seen"
)
_DELETE_REPORTERS = """
DELETE FROM reporters WHERE (tenant, reporter) IN (
  SELECT tenant, reporter
  FROM (SELECT *, row_number() OVER (PARTITION BY tenant ORDER BY seen DESC) AS nth_of_tenant FROM reporters)
  ORDER BY nth_of_tenant LIMIT -1 OFFSET ?)
"""


class LedgerFile:
    """The rows and reporters of one server. Not thread-safe: one thread at a time may call it.

    Args:
        path: of the file; empty: in memory.
        now: Unix time, seconds.

    Attributes:
        begins: Unix time, seconds, when the ledger was begun.

    Raises ConfigError if the file is no ledger, damaged, in use by another server, or open to others.
    """

    def __init__(self, path: str, now: int):
        self._path = path
        self.is_persistent = bool(path)
        if path:
            os.close(open_private(path, os.O_RDWR, "ledger", "--ledger"))
        with contextlib.ExitStack() as undo:
            try:
                self._db = sqlite3.connect(
                    path or ":memory:", timeout=LOCK_S, isolation_level=None, check_same_thread=False
                )
                undo.callback(self._db.close)
                self.begins = self._open(now)
            except sqlite3.OperationalError as error:
                raise ConfigError(
                    f"cannot use the ledger {path}: {error}; give each server a --ledger of its own, where it may write"
                ) from None
            except sqlite3.DatabaseError as error:
                raise ConfigError(
                    f"the ledger {path} is damaged, or is no ledger ({error}); move it away, or give another --ledger"
                ) from None
            undo.pop_all()

    def _open(self, now: int) -> int:
        db = self._db
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA trusted_schema = OFF")
        db.execute("BEGIN EXCLUSIVE")
        application_id, version = (
            db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        is_empty = not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if is_empty and not application_id:
            for name, columns in _TABLES.items():
                db.execute(f"CREATE TABLE {name} ({columns}) WITHOUT ROWID")
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {FORMAT}")
            db.execute("INSERT INTO begun VALUES (?)", (now,))
        elif application_id != APPLICATION_ID:
            raise ConfigError(f"{self._path} is another program's database; give another --ledger")
        elif version != FORMAT:
            raise ConfigError(
                f"the ledger {self._path} has format {version}, and this release writes {FORMAT}; use the release that "
                "wrote it, or give another --ledger"
            )
        for name in _TABLES:
            db.execute(f"SELECT 1 FROM {name} LIMIT 1")
        found = db.execute("PRAGMA quick_check(1)").fetchone()[0]  # Also checks every CHECK.
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        begun = db.execute("SELECT at FROM begun").fetchone()
        if begun is None:
            raise sqlite3.DatabaseError("it does not say when it was begun")
        db.execute("COMMIT")
        return int(begun[0])

    def reporters(self) -> dict[Reporter, int]:
        """Each reporter's newest number, the one seen longest ago first."""
        rows = self._db.execute("SELECT tenant, reporter, sequence FROM reporters ORDER BY seen")
        return {(tenant, reporter): sequence for tenant, reporter, sequence in rows}

    def add(self, rows: Iterable[pb.LedgerRow], reporters: Mapping[Reporter, int], now: int) -> None:
        """Adds figures within `BOUNDS` to the rows of their hours, or raises sqlite3.Error and changes nothing."""
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            for row in rows:
                key = row.hour, row.tenant, row.model
                db.execute(_ADD_USAGE, (*key, *(getattr(row, name) for name in SUMS)))
                db.executemany(_ADD_COMPUTED, [(*key, *computed) for computed in row.computed_tokens.items()])
            db.executemany(
                _ADD_REPORTER,
                [(*reporter, min(MAX_INTEGER, sequence), now) for reporter, sequence in reporters.items()],
            )
            self._delete_oldest(now)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise

    def _delete_oldest(self, now: int) -> None:
        self._delete_hours_before(now - LEDGER_DAYS * 24 * HOUR_S)
        while (found := self._db.execute("SELECT count(*), min(hour) FROM usage").fetchone())[0] > MAX_ROWS:
            self._delete_hours_before(found[1] + 1)
        # Of the tenant with most reporters the one seen longest ago, again and again.
        self._db.execute(_DELETE_REPORTERS, (MAX_REPORTERS,))

    def _delete_hours_before(self, hour: int) -> None:
        for table in ("usage", "computed"):
            self._db.execute(f"DELETE FROM {table} WHERE hour < ?", (hour,))

    def rows(self, since: int, until: int, tenant: str | None, most: int) -> tuple[list[pb.LedgerRow], int]:
        """Rows of hours that end after `since` and begin before `until`, by hour; and the first hour left out, or 0.

        Args:
            tenant: only that tenant's; None: all.
            most: rows; more only where one hour has more.
        """
        since, until = (max(0, min(MAX_INTEGER, at)) for at in (since, until))
        where = "WHERE hour > ? AND hour < ? AND (? IS NULL OR tenant = ?)"
        usage = f"SELECT * FROM usage {where} ORDER BY {_KEY} LIMIT ?"
        found = self._db.execute(usage, (since - HOUR_S, until, tenant, tenant, most + 1)).fetchall()
        next_since = 0
        if len(found) > most:
            next_since = found[-1][0]
            whole = [each for each in found if each[0] < next_since]
            if not whole:
                next_since += HOUR_S
            found = whole or found[:most]
        until = found[-1][0] + 1 if found else since
        rows = {each[:3]: _row(*each) for each in found}
        computed = f"SELECT * FROM computed {where}"
        for *key, cause, tokens in self._db.execute(computed, (since - HOUR_S, until, tenant, tenant)):
            if (row := rows.get(tuple(key))) is not None:
                row.computed_tokens[cause] = tokens
        return list(rows.values()), next_since

    def close(self) -> None:
        self._db.close()


def _row(hour: int, tenant: str, model: str, *sums: Any) -> pb.LedgerRow:
    return pb.LedgerRow(hour=hour, tenant=tenant, model=model, **dict(zip(SUMS, sums, strict=True)))
