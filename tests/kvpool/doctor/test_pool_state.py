from __future__ import annotations

import dataclasses

import pytest

from kvpool.doctor.engines import engines
from kvpool.doctor.finding import Level, problems
from kvpool.doctor.pool_state import pool_state
from kvpool.reports import EngineState
from kvpool.server_stats import ServerStats
from kvpool.types import PoolStats, TierStats

WELL = PoolStats(
    arena_bytes=1 << 30,
    free_bytes=1 << 29,
    prefaulted_bytes=1 << 30,
    counters={"lookup_blocks": 5_000, "lookup_hits": 4_000},
    tiers=(TierStats("file:/x", counters={"demoted_blocks": 100, "dropped_demotions": 1}),),
    server=ServerStats("1"),
)


def _with(**counters: int) -> PoolStats:
    return dataclasses.replace(WELL, counters={**WELL.counters, **counters})


def _tier(**fields: object) -> PoolStats:
    return dataclasses.replace(WELL, tiers=(TierStats("file:/x", **fields),))  # type: ignore[arg-type]


def test_a_healthy_pool_has_no_problem() -> None:
    found = pool_state(WELL)
    assert found and problems(found) == []


@pytest.mark.parametrize(
    ("stats", "check", "level", "says"),
    [
        (_with(corrupt_blocks=2), "corruption", Level.ERROR, "2 blocks in the arena had changed bytes"),
        (dataclasses.replace(WELL, prefaulted_bytes=1 << 20), "memory", Level.WARNING, "1 MiB of the arena's 1 GiB"),
        (_with(out_of_space_puts=3), "memory", Level.WARNING, "3 puts were refused"),
        (_with(over_quota_puts=4), "quotas", Level.WARNING, "4 puts were refused"),
        (dataclasses.replace(WELL, num_incomplete=1), "incomplete blocks", Level.WARNING, "1 block miss"),
        (_with(expired_leases=5), "clients", Level.WARNING, "5 leases expired"),
        (_with(expired_tickets=5), "clients", Level.WARNING, "5 puts expired"),
        (_with(refused_leases=5), "clients", Level.WARNING, "5 lookups got no lease"),
        (_with(dropped_kv_event_batches=6), "KV events", Level.WARNING, "6 batches"),
        (_with(lookup_hits=0), "hits", Level.WARNING, "asked for 5,000 blocks, and found none"),
        (
            dataclasses.replace(WELL, server=ServerStats("1", loop_lag_max_seconds=0.5)),
            "loop lag",
            Level.WARNING,
            "500 ms late",
        ),
        (_tier(up=False), "tier file:/x", Level.ERROR, "the tier failed"),
        (_tier(counters={"demoted_blocks": 9, "dropped_demotions": 1}), "tier file:/x", Level.WARNING, "1 block of 10"),
        (_tier(counters={"refused_blocks": 7}), "tier file:/x", Level.WARNING, "no room for 7 blocks"),
        (_tier(counters={"corrupt_blocks": 8}), "tier file:/x", Level.WARNING, "8 blocks in the tier"),
    ],
)
def test_each_problem_is_named_with_its_fix(stats: PoolStats, check: str, level: Level, says: str) -> None:
    (found,) = problems(pool_state(stats))
    assert (found.check, found.level) == (check, level)
    assert says in found.text and found.fix


def test_incomplete_blocks_of_puts_under_way_are_no_problem() -> None:
    assert problems(pool_state(dataclasses.replace(WELL, num_incomplete=1, num_tickets=1))) == []


ENGINE = EngineState("h:1", "1", "0.32", "shm", False, 1.0)


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (dataclasses.replace(ENGINE, breaker_open=True), "h:1 does without the pool"),
        (dataclasses.replace(ENGINE, transport="grpc"), "h:1 moves bytes through gRPC"),
        (dataclasses.replace(ENGINE, version="2"), "h:1 has kvpool 2, and the server 1"),
    ],
)
def test_engines_with_a_problem_are_named(engine: EngineState, says: str) -> None:
    (found,) = engines(dataclasses.replace(WELL, engines=(ENGINE, engine)))
    assert found.level is Level.WARNING and says in found.text and found.fix


def test_engines_without_a_problem_are_counted() -> None:
    (found,) = engines(dataclasses.replace(WELL, engines=(ENGINE, ENGINE)))
    assert found.level is Level.OK and found.text.startswith("2 engines report")
    assert engines(WELL) == []
