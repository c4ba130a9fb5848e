from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.protocol.reports import quantile, rpc_quantile, since
from kvpool.v1 import pool_pb2 as pb

BOUNDS = (0.001, 0.01, 0.1)


def _of(buckets: tuple[int, ...], nbytes: int = 0) -> pb.ServerStats:
    rpcs = (pb.RpcStats(method="Lookup", status="OK", sum_seconds=float(sum(buckets)), buckets=buckets),)
    return pb.ServerStats(
        version="1",
        rpc_seconds_bounds=BOUNDS,
        rpcs=rpcs,
        transfers=(pb.TransferStats(transport="tcp", direction="read", nbytes=nbytes),),
    )


@pytest.mark.parametrize(
    ("counts", "share", "seconds"),
    [
        ((10, 0, 0, 0), 0.5, 0.0005),
        ((0, 10, 0, 0), 0.5, 0.0055),
        ((90, 0, 10, 0), 0.99, 0.091),
        ((0, 0, 0, 5), 0.5, 0.1),  # Above all bounds: the largest is all that is known.
        ((1, 0, 0, 0), 0.0, 0.0),
    ],
)
def test_a_quantile_is_linear_within_its_bucket(counts: tuple[int, ...], share: float, seconds: float) -> None:
    assert quantile(BOUNDS, [counts], share) == pytest.approx(seconds)


def test_there_is_no_quantile_of_nothing() -> None:
    assert quantile(BOUNDS, [(0, 0, 0, 0)], 0.5) is None
    assert quantile(BOUNDS, [], 0.5) is None


@given(st.lists(st.integers(0, 1_000), min_size=4, max_size=4), st.floats(0, 1), st.floats(0, 1))
def test_larger_shares_have_larger_quantiles(counts: list[int], one: float, other: float) -> None:
    low, high = (quantile(BOUNDS, [counts], share) for share in sorted((one, other)))
    if sum(counts):
        assert low is not None and high is not None and 0 <= low <= high <= BOUNDS[-1]


def test_an_interval_is_the_difference_of_two_snapshots_and_never_negative() -> None:
    before, now = _of((100, 0, 0, 0), 1_000), _of((100, 0, 8, 0), 1_500)
    interval = since(now, before)
    assert sum(interval.rpcs[0].buckets) == 8
    assert (rpc_quantile(interval, "Lookup", 0.5) or 0) > 0.01 > (rpc_quantile(now, "Lookup", 0.5) or 1)
    assert interval.transfers[0].nbytes == 500 and interval.rpcs[0].sum_seconds == pytest.approx(8)
    restarted = since(_of((1, 0, 0, 0), 10), _of((100, 5, 0, 0), 1_000))
    assert restarted.transfers[0].nbytes == 0 and restarted.rpcs[0].buckets == [0, 0, 0, 0]
    assert restarted.rpcs[0].sum_seconds == 0
    assert since(now, pb.ServerStats(version="1", rpc_seconds_bounds=BOUNDS)).rpcs[0].buckets == [100, 0, 8, 0]


def test_the_time_of_calls_is_that_of_good_answers() -> None:
    server = _of((10, 0, 0, 0))
    server.rpcs.append(pb.RpcStats(method="Lookup", status="DEADLINE_EXCEEDED", buckets=(0, 0, 90, 0)))
    assert rpc_quantile(server, "Lookup", 0.5) == pytest.approx(0.0005)
