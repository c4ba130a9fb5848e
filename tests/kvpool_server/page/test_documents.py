"""The page's JSON: what is wrong with a server, messages whose names come from clients, and the hour of samples."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvpool.report.judgements import RECENT_S, Level, judgements, problems, window_of
from kvpool.v1 import pool_pb2 as pb
from kvpool.version import __version__
from kvpool_server.cache.counters import COUNTERS
from kvpool_server.observability.site import INTERVAL_S, KEPT_S, MAX_TEXT_CHARS, Samples, findings, now_document
from tests.support.clock import FakeClock
from tests.support.values import replaced

HOSTILE = "\n\x1b\u202e" + "x" * 500
HEALTHY = pb.StatsResponse(
    arena_bytes=1 << 30,
    free_bytes=1 << 20,
    prefaulted_bytes=1 << 30,
    counters=dict.fromkeys(COUNTERS, 5_000),
    tiers=(pb.TierStats(name="file:/mnt/kv", up=True),),
    server=pb.ServerStats(version=__version__, uptime_seconds=2 * RECENT_S, unix_seconds=1e9),
    boot_token=7,
)


def _counting(stats: pb.StatsResponse, **more: int) -> pb.StatsResponse:
    counters = {name: value + more.get(name, 0) for name, value in stats.counters.items()}
    return replaced(stats, counters=counters)


def test_a_healthy_server_has_no_finding_and_one_that_takes_no_calls_is_a_fault_that_comes_first() -> None:
    assert findings("ok", HEALTHY, HEALTHY) == []
    between_the_puts_of_two_ranks = replaced(HEALTHY, num_incomplete=3)
    assert findings("ok", between_the_puts_of_two_ranks, HEALTHY) == []
    now, of_another_boot = _counting(HEALTHY, expired_leases=7), replaced(HEALTHY, boot_token=8)
    assert findings("ok", now, of_another_boot) == []
    found = findings("draining", now, HEALTHY)
    assert [each["level"] for each in found] == ["fault", "warning"]
    assert found[0]["text"].startswith("The server is draining")
    assert found[1]["text"].startswith("Clients: 7 leases expired in the last 10 min before their loads ended. Look")


@pytest.mark.parametrize(
    ("p99", "longest", "level", "says"),
    [
        (0.01, 0.1, None, ""),
        (0.011, 0.1, "warning", "up to 100 ms late at worst, and up to 20 ms late at p99"),
        (0.0, 0.37, "warning", "up to 500 ms late at worst. Give the server"),
        *((p99, 10 * p99, "warning", "500 ms late at worst, and up to 50 ms late at p99") for p99 in (0.0211, 0.0499)),
        (0.101, 0.37, "fault", "up to 500 ms late at worst, and up to 200 ms late at p99"),
    ],
)
def test_an_event_loop_that_is_late_is_told_in_few_texts_because_each_change_is_read_out(
    p99: float, longest: float, level: str | None, says: str
) -> None:
    late = replaced(HEALTHY.server, loop_lag_p99_seconds=p99, loop_lag_max_seconds=longest)
    found = findings("ok", replaced(HEALTHY, server=late), HEALTHY)
    assert [each["level"] for each in found] == ([] if level is None else [level])
    assert all(each["text"].startswith("Loop lag: ") and says in each["text"] for each in found)


def test_the_page_judges_as_the_commands_do() -> None:
    """Each problem that `kvpool stats`, `top` and `doctor` show of a snapshot is one on the page, in the same words."""
    now = replaced(
        _counting(HEALTHY, expired_leases=1, quota_evicted_blocks=1),
        tiers=(pb.TierStats(name="file:/x", up=False),),
        engines=(pb.EngineState(engine="host:1", version="0", transport="grpc", breaker_open=True),),
        quotas=(pb.Quota(subject="tenant:acme", limit_bytes=1 << 30, used_bytes=1 << 30),),
        server=pb.ServerStats(
            version=__version__,
            uptime_seconds=2 * RECENT_S,
            unix_seconds=1e9,
            loop_lag_p99_seconds=0.2,
            loop_lag_max_seconds=0.5,
            certificate_ends={"server": 1e9 + 86_400},
            refused_files=("deny list",),
        ),
    )
    told = problems(judgements(now, window_of(now, HEALTHY, RECENT_S)))
    assert {each.check for each in told} == {
        "clients",
        "tier file:/x",
        "loop lag",
        "quotas",
        "certificate of the server",
        "engines",
        "file of deny list",
    }
    found = findings("ok", now, HEALTHY)
    assert [each["level"] for each in found] == ["fault" if each.level is Level.ERROR else "warning" for each in told]
    for mine, theirs in zip(found, told, strict=True):
        assert theirs.text in mine["text"], theirs


@pytest.mark.parametrize(
    "parts",
    [
        {"tiers": (pb.TierStats(name=f"file:{HOSTILE}", up=False),)},
        {"engines": (pb.EngineState(engine=HOSTILE, version=HOSTILE),)},
        {"engines": (pb.EngineState(engine=HOSTILE, version=__version__, breaker_open=True),)},
        {"quotas": (pb.Quota(subject=f"tenant:{HOSTILE}", limit_bytes=1, used_bytes=1),)},
    ],
)
def test_names_in_findings_are_short_and_printable(parts: dict[str, Any]) -> None:
    now = replaced(_counting(HEALTHY, quota_evicted_blocks=1), **parts)
    (found,) = findings("ok", now, HEALTHY)
    assert found["text"].isprintable() and len(found["text"]) < 350


def test_the_document_of_a_crowd_of_hostile_names_is_bounded() -> None:
    """The bounds of what a server tells keep the document small; names are at most `MAX_TEXT_CHARS` and an escape."""
    texts = dict.fromkeys(("engine", "version", "vllm_version", "transport"), HOSTILE)
    engine = pb.EngineState(**texts, age_seconds=1.0, namespaces=(bytes(32),) * 8)
    quota = pb.Quota(subject=f"tenant:{HOSTILE}", limit_bytes=1, used_bytes=1)
    tiers = (pb.TierStats(name=HOSTILE, up=True),)
    stats = replaced(HEALTHY, engines=(engine,) * 256, quotas=(quota,) * 256, tiers=tiers)
    document = now_document("ok", stats, Samples().make(stats).drawn, HEALTHY, [])
    assert len(document) < 1 << 20
    loaded = json.loads(document)
    assert len(loaded["stats"]["engines"]) == 256
    assert len(loaded["stats"]["engines"][0]["engine"]) < MAX_TEXT_CHARS + 20
    assert loaded["sample"]["promoted_blocks"].keys() == {tier["name"] for tier in loaded["stats"]["tiers"]}


# Samples


def _stats(lookups: int) -> pb.StatsResponse:
    ok = pb.RpcStats(method="Lookup", status="OK", sum_seconds=1.0, buckets=(lookups, 0))
    failed = pb.RpcStats(method="Lookup", status="UNAVAILABLE", sum_seconds=1.0, buckets=(0, 7))
    usage = (
        pb.UsageStats(tenant="acme", model="one", lookup_tokens=10, hit_tokens=4, saved_seconds=1.5),
        pb.UsageStats(tenant="", model="two", lookup_tokens=1, lost_seconds=0.25),
    )
    return replaced(
        HEALTHY,
        counters={"lookups": lookups, "removed_blocks": 3},
        tiers=(
            pb.TierStats(name="disk", counters={"promoted_blocks": 5, "read_bytes": 1}, up=True),
            pb.TierStats(name="far", up=True),
        ),
        server=pb.ServerStats(
            version="1", rpc_seconds_bounds=(0.1,), rpcs=(ok, failed), usage=usage, loop_lag_p99_seconds=0.5
        ),
        boot_token=(1 << 63) | 1,
        quotas=(pb.Quota(subject="tenant:acme", limit_bytes=1, used_bytes=1),),
    )


def test_a_sample_has_what_the_charts_draw_and_the_hosts_clock_does_not_disorder_samples() -> None:
    clock, unix = FakeClock(), [5_000.0]
    samples = Samples(clock, lambda: unix[0])
    assert samples.before(600) is None
    for _ in range(3):
        samples.add(_stats(9))
        clock.advance(INTERVAL_S)
        unix[0] -= 3_600
    sample, *later = [json.loads(each.drawn) for each in samples.kept()]
    assert [sample["time"], *(each["time"] for each in later)] == [5_000.0, 5_010.0, 5_020.0]
    assert sample["boot"] == "8000000000000001"
    assert (sample["arena_bytes"], sample["lookups"], sample["evicted_blocks"]) == (1 << 30, 9, 0)
    assert (sample["lookup_tokens"], sample["hit_tokens"]) == (11, 4)
    assert (sample["saved_seconds"], sample["lost_seconds"]) == (1.5, 0.25)
    assert (sample["promoted_blocks"], sample["lookup_buckets"]) == ({"disk": 5, "far": 0}, [9, 0])
    assert sample["loop_lag_p99_seconds"] == 0.5
    assert json.loads(Samples().make(HEALTHY).drawn)["loop_lag_p99_seconds"] is None, "not known yet"


def test_samples_are_kept_for_an_hour_and_are_small() -> None:
    clock = FakeClock()
    samples = Samples(clock)
    last = 2 * KEPT_S // INTERVAL_S
    for nth in range(last + 1):
        samples.add(_stats(nth))
        clock.advance(INTERVAL_S if nth < last else 0)
    kept = samples.kept()
    assert len(kept) == KEPT_S // INTERVAL_S + 1
    assert kept[-1].at - kept[0].at == KEPT_S
    assert sum(len(sample.drawn) for sample in kept) < 300 << 10
    assert all(not each.counters.HasField("server") and not each.counters.quotas for each in kept)
    found = [samples.before(seconds) for seconds in (0, 600, 605, 5_000)]
    ages = [0, 60, 61, 360]
    assert [each and each.counters["lookups"] for each in found] == [last - age for age in ages]
