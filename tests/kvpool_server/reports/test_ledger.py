"""The ledger adds up what it is told, by the hour; keeps it in a bounded, private file; shows tenants their own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sqlite3
import stat
import threading
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvpool.client.admin import MAX_PARTS
from kvpool.protocol.errors import ConfigError
from kvpool.protocol.reports import HOUR_S, LEDGER_DAYS, MAX_AMOUNT, MAX_LEDGER_ROWS, Cause, ReportRequest, added_up
from kvpool.protocol.types import BlockRun, ShardRange
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.arena import Arena
from kvpool_server.observability.usage import OTHER, Pairs
from kvpool_server.reports import engines, ledger_file, usage_ledger
from kvpool_server.reports.engines import MAX_TOTAL, EngineReports
from kvpool_server.reports.ledger_file import LedgerFile
from kvpool_server.reports.usage_ledger import UsageLedger, count_evictions
from kvpool_server.sharing import Limits
from testbed.pool_at_once import PoolAtOnce
from tests.support.clock import FakeClock
from tests.support.values import block_hash, group_spec, namespace_spec, replaced

HOUR = 500_000 * HOUR_S
EVICTED = Cause.EVICTED.label
GIB = 1 << 30


class Bench:
    """A ledger whose clocks and usage the test sets."""

    def __init__(self, path: str = "") -> None:
        self.path = path
        self.unix, self.clock = FakeClock(HOUR), FakeClock()
        self.usage: list[pb.UsageStats] = []
        self.reports = EngineReports(self.clock)

    async def open(self) -> UsageLedger:
        self.reports = EngineReports(self.clock)
        file = LedgerFile(self.path, int(self.unix()))
        self.ledger = UsageLedger(file, self.reports, Pairs(), lambda: self.usage, self.unix, self.clock)
        return self.ledger

    def report(self, tenant: str = "acme", sequence: int = 1, **fields: Any) -> bool:
        report = ReportRequest(reporter=tenant.encode().ljust(16), sequence=sequence, namespaces=(b"n" * 32,), **fields)
        return self.reports.report(report, tenant, "model")

    def advance(self, seconds: float) -> None:
        self.unix.advance(seconds)
        self.clock.advance(seconds)

    async def page(self, tenant: str | None = None, since: int = 0, until: int = 0) -> pb.LedgerResponse:
        return await self.ledger.page(since, until, tenant)


def row(nth_hour: int = 0, tenant: str = "acme", **figures: Any) -> pb.LedgerRow:
    return pb.LedgerRow(hour=HOUR + nth_hour * HOUR_S, tenant=tenant, model="m", **figures)


Scenario = Callable[[Bench], Coroutine[Any, Any, None]]


def run(path: str, scenario: Scenario) -> None:
    """Runs a scenario with an open ledger, and closes it."""

    async def all_of_it() -> None:
        bench = Bench(path)
        await bench.open()
        await scenario(bench)
        await bench.ledger.close()

    asyncio.run(all_of_it())


@pytest.fixture(params=["memory", "file"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "" if request.param == "memory" else str(tmp_path / "ledger.sqlite")


def test_a_call_that_is_cancelled_loses_no_figures(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_readable, read_rows = threading.Event(), LedgerFile.rows

    def rows(file: LedgerFile, *args: Any) -> Any:
        assert is_readable.wait(60)
        return read_rows(file, *args)

    monkeypatch.setattr(LedgerFile, "rows", rows)

    async def scenario(bench: Bench) -> None:
        for has_news in (False, True):  # The second call waits for the thread, which is still at work for the first.
            if has_news:
                bench.report(num_requests=3)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(bench.page(), 0.1)
        is_readable.set()
        await bench.ledger.flush()
        assert [row.num_requests for row in (await bench.page()).rows] == [3]

    run(path, scenario)


def test_a_row_is_what_was_told_in_its_hour(path: str) -> None:
    async def scenario(bench: Bench) -> None:
        bench.report(
            saved_seconds=2.0, lost_seconds=0.5, num_devices=4, loaded_tokens=10, num_requests=3,
            computed_tokens={EVICTED: 5},
        )  # fmt: skip
        bench.usage = [
            pb.UsageStats(tenant="acme", model="model", stored_bytes=100, loaded_bytes=50, hit_tokens=7, held_bytes=GIB)
        ]
        bench.ledger.evicted(("model", "acme"), ("model", "umbra"), 64)
        bench.advance(1_800)
        bench.ledger.sample()
        bench.advance(1_800)
        bench.usage = [replaced(bench.usage[0], stored_bytes=130)]
        bench.ledger.sample()
        bench.report(sequence=2, saved_seconds=1.0, computed_tokens={EVICTED: 1, "declined": 2})
        found = (await bench.page()).rows
        assert list(found) == [
            pb.LedgerRow(
                hour=HOUR, tenant="acme", model="model", saved_gpu_seconds=8.0, lost_gpu_seconds=2.0, gib_hours=0.5,
                stored_bytes=100, loaded_bytes=50, loaded_tokens=10, hit_tokens=7, num_requests=3,
                evicted_by_others_tokens=64, computed_tokens={EVICTED: 5},
            ),
            pb.LedgerRow(hour=HOUR, tenant="umbra", model="model", evicted_of_others_tokens=64),
            pb.LedgerRow(
                hour=HOUR + HOUR_S, tenant="acme", model="model", saved_gpu_seconds=1.0, lost_gpu_seconds=0.0,
                gib_hours=0.5, stored_bytes=30, computed_tokens={EVICTED: 1, "declined": 2},
            ),
        ]  # fmt: skip
        assert (await bench.page(since=HOUR + HOUR_S)).rows == found[2:]
        assert (await bench.page(until=HOUR + HOUR_S)).rows == found[:2]
        for since, until, count in ((-(1 << 63), 0, 3), (0, (1 << 63) - 1, 3), ((1 << 63) - 1, 0, 0)):
            assert len((await bench.page(since=since, until=until)).rows) == count
        for tenant in ("umbra", OTHER):
            bench.report(tenant, num_requests=1)
        bench.ledger._row(bench.ledger._pairs.of(OTHER, OTHER)).num_requests += 1  # Of several tenants.
        assert {each.tenant for each in (await bench.page("acme")).rows} == {"acme"}
        assert [(each.tenant, each.model) for each in (await bench.page(OTHER)).rows] == [(OTHER, "model")]
        assert len((await bench.page()).rows) == 6

    run(path, scenario)


def test_the_ledger_survives_a_restart_and_counts_no_report_again(tmp_path: Path) -> None:
    path = str(tmp_path / "ledger.sqlite")

    async def scenario(bench: Bench) -> None:
        assert bench.report(num_requests=3)
        before = await bench.page()
        for _ in range(2):
            await bench.ledger.close()
            bench.advance(60)
            await bench.open()
            assert not bench.report(num_requests=3), "the engine did not hear that it was counted"
            assert await bench.page() == before
        assert bench.report(sequence=2, num_requests=4)
        await bench.ledger.close()  # Writes what nobody has asked for.
        await bench.open()
        assert [row.num_requests for row in (await bench.page()).rows] == [7]
        assert before.is_persistent and before.begins == HOUR

    run(path, scenario)
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600


@pytest.mark.parametrize("stage", [0, 1])
def test_a_repeated_lookup_blames_nobody_again(stage: int) -> None:
    """Each eviction for another tenant's blocks counts once, however often, and by how many stages, they are asked for.

    The first stage counts.
    """
    ids, chunk_bytes = itertools.count(1), 64
    pool = PoolAtOnce(Arena(64 * chunk_bytes, 64 * chunk_bytes), FakeClock(), lambda: next(ids), Limits())
    spec = group_spec(chunk_bytes=chunk_bytes)
    blocks = BlockRun(0, [block_hash(nth) for nth in range(60)])
    spaces = {
        tenant: pool.open_namespace(namespace_spec(spec, tenant=tenant, pipeline_stage=stage))[0].fingerprint
        for tenant in ("bob", "acme")
    }
    for fingerprint in spaces.values():
        grant = pool.put_start(fingerprint, [blocks], ShardRange(0, 1), 60_000)
        pool.put_end(grant.ticket_id, [0] * len(grant.offsets))

    async def scenario(bench: Bench) -> None:
        counted = []
        for _ in range(3):
            found = pool.lookup(spaces["bob"], [blocks], prefix_only=True)
            hits = pool.explanations.misses(spaces["bob"], [blocks], found.hits)
            count_evictions(pool, spaces["bob"], [blocks], hits, bench.ledger)
            counted.append(sum(row.evicted_of_others_tokens for row in (await bench.page("acme")).rows))
        num_evicted = len(blocks) - found.hits[0].num_leading
        assert num_evicted > 1 and counted == [0 if stage else num_evicted * spec.block_tokens] * 3

    run("", scenario)


@pytest.mark.parametrize("error", [sqlite3.OperationalError("database or disk is full"), OverflowError("too large")])
def test_what_cannot_be_written_waits(path: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(bench: Bench) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(LedgerFile, "add", Mock(side_effect=error))
            bench.report(num_requests=1, computed_tokens={EVICTED: 5})
            await bench.ledger.flush()
            bench.report(sequence=2, num_requests=2, computed_tokens={EVICTED: 6})
            await bench.ledger.flush()
            assert (await bench.page()).rows == []
        bench.report(sequence=3, num_requests=4)
        (found,) = (await bench.page()).rows
        assert (found.num_requests, found.computed_tokens) == (7, {EVICTED: 11})

    run(path, scenario)


@pytest.mark.parametrize("most", [4, 100])
def test_rows_and_reporters_have_an_end_and_long_answers_come_in_parts_of_whole_hours(
    path: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 2 * ledger_file.MAX_ROWS / MAX_LEDGER_ROWS < MAX_PARTS, "a client reads parts that are half full"
    monkeypatch.setattr(ledger_file, "MAX_ROWS", most)
    monkeypatch.setattr(ledger_file, "MAX_REPORTERS", 4)
    with closing(LedgerFile(path, HOUR)) as file:
        file.add([], {("umbra", b"r"): 7}, HOUR)
        rows = [row(nth, f"t{at}", num_requests=1) for nth in range(5) for at in range(3)]
        for nth in range(5):
            file.add(rows[3 * nth : 3 * nth + 3], {("acme", bytes([nth])): nth}, HOUR + nth * HOUR_S)
        found, since, parts = [], 0, 0
        while since or not parts:
            part, since = file.rows(since, 1 << 40, None, 7)
            found += part
            parts += 1
        assert found == (rows[-3:] if most == 4 else rows) and parts == (1 if most == 4 else 3)
        assert file.rows(0, 1 << 40, "t1", 100)[0] == [each for each in found if each.tenant == "t1"]
        assert file.reporters() == {("umbra", b"r"): 7} | {("acme", bytes([nth])): nth for nth in (2, 3, 4)}
        later = HOUR + 4 * HOUR_S + LEDGER_DAYS * 24 * HOUR_S
        file.add([row(4 + LEDGER_DAYS * 24)], {}, later)
        assert [each.hour for each in file.rows(0, 1 << 40, None, 100)[0]] == [HOUR + 4 * HOUR_S] * 3 + [later]


def test_few_reporters_wait_for_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (engines, usage_ledger):
        monkeypatch.setattr(module, "MAX_REPORTERS", 8)
    fingerprint = (b"n" * 32,)

    async def scenario(bench: Bench) -> None:
        bench.report("umbra", num_requests=1)
        with monkeypatch.context() as patch:
            patch.setattr(LedgerFile, "add", Mock(side_effect=sqlite3.OperationalError("database or disk is full")))
            for nth in range(100):
                report = ReportRequest(reporter=nth.to_bytes(16, "big"), sequence=1, namespaces=fingerprint)
                bench.reports.report(report, "acme", "model")
                assert len(bench.ledger._reporters) <= 16
            await bench.ledger.flush()
            waiting = list(bench.ledger._reporters)
        latest = [("acme", nth.to_bytes(16, "big")) for nth in range(93, 100)]
        assert waiting == [("umbra", b"umbra".ljust(16)), *latest]

    run("", scenario)


def test_sums_have_an_end(path: str) -> None:
    with closing(LedgerFile(path, HOUR)) as file:
        most = row(gib_hours=MAX_AMOUNT, loaded_tokens=MAX_TOTAL, computed_tokens={EVICTED: MAX_TOTAL})
        for _ in range(3):
            file.add([most], {("acme" * 100, b"r"): 1 << 64}, HOUR)
        assert file.rows(0, 1 << 40, None, 10)[0] == [most]
        assert file.reporters() == {("acme" * 100, b"r"): (1 << 63) - 1}


def not_a_database(path: Path) -> None:
    path.write_bytes(b"no database at all" * 1_000)
    path.chmod(0o600)


def damaged(path: Path) -> None:
    with closing(LedgerFile(str(path), HOUR)) as file:
        file.add([row(nth, "acme" * 20) for nth in range(400)], {}, HOUR)
    whole = bytearray(path.read_bytes())
    whole[8_192:16_384] = b"\xff" * 8_192
    path.write_bytes(whole)


def open_to_others(path: Path) -> None:
    path.touch(mode=0o644)


def a_directory(path: Path) -> None:
    path.mkdir()


def a_link(path: Path) -> None:
    (path.parent / "elsewhere").touch()
    path.symlink_to(path.parent / "elsewhere")


def altered(statement: str, *values: object) -> Callable[[Path], None]:
    """Makes a ledger, or with CREATE TABLE another program's file, and executes a statement in its database."""

    def make(path: Path) -> None:
        if not statement.startswith("CREATE"):
            with closing(LedgerFile(str(path), HOUR)) as file:
                file.add([row(computed_tokens={EVICTED: 1})], {("acme", b"r"): 1}, HOUR)
            LedgerFile(str(path), HOUR).close()
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("PRAGMA ignore_check_constraints = ON")  # As a program that means harm would.
            db.execute(statement, values)
        path.chmod(0o600)

    return make


DAMAGES: dict[str, list[object]] = {
    "usage SET hour": [-1, ledger_file.MAX_UNIX_S + 1],
    "usage SET tenant": ["x" * 101, b"x"],
    "usage SET loaded_tokens": [-1, 0.5, "x"],
    "usage SET gib_hours": [1e300, float("inf"), "x"],
    "computed SET cause": ["x" * 65],
    "computed SET tokens": [-1, MAX_TOTAL + 1, "x"],
    "reporters SET reporter": ["x", b"x" * 17],
    "reporters SET sequence": [-1, 0.5, "x"],
    "reporters SET seen": ["x"],
    "begun SET at": [-1, "x"],
}
UNSOUND = "is damaged, or is no ledger"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (not_a_database, UNSOUND),
        (damaged, UNSOUND),
        (altered("CREATE TABLE passwords (name)"), "is another program's database"),
        (altered("PRAGMA user_version = 99"), "has format 99, and this release writes 3"),
        (altered("ALTER TABLE usage RENAME TO abuse"), "no such table: usage"),
        (open_to_others, "others may use the ledger"),
        (a_directory, "cannot open the ledger"),
        (a_link, "cannot open the ledger"),
        *((altered(f"UPDATE {what} = ?", value), UNSOUND) for what, values in DAMAGES.items() for value in values),
    ],
)
def test_a_file_that_is_no_sound_ledger_is_refused(make: Callable[[Path], None], says: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(ConfigError, match=says):
        LedgerFile(str(path), HOUR)
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_two_servers_do_not_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_file, "LOCK_S", 0.05)
    path = str(tmp_path / "ledger.sqlite")
    with closing(LedgerFile(path, HOUR)), pytest.raises(ConfigError, match="give each server a --ledger of its own"):
        LedgerFile(path, HOUR)
    LedgerFile(path, HOUR).close()


def test_rows_add_up_by_what_is_asked_for() -> None:
    figures: dict[str, Any] = {"saved_gpu_seconds": 0.5, "num_requests": 1, "computed_tokens": {EVICTED: 2}}
    rows = [row(nth, tenant, **figures) for nth in range(3) for tenant in ("acme", "umbra")]
    by_tenant = added_up(rows, ("tenant",))
    assert [(each.tenant, each.model, each.num_requests) for each in by_tenant] == [("acme", "", 3), ("umbra", "", 3)]
    assert by_tenant[0].saved_gpu_seconds == 1.5 and by_tenant[0].computed_tokens == {EVICTED: 6}
    assert sorted(added_up(rows, ("hour", "tenant", "model")), key=lambda each: (each.hour, each.tenant)) == rows
    assert added_up([], ("tenant",)) == []
