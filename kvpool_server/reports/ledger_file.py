"""The file of a usage ledger: SQLite, written by one thread, for one server at a time.

A row is one hour of one model and tenant. Beside the rows the file has each reporter's newest number, which is written
with the figures of its reports: a report that is sent again after a restart of the server counts once.

Without a path the same tables are in memory.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import os
import sqlite3
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import structlog

from kvpool.errors import ConfigError
from kvpool.ledger import HOUR_S, LEDGER_DAYS, SUMS, LedgerRow
from kvpool.reports import MAX_AMOUNT, MAX_CAUSES
from kvpool_server.pairs import MAX_LABEL_CHARS, MAX_PAIRS
from kvpool_server.reports.totals import MAX_TOTAL

log = structlog.get_logger()

MAX_ROWS = LEDGER_DAYS * 24 * (MAX_PAIRS + 1)
"""The oldest hours are deleted beyond that, and beyond `LEDGER_DAYS`."""
MAX_REPORTERS = 4_096
MAX_COUNT = (1 << 63) - 1
"""Of tokens, bytes and requests of a row that is read."""
MAX_UNIX_S = 10**10
"""Latest hour of a row, and latest begin of a ledger."""
MAX_SEQUENCE = (1 << 63) - 1
"""The largest number that the file can keep of a reporter."""
APPLICATION_ID = 0x6B76706C
FORMAT = 1
"""A file of format 2 has the tables `DROPPED` besides, and becomes a file of format 1 when it is opened."""
DROPPED = ("first_token_times", "agreement")
LOCK_S = 10.0
"""How long a predecessor may take to let go of the file."""

Reporter = tuple[str, bytes]
"""Tenant, and the reporter's id."""

_AMOUNTS = ("saved_gpu_seconds", "lost_gpu_seconds", "gib_hours")
_COLUMNS = ("hour", "tenant", "model", *SUMS, "computed_tokens")
_TABLES = f"""
CREATE TABLE usage ({", ".join(_COLUMNS)}, PRIMARY KEY (hour, tenant, model)) WITHOUT ROWID;
CREATE TABLE reporters (tenant, reporter, sequence, seen, PRIMARY KEY (tenant, reporter)) WITHOUT ROWID;
CREATE TABLE begun (at);
"""
_NUMBER, _TEXT = "'integer', 'real'", "'text'"
_TYPES = {
    "usage": {
        "hour": "'integer'", "tenant": _TEXT, "model": _TEXT, **dict.fromkeys(SUMS, _NUMBER), "computed_tokens": _TEXT,
    },
    "reporters": {"tenant": _TEXT, "reporter": "'blob'", "sequence": "'integer'", "seen": "'integer'"},
}  # fmt: skip
"""What SQLite, which enforces no types, is to have in each column."""


class LedgerFile:
    """See the module. Not thread-safe: one thread at a time may call it.

    Args:
        path: of the file; empty: in memory.
        now: Unix time, seconds.

    Attributes:
        begins: Unix time, seconds, when the ledger was begun.

    Raises ConfigError if the file is no ledger, damaged, in use by another server, or open to others.
    """

    def __init__(self, path: str, now: int):
        self._path = path
        if path:
            _make_private(path)
        try:
            self._db = sqlite3.connect(
                path or ":memory:", timeout=LOCK_S, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise ConfigError(f"cannot open the ledger {path}: {error}; see --ledger") from None
        try:
            self.begins = self._open(now)
        except sqlite3.OperationalError as error:
            self._db.close()
            raise ConfigError(
                f"cannot use the ledger {path}: {error}; give each server a --ledger of its own, where it may write"
            ) from None
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise ConfigError(
                f"the ledger {path} is damaged, or is no ledger ({error}); move it away, or give another --ledger"
            ) from None
        except ConfigError:
            self._db.close()
            raise

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
            for statement in _TABLES.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {FORMAT}")
            db.execute("INSERT INTO begun VALUES (?)", (now,))
        elif application_id == APPLICATION_ID and version == 2:
            for name in DROPPED:
                db.execute(f"DROP TABLE IF EXISTS {name}")
            db.execute(f"PRAGMA user_version = {FORMAT}")
        elif application_id != APPLICATION_ID:
            raise ConfigError(f"{self._path} is another program's database; give another --ledger")
        elif version != FORMAT:
            raise ConfigError(
                f"the ledger {self._path} has format {version}, and this release writes {FORMAT}; use the release that "
                "wrote it, or give another --ledger"
            )
        db.execute("COMMIT")
        found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        tables = {name: tuple(row[1] for row in db.execute(f"PRAGMA table_info({name})")) for name in _TYPES}
        reporters = ("tenant", "reporter", "sequence", "seen")
        if tables != {"usage": _COLUMNS, "reporters": reporters}:
            raise sqlite3.DatabaseError("its tables are others")
        (begins,) = db.execute("SELECT at FROM begun").fetchone() or (None,)
        if not isinstance(begins, int) or not _is_count(begins, MAX_UNIX_S):
            raise sqlite3.DatabaseError("it does not say when it was begun")
        for table, expected in _TYPES.items():
            wrong = " OR ".join(f"typeof({name}) NOT IN ({types})" for name, types in expected.items())
            if db.execute(f"SELECT count(*) FROM (SELECT 1 FROM {table} WHERE {wrong} LIMIT 1)").fetchone()[0]:
                raise sqlite3.DatabaseError(f"its table {table} has a value of another type")
        return begins

    def reporters(self) -> dict[Reporter, int]:
        """Each reporter's newest number, the one seen longest ago first."""
        rows = self._db.execute("SELECT tenant, reporter, sequence FROM reporters ORDER BY seen").fetchall()
        return {(str(tenant), bytes(reporter)): int(sequence) for tenant, reporter, sequence in rows}

    def add(self, rows: Iterable[LedgerRow], reporters: Mapping[Reporter, int], now: int) -> None:
        """Adds figures to the rows of their hours, all or nothing. Raises sqlite3.Error; nothing has changed then."""
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            for row in rows:
                known = self._row(row.hour, row.tenant, row.model)
                db.execute(
                    f"INSERT OR REPLACE INTO usage VALUES ({', '.join('?' * len(_COLUMNS))})",
                    _values(row if known is None else _sum(row, known)),
                )
            db.executemany(
                "INSERT OR REPLACE INTO reporters VALUES (?, ?, ?, ?)",
                [
                    (tenant, reporter, min(sequence, MAX_SEQUENCE), now)
                    for (tenant, reporter), sequence in reporters.items()
                ],
            )
            self._delete_oldest(now)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise

    def _delete_oldest(self, now: int) -> None:
        db = self._db
        db.execute("DELETE FROM usage WHERE hour < ?", (now - LEDGER_DAYS * 24 * HOUR_S,))
        while db.execute("SELECT count(*) FROM usage").fetchone()[0] > MAX_ROWS:
            db.execute("DELETE FROM usage WHERE hour = (SELECT min(hour) FROM usage)")
        self._delete_reporters()

    def _delete_reporters(self) -> None:
        """Deletes the surplus ones: of the tenant with most of them the one seen longest ago, again and again."""
        db = self._db
        num_of_tenant = dict(db.execute("SELECT tenant, count(*) FROM reporters GROUP BY tenant"))
        surplus = surplus_of_each(num_of_tenant, MAX_REPORTERS)
        db.executemany(
            "DELETE FROM reporters WHERE (tenant, reporter) IN "
            "(SELECT tenant, reporter FROM reporters WHERE tenant = ? ORDER BY seen LIMIT ?)",
            surplus.items(),
        )

    def _row(self, hour: int, tenant: str, model: str) -> LedgerRow | None:
        found = self._db.execute(
            "SELECT * FROM usage WHERE hour = ? AND tenant = ? AND model = ?", (hour, tenant, model)
        ).fetchone()
        if found is None:
            return None
        try:
            return _decoded(found)
        except sqlite3.DatabaseError as error:
            log.warning("a row of the ledger is damaged, and begins anew", error=str(error))
            return None

    def rows(self, since: int, until: int, tenant: str | None, most: int) -> tuple[list[LedgerRow], int]:
        """Rows of hours that end after `since` and begin before `until`, by hour; and the first hour left out, or 0.

        Args:
            tenant: only that tenant's; None: all.
            most: rows; more only where one hour has more.
        """
        since, until = (max(0, min(MAX_COUNT, at)) for at in (since, until))
        found = self._db.execute(
            "SELECT * FROM usage WHERE hour > ? AND hour < ? AND (? IS NULL OR tenant = ?) "
            "ORDER BY hour, tenant, model LIMIT ?",
            (since - HOUR_S, until, tenant, tenant, most + 1),
        ).fetchall()
        if len(found) <= most:
            return _sound(found), 0
        last = found[-1][0]
        whole = [each for each in found if each[0] < last]
        return (_sound(whole), last) if whole else (_sound(found[:most]), last + HOUR_S)

    def close(self) -> None:
        self._db.close()


def surplus_of_each(num_of_tenant: Mapping[str, int], most: int) -> Counter[str]:
    """How many each tenant has to give up so that all have `most` together: always one of the tenant that has most."""
    surplus: Counter[str] = Counter()
    heap = [(-count, tenant) for tenant, count in num_of_tenant.items()]
    heapq.heapify(heap)
    for _ in range(sum(num_of_tenant.values()) - most):
        count, tenant = heap[0]
        surplus[tenant] += 1
        heapq.heapreplace(heap, (count + 1, tenant))
    return surplus


def _make_private(path: str) -> None:
    """Makes the file, for its owner alone; refuses one that others may write or read. Raises ConfigError."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        found = Path(path).lstat()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot open the ledger {path}: {why}; give a --ledger that the server may write") from None
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"the ledger {path} is no regular file; give another --ledger")
    if mode := stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"others may use the ledger {path} (mode {mode | 0o600:04o}), which names tenants; chmod 600 {path}"
        )


def _sound(found: Sequence[Sequence[object]]) -> list[LedgerRow]:
    rows = []
    for each in found:
        try:
            rows.append(_decoded(each))
        except sqlite3.DatabaseError as error:
            log.warning("a row of the ledger is damaged, and left out", error=str(error))
    return rows


def _values(row: LedgerRow) -> list[object]:
    sums = [getattr(row, name) for name in SUMS]
    bounded = [min(MAX_TOTAL if isinstance(value, int) else MAX_AMOUNT, value) for value in sums]
    return [row.hour, row.tenant, row.model, *bounded, json.dumps(dict(row.computed_tokens))]


def _decoded(found: Sequence[object]) -> LedgerRow:
    """Raises sqlite3.DatabaseError if the row is none that `_values` has made."""
    values = dict(zip(_COLUMNS, found, strict=True))
    try:
        causes = json.loads(str(values["computed_tokens"]))
    except (ValueError, RecursionError):
        causes = None
    is_sound = (
        isinstance(causes, dict)
        and len(causes) <= MAX_CAUSES
        and all(_is_label(cause, 64) and cause.isidentifier() and _is_count(count) for cause, count in causes.items())
        and all(_is_amount(values[name]) if name in _AMOUNTS else _is_count(values[name]) for name in SUMS)
        and _is_count(values["hour"], MAX_UNIX_S)
        and all(_is_label(values[name], MAX_LABEL_CHARS) for name in ("tenant", "model"))
    )
    if not is_sound:
        raise sqlite3.DatabaseError(f"the row of hour {values['hour']!r} is damaged")
    return LedgerRow(**{**values, "computed_tokens": causes})  # type: ignore[arg-type]


def _is_count(value: object, most: int = MAX_COUNT) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _is_label(value: object, most: int) -> bool:
    return isinstance(value, str) and len(value) <= most


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= MAX_AMOUNT


def _sum(one: LedgerRow, other: LedgerRow) -> LedgerRow:
    sums = {
        name: min(MAX_AMOUNT if name in _AMOUNTS else MAX_TOTAL, getattr(one, name) + getattr(other, name))
        for name in SUMS
    }
    causes = Counter(one.computed_tokens) + Counter(other.computed_tokens)
    causes = Counter({cause: min(MAX_TOTAL, count) for cause, count in causes.items()})
    return dataclasses.replace(one, **sums, computed_tokens=dict(causes))
