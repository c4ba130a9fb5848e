"""What a pool has saved, held and moved, by hour, tenant and model: the values that `kvpool ledger` prints."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

HOUR_S = 3_600
LEDGER_DAYS = 40
"""A server keeps the rows of so many days."""
MAX_LEDGER_ROWS = 2_048
"""Of one answer; a client asks for the rest. Rows of one hour are in one answer."""


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """What one tenant had of the pool with one model, in one hour; docs/reference/ledger.md tells how it is measured.

    Args:
        hour: Unix time at which it begins, seconds.
    """

    hour: int
    tenant: str
    model: str
    saved_gpu_seconds: float = 0.0
    lost_gpu_seconds: float = 0.0
    gib_hours: float = 0.0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    loaded_tokens: int = 0
    hit_tokens: int = 0
    num_requests: int = 0
    evicted_by_others_tokens: int = 0
    evicted_of_others_tokens: int = 0
    computed_tokens: Mapping[str, int] = field(default_factory=dict)


SUMS = tuple(
    each.name
    for each in dataclasses.fields(LedgerRow)
    if each.name not in ("hour", "tenant", "model", "computed_tokens")
)
"""Fields of a row that are added up."""


@dataclass(frozen=True, slots=True)
class LedgerPage:
    """One answer of a server.

    Args:
        is_persistent: the rows outlive the server.
        begins: Unix time, seconds: nothing before it is known.
        next_since: rows of this hour and of later ones are left out; 0: none are.
    """

    rows: tuple[LedgerRow, ...] = ()
    is_persistent: bool = False
    begins: int = 0
    next_since: int = 0


def added_up(rows: Iterable[LedgerRow], by: tuple[str, ...]) -> list[LedgerRow]:
    """One row for each value of the fields `by`, of "hour", "tenant" and "model", in their order; others are empty."""
    empty = LedgerRow(0, "", "")
    sums: dict[tuple[object, ...], Counter[str]] = {}
    causes: dict[tuple[object, ...], Counter[str]] = {}
    for row in rows:
        key = tuple(getattr(row, name) for name in by)
        total = sums.setdefault(key, Counter())
        for name in SUMS:
            total[name] += getattr(row, name)
        causes.setdefault(key, Counter()).update(row.computed_tokens)
    return [
        dataclasses.replace(empty, **dict(zip(by, key, strict=True)), **sums[key], computed_tokens=dict(causes[key]))  # type: ignore[arg-type]
        for key in sorted(sums, key=lambda key: tuple(map(str, key)))
    ]
