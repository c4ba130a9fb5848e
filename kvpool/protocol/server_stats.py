"""How a server is doing: its RPCs, its event loop, what it moved, and for whom.

All counts of a `ServerStats` message grow from the server's start. The rates and quantiles of an interval are those of
the difference of two snapshots of one run: `since`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from kvpool.v1 import pool_pb2 as pb

CLIENT_TRANSPORTS = "shm, rdma"
"""Transports of which clients move the bytes."""
_USED = ("lookup_tokens", "hit_tokens", "stored_bytes", "loaded_bytes")
"""Counts of a tenant and model that grow."""


def client_transfers(transfers: Iterable[pb.TransferStats], usage: Iterable[pb.UsageStats]) -> list[pb.TransferStats]:
    """Bytes that clients moved themselves, over shared memory or RDMA: what engines used beyond what the server moved.

    The server learns of whole blocks: a read is counted when an engine is told the block's place.

    Args:
        transfers, usage: of the same time.

    Returns: one for reads and one for writes, with `CLIENT_TRANSPORTS` as their transport.
    """
    loaded, stored = 0, 0
    for each in usage:
        loaded, stored = loaded + each.loaded_bytes, stored + each.stored_bytes
    left = {"read": loaded, "write": stored}
    for moved in transfers:
        left[moved.direction] = left.get(moved.direction, 0) - moved.nbytes
    return [
        pb.TransferStats(transport=CLIENT_TRANSPORTS, direction=way, nbytes=max(0, left[way]))
        for way in ("read", "write")
    ]


def quantile(bounds: Sequence[float], histograms: Iterable[Sequence[int]], share: float) -> float | None:
    """A quantile of the sum of histograms, as Prometheus estimates it: linear within a bucket.

    Args:
        bounds: upper bounds of the buckets, ascending; the last bucket has none, and counts as its lower bound.
        histograms: counts by bucket, not cumulative: one more than `bounds`.
        share: 0 to 1.

    Returns: None if nothing was counted.
    """
    counts: list[int] = [sum(column) for column in zip(*histograms, strict=True)]
    if not sum(counts) or not bounds:
        return None
    wanted, below, low = share * sum(counts), 0, 0.0
    for count, reached, high in zip(counts, accumulate(counts), bounds, strict=False):
        if count and reached >= wanted:
            return low + (high - low) * (wanted - below) / count
        below, low = reached, high
    return low


def count(rpcs: Iterable[pb.RpcStats], method: str) -> int:
    """Answers to `method`, of every status."""
    return sum(sum(each.buckets) for each in rpcs if each.method == method)


def rpc_quantile(server: pb.ServerStats, method: str, share: float) -> float | None:
    """The time within which the server gave `share` of the answers to `method`, seconds; None without answers."""
    return quantile(server.rpc_seconds_bounds, (each.buckets for each in server.rpcs if each.method == method), share)


def since(now: pb.ServerStats, before: pb.ServerStats) -> pb.ServerStats:
    """The answers, bytes and usage after `before`, a snapshot of the same run of the server; all else is as now."""
    grown = pb.ServerStats()
    grown.CopyFrom(now)
    rpcs = {(each.method, each.status): each for each in before.rpcs}
    for rpc in grown.rpcs:
        old = rpcs.get((rpc.method, rpc.status))
        if old is not None and len(old.buckets) == len(rpc.buckets):
            rpc.buckets[:] = [max(0, new - was) for new, was in zip(rpc.buckets, old.buckets, strict=True)]
            rpc.sum_seconds = max(0.0, rpc.sum_seconds - old.sum_seconds)
    moved = {(each.transport, each.direction): each.nbytes for each in before.transfers}
    for transfer in grown.transfers:
        transfer.nbytes = max(0, transfer.nbytes - moved.get((transfer.transport, transfer.direction), 0))
    usage = {(each.tenant, each.model): each for each in before.usage}
    for used in grown.usage:
        if (earlier := usage.get((used.tenant, used.model))) is not None:
            for name in _USED:
                setattr(used, name, max(0, getattr(used, name) - getattr(earlier, name)))
    return grown
