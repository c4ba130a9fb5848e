"""The hour of samples that a server keeps for its page."""

from __future__ import annotations

import json

from kvpool.v1 import pool_pb2 as pb
from kvpool_server.page.samples import INTERVAL_S, KEPT_S, Samples
from tests.support.clock import FakeClock


def _stats(lookups: int) -> pb.StatsResponse:
    rpcs = (
        pb.RpcStats(method="Lookup", status="OK", sum_seconds=1.0, buckets=(lookups, 0)),
        pb.RpcStats(method="Lookup", status="UNAVAILABLE", sum_seconds=1.0, buckets=(0, 7)),
    )
    usage = (
        pb.UsageStats(tenant="acme", model="one", lookup_tokens=10, hit_tokens=4, saved_seconds=1.5),
        pb.UsageStats(tenant="", model="two", lookup_tokens=1, lost_seconds=0.25),
    )
    return pb.StatsResponse(
        arena_bytes=1 << 30,
        counters={"lookups": lookups, "removed_blocks": 3},
        tiers=(
            pb.TierStats(name="disk", counters={"promoted_blocks": 5, "read_bytes": 1}, up=True),
            pb.TierStats(name="far", up=True),
        ),
        server=pb.ServerStats(version="1", rpc_seconds_bounds=(0.1,), rpcs=rpcs, usage=usage, loop_lag_p99_seconds=0.5),
        boot_token=(1 << 63) | 1,
        quotas=(pb.Quota(subject="tenant:acme", limit_bytes=1, used_bytes=1),),
    )


def test_a_sample_has_what_the_charts_draw() -> None:
    clock = FakeClock()
    samples = Samples(clock, lambda: 1_000.0 + clock())
    clock.advance(2)
    samples.add(_stats(9))
    (sample,) = samples.kept()
    drawn = json.loads(sample.drawn)
    assert drawn["time"] == 1_000.0 + clock() and drawn["boot"] == "8000000000000001"
    assert (drawn["arena_bytes"], drawn["lookups"], drawn["evicted_blocks"]) == (1 << 30, 9, 0)
    assert (drawn["lookup_tokens"], drawn["hit_tokens"]) == (11, 4)
    assert (drawn["saved_seconds"], drawn["lost_seconds"]) == (1.5, 0.25)
    assert (drawn["promoted_blocks"], drawn["lookup_buckets"]) == ([5, 0], [9, 0])
    assert drawn["loop_lag_p99_seconds"] == 0.5


def test_samples_are_kept_for_an_hour_and_are_small() -> None:
    clock = FakeClock()
    samples = Samples(clock)
    for nth in range(2 * KEPT_S // INTERVAL_S):
        samples.add(_stats(nth))
        clock.advance(INTERVAL_S)
    kept = samples.kept()
    assert len(kept) == KEPT_S // INTERVAL_S + 1
    assert kept[-1].at - kept[0].at == KEPT_S
    assert sum(len(sample.drawn) for sample in kept) < 300 << 10
    assert all(not each.counters.HasField("server") and not each.counters.quotas for each in kept)


def test_the_counters_of_a_while_ago() -> None:
    clock = FakeClock()
    samples = Samples(clock)
    assert samples.before(600) is None
    for nth in range(100):
        samples.add(_stats(nth))
        if nth < 99:
            clock.advance(INTERVAL_S)
    found = [samples.before(seconds) for seconds in (0, 600, 605, 5_000)]
    assert [each and each.counters["lookups"] for each in found] == [99, 39, 38, 0]


def test_a_step_of_the_hosts_clock_does_not_disorder_the_samples() -> None:
    clock, unix = FakeClock(), [5_000.0]
    samples = Samples(clock, lambda: unix[0])
    times = []
    for _ in range(3):
        times.append(json.loads(samples.make(_stats(0)).drawn)["time"])
        clock.advance(INTERVAL_S)
        unix[0] -= 3_600
    assert times == [5_000.0, 5_010.0, 5_020.0]
