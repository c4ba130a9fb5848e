"""The line on top of the dashboard: each thing that is wrong has its sentence, and nothing else has."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest

from kvpool.doctor.finding import Level, problems
from kvpool.doctor.judgements import judgements
from kvpool.doctor.window import window_of
from kvpool.reports import EngineState
from kvpool.server_stats import ServerStats
from kvpool.types import PoolStats, Quota, TierStats
from kvpool.version import __version__
from kvpool_server.cache.counters import COUNTERS
from kvpool_server.cache.steps import finish
from kvpool_server.history import History
from kvpool_server.log_events import LogEvents
from kvpool_server.loop_lag import Lag
from kvpool_server.page.instruments import Instruments, sample
from kvpool_server.page.verdict import WINDOW_S, Finding, findings
from kvpool_server.tiers.tier import COUNTERS as TIER_COUNTERS
from tests.support.clock import FakeClock

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
HEALTHY = PoolStats(
    arena_bytes=1 << 30,
    free_bytes=1 << 20,
    prefaulted_bytes=1 << 30,
    counters=dict.fromkeys(COUNTERS, 5_000),
    tiers=(TierStats("file:/mnt/kv", counters=dict.fromkeys(TIER_COUNTERS, 50)),),
)


class Watched:
    """A server whose instruments a test sets, and its history."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.history = History(self.clock)
        self.stats = HEALTHY
        self.lag = Lag(0.001, 0.002, 0.003)
        nothing: Callable[[], Any] = tuple
        self.instruments = Instruments(
            state=lambda: "ok",
            stats=lambda: self.stats,
            lookup_seconds=dict,
            loop_lag_seconds=dict,
            loop_lag=lambda: self.lag,
            moved_bytes=dict,
            usage=nothing,
            reported=dict,
            engines=nothing,
            quotas=nothing,
            ends=dict,
            refused_files=dict,
            events=LogEvents(),
            uptime_s=lambda: 1.0,
        )
        self.record()

    def record(self) -> None:
        self.history.record(finish(sample(self.instruments)))
        self.clock.advance(10)

    def count(self, **more: int) -> None:
        """The pool's counters grow."""
        counters = {name: value + more.get(name, 0) for name, value in self.stats.counters.items()}
        self.stats = dataclasses.replace(self.stats, counters=counters)

    def count_in_tier(self, **more: int) -> None:
        (tier,) = self.stats.tiers
        counters = {name: value + more.get(name, 0) for name, value in tier.counters.items()}
        self.stats = dataclasses.replace(self.stats, tiers=(dataclasses.replace(tier, counters=counters),))

    def set(self, **instruments: Callable[[], Any]) -> None:
        self.instruments = dataclasses.replace(self.instruments, **instruments)

    def found(self) -> list[Finding]:
        return findings(self.instruments, finish(sample(self.instruments)), self.history, NOW)


@pytest.mark.parametrize(
    ("name", "level", "says"),
    [
        ("corrupt_blocks", "fault", "Corruption: 7 blocks in the arena had changed bytes in the last 10 minutes"),
        (
            "out_of_space_puts",
            "fault",
            "Memory: 7 puts were refused in the last 10 minutes, because nothing in the arena",
        ),
        (
            "over_quota_puts",
            "warning",
            "Quotas: 7 puts were refused in the last 10 minutes, because of a quota. Look at `kvpool quota`",
        ),
        (
            "expired_leases",
            "warning",
            "Clients: 7 leases expired in the last 10 minutes before their loads ended. Look for engines",
        ),
        (
            "expired_tickets",
            "warning",
            "Clients: 7 puts expired in the last 10 minutes before they ended. Look for engines",
        ),
        (
            "dropped_kv_event_batches",
            "warning",
            "KV events: 7 batches of KV events were dropped in the last 10 minutes",
        ),
        ("refused_leases", "warning", "Clients: 7 lookups got no lease in the last 10 minutes, because too many"),
    ],
)
def test_what_has_been_counted_lately_is_told_for_ten_minutes(name: str, level: str, says: str) -> None:
    watched = Watched()
    assert watched.found() == []  # What was counted before the history began is no news.
    watched.count(**{name: 7})
    (found,) = watched.found()
    assert (found.level, found.text[: len(says)]) == (level, says)
    for _ in range(int(WINDOW_S / 10) + 2):
        watched.record()
    assert watched.found() == []


@pytest.mark.parametrize(
    ("name", "level", "says"),
    [
        ("corrupt_blocks", "fault", "Tier file:/mnt/kv: 7 blocks in the tier had changed bytes in the last 10 minutes"),
        ("refused_blocks", "warning", "Tier file:/mnt/kv: the tier had no room for 7 blocks in the last 10 minutes"),
        (
            "dropped_demotions",
            "warning",
            "Tier file:/mnt/kv: 7 blocks of 7 were not written to the tier in the",
        ),
    ],
)
def test_what_tiers_have_counted(name: str, level: str, says: str) -> None:
    watched = Watched()
    watched.count_in_tier(**{name: 7})
    (found,) = watched.found()
    assert (found.level, found.text[: len(says)]) == (level, says)


def test_a_tier_that_is_down() -> None:
    watched = Watched()
    watched.stats = dataclasses.replace(HEALTHY, tiers=(TierStats("file:/mnt/kv", up=False),))
    (found,) = watched.found()
    assert found.level == "fault" and found.text.startswith("Tier file:/mnt/kv: the tier failed")


@pytest.mark.parametrize(
    ("lag", "level", "says"),
    [
        (Lag(0.001, 0.01, 0.1), None, ""),
        (Lag(0.001, 0.011, 0.1), "warning", "up to 100 ms late at worst, and up to 20 ms late at p99"),
        (Lag(0.001, 0.0, 0.37), "warning", "up to 500 ms late at worst. Give the server"),
        (Lag(0.001, 0.101, 0.37), "fault", "up to 500 ms late at worst, and up to 200 ms late at p99"),
    ],
)
def test_an_event_loop_that_is_late(lag: Lag, level: str | None, says: str) -> None:
    watched = Watched()
    watched.lag = lag
    found = watched.found()
    assert [each.level for each in found] == ([] if level is None else [level])
    assert all(each.text.startswith("Loop lag: ") and says in each.text for each in found)


def test_the_text_about_a_late_loop_changes_rarely() -> None:
    """Screen readers read it out whenever it changes."""
    watched, texts = Watched(), set()
    for late in (0.0211, 0.0234, 0.0305, 0.0499):
        watched.lag = Lag(late / 9, late, 10 * late)
        texts |= {each.text for each in watched.found()}
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("days", "level", "says"),
    [(15, None, ""), (13, "warning", "ends in 13 d"), (1.5, "fault", "ends in 36 h"), (-1, "fault", "ended 24 h ago")],
)
@pytest.mark.parametrize(
    ("name", "whose"),
    [("server", "Certificate of the server: "), ("client_ca", "Certificate of the clients' authority: ")],
)
def test_certificates_that_end(name: str, whose: str, days: float, level: str | None, says: str) -> None:
    watched = Watched()
    watched.set(ends=lambda: {name: NOW + dt.timedelta(days=days)})
    found = watched.found()
    assert [each.level for each in found] == ([] if level is None else [level])
    assert all(each.text.startswith(whose) and says in each.text for each in found)


def test_a_quota_that_is_reached_is_told_while_it_evicts() -> None:
    watched = Watched()
    watched.set(quotas=lambda: [Quota("tenant:acme", 1 << 30, 1 << 30), Quota("tenant:b", 1 << 30, 1)])
    assert watched.found() == []
    watched.count(quota_evicted_blocks=1)
    (found,) = watched.found()
    assert found.text.startswith("Quotas: tenant:acme has reached its quota of 1 GiB")


def test_engines_without_the_pool() -> None:
    watched = Watched()
    engines = [EngineState(f"host:{nth}", __version__, "1", "shm", nth > 0, 1.0, (), "", "m") for nth in range(3)]
    watched.set(engines=lambda: engines)
    (found,) = watched.found()
    assert found.level == "warning" and "calls failed: host:1 and 1 more. Engines come back" in found.text


def test_lookups_that_find_nothing() -> None:
    watched = Watched()
    watched.count(lookup_blocks=2_000)
    (found,) = watched.found()
    assert "asked for 2,000 blocks in the last 10 minutes, and found none" in found.text
    watched.count(lookup_hits=1)
    assert watched.found() == []


def test_a_server_that_starts_or_ends() -> None:
    watched = Watched()
    watched.stats = dataclasses.replace(HEALTHY, prefaulted_bytes=1 << 29)
    assert ["(50%)" in found.text for found in watched.found()] == [True]
    watched.set(state=lambda: "draining")
    faults = watched.found()
    assert [found.level for found in faults] == ["fault", "warning"]
    assert faults[0].text.startswith("The server is draining")


HOSTILE = "\n\x1b" + "x" * 500


@pytest.mark.parametrize(
    "watch",
    [
        lambda: {"stats": lambda: dataclasses.replace(HEALTHY, tiers=(TierStats(f"file:{HOSTILE}", up=False),))},
        lambda: {"engines": lambda: [EngineState(HOSTILE, HOSTILE, "1", "shm", False, 1.0)]},
        lambda: {"engines": lambda: [EngineState(HOSTILE, __version__, "1", "shm", True, 1.0)]},
        lambda: {"quotas": lambda: [Quota(f"tenant:{HOSTILE}", 1, 1)]},
    ],
)
def test_names_from_outside_are_short_and_printable(watch: Callable[[], Any]) -> None:
    watched = Watched()
    watched.count(quota_evicted_blocks=1)
    watched.set(**watch())
    (found,) = watched.found()
    assert found.text.isprintable() and len(found.text) < 350


def test_the_page_judges_as_the_commands_do() -> None:
    """Each problem that `kvpool stats`, `top` and `doctor` show of a snapshot is one on the page, in the same words."""
    stats = dataclasses.replace(
        HEALTHY,
        counters={**HEALTHY.counters, "expired_leases": 5_001, "quota_evicted_blocks": 5_001},
        tiers=(TierStats("file:/x", up=False),),
        engines=(EngineState("host:1", "0", "1", "grpc", True, 1.0),),
        quotas=(Quota("tenant:acme", 1 << 30, 1 << 30),),
        server=ServerStats(
            __version__, uptime_seconds=WINDOW_S + 1, unix_seconds=NOW.timestamp(),
            loop_lag_p99_seconds=0.2, loop_lag_max_seconds=0.5,
            certificate_ends={"server": NOW.timestamp() + 86_400}, refused_files=("deny list",),
        ),
    )  # fmt: skip
    before = dataclasses.replace(stats, counters=HEALTHY.counters)
    told = problems(judgements(stats, window_of(stats, before, WINDOW_S)))
    assert {each.check for each in told} == {
        "clients", "tier file:/x", "loop lag", "quotas", "certificate of the server", "engines",
        "file of deny list",
    }  # fmt: skip
    watched = Watched()
    watched.count(expired_leases=1, quota_evicted_blocks=1)
    watched.lag = Lag(0.0, 0.2, 0.5)
    now = watched.stats
    watched.set(
        stats=lambda: dataclasses.replace(now, tiers=stats.tiers),
        engines=lambda: stats.engines,
        quotas=lambda: stats.quotas,
        ends=lambda: {"server": NOW + dt.timedelta(days=1)},
        refused_files=lambda: {"tokens": False, "deny list": True},
    )
    found = watched.found()
    assert [each.level for each in found] == ["fault" if each.level is Level.ERROR else "warning" for each in told]
    for mine, theirs in zip(found, told, strict=True):
        assert theirs.text in mine.text.replace("10 minutes", "10 min"), theirs
