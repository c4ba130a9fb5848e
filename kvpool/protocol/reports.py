"""What engines report to the server, what a server keeps of it by the hour, and how the server itself is doing.

All counts of a `ServerStats` message grow from the server's start; an interval's are the difference of two: `since`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from kvpool.v1 import pool_pb2 as pb
from kvpool.v1.pool_pb2 import ReportRequest as ReportRequest

REPORTER_BYTES = 16
MAX_ENGINE_CHARS = 64
"""Of an engine's name, its versions, and its transport; longer ones are cut."""
MAX_STAGES = 16
"""Namespaces of one engine that a report names."""
MAX_CAUSES = 64
"""Causes that one report names, those of later releases included."""
MAX_AMOUNT = 1e15
"""Largest sum of seconds, or of GiB hours, that a server tells of: sums stop there."""

HOUR_S = 3_600
LEDGER_DAYS = 40
"""A server keeps the rows of so many days."""
MAX_LEDGER_ROWS = 2_048
"""Of one answer; a client asks for the rest. Rows of one hour are in one answer."""
SUMS = (
    "saved_gpu_seconds", "lost_gpu_seconds", "gib_hours", "stored_bytes", "loaded_bytes", "loaded_tokens", "hit_tokens",
    "num_requests", "evicted_by_others_tokens", "evicted_of_others_tokens",
)  # fmt: skip
"""Fields of a row that are added up, in the order of the ledger's columns."""
MAX_SUM = (1 << 64) - 1
"""Sums stop there."""
_USED = ("lookup_tokens", "hit_tokens", "stored_bytes", "loaded_bytes")
"""Counts of a tenant and model that grow."""


@enum.unique
class Cause(enum.Enum):
    """What keeps prompt tokens from being loaded: the label `cause` of `vllm:kvpool_computed_tokens_total` and of
    engines' reports, with a sentence for the docs."""

    LAST_BLOCK = "The last token, whose logits the request waits for, is always computed, with its block."
    NEVER_STORED = "Nobody has stored them yet, or they left the pool longer ago than it remembers."
    BEING_WRITTEN = "An engine was storing them."
    EVICTED = "They had made room for others."
    REMOVED = "They had been removed or cleared by request."
    CORRUPT = "Their bytes had changed."
    PUT_FAILED = "An engine that was storing them gave up, or was too slow."
    OTHER_NAMESPACE = "Only another namespace has them: `kvpool namespaces --diff` shows the field."
    IN_TIER = "A tier of the pool has them, and did not bring them up in time."
    WINDOW_OR_STATE = "The pool has them, and not the window or the state to go on from."
    DECLINED = "Loading them would have taken longer than computing them."
    LOAD_FAILED = "Their load failed."
    LOOKUP_FAILED = "Their lookup failed, or its answer was late."
    TOO_MANY_WAITING = "Too many other requests waited for lookups, room or a tier."
    POOL_AWAY = "There was no connection to the pool, or its breaker was open."
    ADAPTER = "They belong to a LoRA adapter that is not shared."
    NOT_ASKED = "The request wants its prompt's log-probabilities, or its engine only stores."
    SHARING_OFF = "A reset was under way, or the engine's ranks disagreed."

    def __init__(self, gloss: str):
        self.label = self.name.lower()
        self.gloss = gloss


def added_up(rows: Iterable[pb.LedgerRow], by: tuple[str, ...]) -> list[pb.LedgerRow]:
    """One row for each value of the fields `by`, of "hour", "tenant" and "model", in their order; others are empty."""
    sums: dict[tuple[Any, ...], pb.LedgerRow] = {}
    for row in rows:
        key = tuple(getattr(row, name) for name in by)
        total = sums.setdefault(key, pb.LedgerRow(**dict(zip(by, key, strict=True))))
        for name in SUMS:
            setattr(total, name, min(MAX_SUM, getattr(total, name) + getattr(row, name)))
        for cause, tokens in row.computed_tokens.items():
            total.computed_tokens[cause] = min(MAX_SUM, total.computed_tokens[cause] + tokens)
    return [sums[key] for key in sorted(sums, key=lambda key: tuple(map(str, key)))]


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


def rpc_quantile(server: pb.ServerStats, method: str, share: float) -> float | None:
    """The time within which the server gave `share` of its good answers to `method`, seconds; None without any."""
    answered = (each.buckets for each in server.rpcs if (each.method, each.status) == (method, "OK"))
    return quantile(server.rpc_seconds_bounds, answered, share)


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
