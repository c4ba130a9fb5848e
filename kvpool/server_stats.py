"""How a server is doing: its RPCs, its event loop, what it moved, and for whom.

All counts grow from the server's start. The rates and quantiles of an interval are those of the difference of two
snapshots of one run; `ServerStats.since` is that difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

CLIENT_TRANSPORTS = "shm, rdma"
"""Transports of which clients move the bytes."""


@dataclass(frozen=True, slots=True)
class RpcStats:
    """Answers to one RPC with one status.

    Args:
        method: `LookupWait` are lookups that wait for a tier.
        status: of gRPC, such as OK.
        sum_seconds: that the server took for all of them.
        buckets: answers by time, not cumulative: one more than `ServerStats.rpc_seconds_bounds`.
    """

    method: str
    status: str
    sum_seconds: float = 0.0
    buckets: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Answers."""
        return sum(self.buckets)


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Payload bytes that the server moved over `transport` (grpc, tcp) in `direction` (read, write)."""

    transport: str
    direction: str
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class UsageStats:
    """What the namespaces of one tenant and model have used. Counts are since the server's start, but for `held_`.

    Args:
        tenant, model: labels; both "other" for all pairs together that are not told apart.
        lookup_tokens, hit_tokens: tokens that lookups asked for beyond what engines had themselves, and the ones of
            them that were found. Of a model with pipeline stages only the first stage counts.
        stored_bytes: bytes that engines stored.
        loaded_bytes: bytes that lookups or gets told engines the place of, so that engines could load them.
        held_bytes: bytes of the arena in slots now.
        held_blocks: readable blocks in the arena now.
        saved_seconds, lost_seconds: that loads were faster or slower than computing, as engines have estimated.
        computed_tokens: prompt tokens that engines computed, by cause, as they have reported.
    """

    tenant: str
    model: str
    lookup_tokens: int = 0
    hit_tokens: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    held_bytes: int = 0
    held_blocks: int = 0
    saved_seconds: float = 0.0
    lost_seconds: float = 0.0
    computed_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerStats:
    """A snapshot of the server itself; see `ServerStats` in the proto."""

    version: str
    uptime_seconds: float = 0.0
    unix_seconds: float = 0.0
    loop_lag_p50_seconds: float = 0.0
    loop_lag_max_seconds: float = 0.0
    rpc_seconds_bounds: tuple[float, ...] = ()
    rpcs: tuple[RpcStats, ...] = ()
    transfers: tuple[TransferStats, ...] = ()
    usage: tuple[UsageStats, ...] = ()
    http_port: int = 0
    loop_lag_p99_seconds: float = 0.0
    certificate_ends: Mapping[str, float] = field(default_factory=dict)
    refused_files: tuple[str, ...] = ()

    def since(self, before: ServerStats) -> ServerStats:
        """The answers and bytes after `before`, a snapshot of the same run of the server; all else is as now."""
        answers = {(each.method, each.status): each for each in before.rpcs}
        moved = {(each.transport, each.direction): each.nbytes for each in before.transfers}
        return replace(
            self,
            rpcs=tuple(_minus(each, answers.get((each.method, each.status))) for each in self.rpcs),
            transfers=tuple(
                replace(each, nbytes=max(0, each.nbytes - moved.get((each.transport, each.direction), 0)))
                for each in self.transfers
            ),
        )

    def count(self, method: str) -> int:
        """Answers to `method`, of every status."""
        return sum(each.count for each in self.rpcs if each.method == method)

    def quantile(self, method: str, share: float) -> float | None:
        """The time within which the server gave `share` of the answers to `method`, seconds; None without answers."""
        return quantile(self.rpc_seconds_bounds, (each.buckets for each in self.rpcs if each.method == method), share)


def client_transfers(transfers: Iterable[TransferStats], usage: Iterable[UsageStats]) -> tuple[TransferStats, ...]:
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
    return tuple(TransferStats(CLIENT_TRANSPORTS, way, max(0, left[way])) for way in ("read", "write"))


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


def _minus(now: RpcStats, before: RpcStats | None) -> RpcStats:
    if before is None or len(before.buckets) != len(now.buckets):
        return now
    buckets = tuple(max(0, new - old) for new, old in zip(now.buckets, before.buckets, strict=True))
    return replace(now, sum_seconds=max(0.0, now.sum_seconds - before.sum_seconds), buckets=buckets)
