from __future__ import annotations

import pytest

from kvpool.report.judgements import (
    RECENT_S,
    UNKNOWN,
    Finding,
    Level,
    Window,
    judge_twice,
    judgements,
    notes,
    problems,
    window_of,
)
from kvpool.v1 import pool_pb2 as pb
from tests.support.values import replaced

WELL = pb.StatsResponse(
    arena_bytes=1 << 30,
    free_bytes=1 << 29,
    prefaulted_bytes=1 << 30,
    counters={"lookup_blocks": 5_000, "lookup_hits": 4_000},
    tiers=(pb.TierStats(name="file:/x", counters={"demoted_blocks": 100, "dropped_demotions": 1}, up=True),),
    server=pb.ServerStats(version="1"),
)


def _with(**counters: int) -> pb.StatsResponse:
    return replaced(WELL, counters={**WELL.counters, **counters})


def _tier(**fields: object) -> pb.StatsResponse:
    return replaced(WELL, tiers=(pb.TierStats(**{"name": "file:/x", "up": True, **fields}),))  # type: ignore[arg-type]


@pytest.mark.parametrize("puts", [{}, {"num_incomplete": 1, "num_tickets": 1}], ids=["none", "under way"])
def test_a_healthy_pool_has_no_problem(puts: dict[str, int]) -> None:
    found = judgements(replaced(WELL, **puts))
    assert found and problems(found) == []


@pytest.mark.parametrize(
    ("stats", "check", "level", "says"),
    [
        (_with(corrupt_blocks=2), "corruption", Level.ERROR, "2 blocks in the arena had changed bytes"),
        (replaced(WELL, prefaulted_bytes=1 << 20), "memory", Level.WARNING, "1 MiB of the arena's 1 GiB"),
        (_with(out_of_space_puts=3), "memory", Level.ERROR, "3 puts were refused"),
        (_with(over_quota_puts=4), "quotas", Level.WARNING, "4 puts were refused"),
        (replaced(WELL, num_incomplete=1), "incomplete blocks", Level.WARNING, "1 block miss"),
        (_with(expired_leases=5), "clients", Level.WARNING, "5 leases expired"),
        (_with(expired_tickets=5), "clients", Level.WARNING, "5 puts expired"),
        (_with(refused_leases=5), "clients", Level.WARNING, "5 lookups got no lease"),
        (_with(dropped_kv_event_batches=6), "KV events", Level.WARNING, "6 batches"),
        (_with(lookup_hits=0), "hits", Level.WARNING, "5,000 blocks since the server's start, and found none"),
        (
            replaced(WELL, server=pb.ServerStats(version="1", loop_lag_max_seconds=0.5)),
            "loop lag",
            Level.WARNING,
            "500 ms late",
        ),
        (_tier(up=False), "tier file:/x", Level.ERROR, "the tier failed"),
        (_tier(counters={"demoted_blocks": 9, "dropped_demotions": 1}), "tier file:/x", Level.WARNING, "1 block of 10"),
        (
            _tier(servers=[pb.TierServer(name="h:1")]),
            "tier file:/x",
            Level.WARNING,
            "questions to h:1, or reads from it, fail",
        ),
        (_tier(counters={"refused_blocks": 7}), "tier file:/x", Level.WARNING, "no room for 7 blocks"),
        (_tier(counters={"corrupt_blocks": 8}), "tier file:/x", Level.ERROR, "8 blocks in the tier"),
    ],
)
def test_each_problem_is_named_with_its_fix(stats: pb.StatsResponse, check: str, level: Level, says: str) -> None:
    (found,) = problems(judgements(stats, window_of(stats)))
    assert (found.check, found.level) == (check, level)
    assert says in found.text and found.fix


OLD = pb.ServerStats(version="1", uptime_seconds=RECENT_S + 1)


@pytest.mark.parametrize("name", ["corrupt_blocks", "expired_leases", "refused_leases", "dropped_kv_event_batches"])
def test_what_no_longer_grows_is_a_note(name: str) -> None:
    before = replaced(_with(**{name: 5}), server=OLD)
    assert window_of(before) is UNKNOWN
    last_second = window_of(before, before, 1)
    for window, says in ((UNKNOWN, "since the server's start"), (last_second, "(none in the last 1 s)")):
        found = judgements(before, window)
        assert problems(found) == []
        (note,) = notes(found)
        assert note.text.startswith("5 ") and says in note.text
    now = replaced(_with(**{name: 7}), server=OLD)
    found = judgements(now, window_of(now, before, 1))
    (grows,) = problems(found)
    assert grows.text.startswith("2 ") and "in the last 1 s" in grows.text and notes(found) == []
    assert window_of(replaced(now, boot_token=2), before, 1) is UNKNOWN, "another run of the server"


def test_what_a_tier_dropped_long_ago_is_a_note() -> None:
    before = replaced(_tier(counters={"dropped_demotions": 9}), server=OLD)
    now = replaced(_tier(counters={"dropped_demotions": 9, "demoted_blocks": 90}), server=OLD)
    found = judgements(now, window_of(now, before, 1))
    assert problems(found) == [] and "9 blocks of 99 were not written" in notes(found)[0].text
    found = judgements(before, window_of(before, replaced(WELL, server=OLD, tiers=()), 1))
    assert [each.level for each in problems(found)] == [Level.WARNING]


def test_a_server_that_did_not_start_lately_is_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.report.judgements.LOOK_S", 0.0)
    well, expired, more = (
        replaced(_with(**counters), server=OLD) for counters in ({}, {"expired_leases": 1}, {"expired_leases": 3})
    )
    good_week, drops_all = (
        replaced(_tier(counters={"demoted_blocks": 1_000_000, "dropped_demotions": dropped}), server=OLD)
        for dropped in (10, 1_010)
    )
    for looks, says in (
        ([_with(expired_leases=1)], "1 leases"),
        ([expired, more], "2 leases"),
        ([well, expired], "1 leases"),
        ([good_week, drops_all], "1,000 blocks of 1,000 were not written to the tier in the last 1 s"),
    ):
        left = iter(looks)
        _, found = judge_twice(left.__next__)
        assert next(left, None) is None and [each.text.startswith(says) for each in problems(found)] == [True]


@pytest.mark.parametrize(("seconds", "is_problem"), [(1.0, False), (RECENT_S, True)])
def test_one_new_prompt_in_a_second_is_no_lack_of_hits(seconds: float, is_problem: bool) -> None:
    before = replaced(WELL, server=OLD)
    now = replaced(_with(lookup_blocks=WELL.counters["lookup_blocks"] + 2_000), server=OLD)
    assert bool(problems(judgements(now, window_of(now, before, seconds)))) is is_problem


ENGINE = pb.EngineState(
    engine="h:1", version="1", vllm_version="0.32", transport="shm", breaker_open=False, age_seconds=1.0
)


def of(check: str, stats: pb.StatsResponse, window: Window = UNKNOWN) -> list[Finding]:
    """The findings of one check."""
    return [each for each in judgements(stats, window) if each.check == check]


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (replaced(ENGINE, breaker_open=True), "do without the pool because their calls failed: h:2"),
        (replaced(ENGINE, transport="grpc"), "move bytes through gRPC, which is slow: h:2"),
        (replaced(ENGINE, version="2"), "have kvpool 2, and the server 1: h:2"),
    ],
)
def test_engines_with_a_problem_are_named(engine: pb.EngineState, says: str) -> None:
    engine = replaced(engine, engine="h:2")
    (found,) = of("engines", replaced(WELL, engines=(ENGINE, engine)))
    assert found.level is Level.WARNING and found.text.endswith(says) and found.fix
    (found,) = of("engines", replaced(WELL, engines=(engine, ENGINE, engine, engine)))
    assert found.text.endswith(f"{says} and 2 more")


def test_engines_without_a_problem_are_counted_and_a_directorys_key_is_shown() -> None:
    for is_up in (True, False):
        _, found = of("tier file:/x", _tier(servers=[pb.TierServer(name="directory h:1", up=is_up, key="1a2b3c4d")]))
        assert found.level is Level.OK and found.text == "the fingerprint of its key is 1a2b3c4d"
    (found,) = of("engines", replaced(WELL, engines=(ENGINE, ENGINE)))
    assert found.level is Level.OK and found.text.startswith("2 engines report")
    assert of("engines", WELL) == []


FULL = replaced(
    WELL,
    quotas=(
        pb.Quota(subject="tenant:a", limit_bytes=100, used_bytes=98),
        pb.Quota(subject="tenant:b", limit_bytes=100, used_bytes=97),
    ),
    server=pb.ServerStats(version="1", uptime_seconds=RECENT_S + 1),
)


def test_a_full_quota_is_a_problem_while_quotas_evict() -> None:
    assert of("quotas", FULL) == []
    evicting = replaced(FULL, counters={**WELL.counters, "quota_evicted_blocks": 3})
    (found,) = of("quotas", evicting)
    assert found.level is Level.INFO and found.text.startswith("tenant:a has reached its quota of 100 B")
    (found,) = of("quotas", evicting, window_of(evicting, FULL, 1))
    assert found.level is Level.WARNING and "in the last 1 s" in found.text
    (found,) = of("quotas", evicting, window_of(evicting, evicting, 1))
    assert found.level is Level.INFO and "since the server's start" in found.text


@pytest.mark.parametrize(("days", "level"), [(15, Level.OK), (13, Level.WARNING), (1, Level.ERROR), (-1, Level.ERROR)])
def test_the_end_of_a_certificate(days: float, level: Level) -> None:
    server = pb.ServerStats(version="1", unix_seconds=1e9, certificate_ends={"client_ca": 1e9 + days * 86_400})
    (found,) = of("certificate of the clients' authority", replaced(WELL, server=server))
    assert found.level is level
