"""What a pool has saved, held and moved, by hour, tenant and model: the values that `kvpool ledger` prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvpool.v1 import pool_pb2 as pb

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
