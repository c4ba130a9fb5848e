"""Counts what lookups miss because blocks had made room for another tenant's.

Each departure counts once, however often the block is looked up in vain: else a tenant could repeat a lookup to blame
another tenant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvpool.protocol.types import BlockRun, MissCause, RunHits
from kvpool_server.cache.departures import EvictedFor
from kvpool_server.cache.explanations import MAX_RUNS
from kvpool_server.cache.pool import Pool
from kvpool_server.reports.usage_ledger import UsageLedger

MAX_COUNTED = 4_096
"""Blocks of one run that are looked at."""


def count_evictions(
    pool: Pool, fingerprint: bytes, runs: Sequence[BlockRun], hits: Sequence[RunHits], ledger: UsageLedger
) -> None:
    """Counts the missing tokens of one lookup, by whose blocks had needed the room.

    The groups of a model have the same tokens: the first one with such blocks counts.

    Args:
        hits: with the causes of what is missing.
    """
    evicted: Counter[EvictedFor] = Counter()
    has_evicted = False
    seen: set[int] = set()
    namespace = pool.namespace(fingerprint)
    if namespace is None:
        return
    for run, hit in zip(runs[:MAX_RUNS], hits, strict=False):
        if run.group_idx in seen:
            continue  # The probe of a block that the engine has itself.
        seen.add(run.group_idx)
        if all(miss.cause is not MissCause.EVICTED for miss in hit.missing):
            continue
        group = namespace.groups[run.group_idx]
        start = hit.num_leading
        for miss in hit.missing:
            names = run.block_hashes[start : start + min(miss.count, MAX_COUNTED)]
            start += miss.count
            if miss.cause is MissCause.EVICTED:
                charged, has_any = pool.entry_table.departures.charge(group, names, namespace.spec.tenant)
                has_evicted |= has_any
                for whose, count in charged.items():
                    evicted[whose] += count * group.spec.block_tokens
        if has_evicted:
            break
    for whose, num_tokens in evicted.items():
        ledger.evicted((namespace.spec.model, namespace.spec.tenant), (whose.model, whose.tenant), num_tokens)
