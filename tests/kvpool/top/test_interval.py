from __future__ import annotations

from kvpool.protocol.server_stats import count
from kvpool.top.interval import Interval
from kvpool.v1 import pool_pb2 as pb
from tests.support.values import replaced


def snapshot(scale: int, boot: int = 1, uptime_s: float = 100.0) -> pb.StatsResponse:
    server = pb.ServerStats(
        version="1",
        uptime_seconds=uptime_s,
        rpc_seconds_bounds=(0.1,),
        rpcs=(pb.RpcStats(method="Lookup", status="OK", sum_seconds=scale * 0.01, buckets=(10 * scale, 0)),),
        transfers=(pb.TransferStats(transport="tcp", direction="read", nbytes=1_000 * scale),),
        usage=(
            pb.UsageStats(
                tenant="t",
                model="m",
                lookup_tokens=100 * scale,
                hit_tokens=60 * scale,
                stored_bytes=7 * scale,
                loaded_bytes=5 * scale,
                held_bytes=42,
            ),
        ),
    )
    return pb.StatsResponse(counters={"evicted_blocks": 3 * scale}, server=server, boot_token=boot)


def test_rates_are_those_of_the_interval() -> None:
    interval = Interval.of(snapshot(1), snapshot(3), 2.0)
    assert interval.per_second(interval.count("evicted_blocks")) == 3
    assert count(interval.server.rpcs, "Lookup") == 20
    (used,) = interval.server.usage
    assert (used.lookup_tokens, used.hit_tokens, used.stored_bytes, used.loaded_bytes) == (200, 120, 14, 10)
    assert used.held_bytes == 42  # As it is now.
    assert not interval.restarted


def test_after_a_restart_the_rates_are_those_since_the_start() -> None:
    interval = Interval.of(snapshot(100), snapshot(1, boot=2, uptime_s=0.5), 10.0)
    assert interval.restarted and interval.seconds == 0.5
    assert interval.count("evicted_blocks") == 3
    assert count(interval.server.rpcs, "Lookup") == 10
    assert interval.server.transfers[0].nbytes == 1_000
    assert interval.server.usage[0].lookup_tokens == 100


def test_a_count_that_goes_back_is_no_negative_rate() -> None:
    interval = Interval.of(snapshot(100), snapshot(1), 1.0)
    assert interval.count("evicted_blocks") == 0
    assert interval.server.transfers[0].nbytes == 0
    assert interval.server.usage[0].lookup_tokens == 0


def test_a_server_of_an_older_release_tells_no_rates_of_its_own() -> None:
    old = replaced(snapshot(1), server=None)
    interval = Interval.of(old, old, 0.0)
    assert interval.server == pb.ServerStats() and interval.seconds > 0
