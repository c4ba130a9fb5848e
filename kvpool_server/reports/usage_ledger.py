"""What the pool has saved, held and moved, by hour, model and tenant, in a file or in memory.

Figures come together on the pool's event loop: from reports of engines, from lookups, and from a sample of the pool's
usage every `SAMPLE_S`. A thread adds them to the file (`ledger_file.py`). A crash loses the last `SAMPLE_S`.

Not thread-safe: the pool's event loop owns it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import structlog

from kvpool.protocol.reports import HOUR_S, MAX_LEDGER_ROWS, SUMS, ReportRequest
from kvpool.protocol.types import BlockRun, MissCause, RunHits
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.departures import EvictedFor
from kvpool_server.cache.explanations import MAX_RUNS
from kvpool_server.cache.pool import Pool
from kvpool_server.observability.usage import OTHER, Pair, Pairs
from kvpool_server.reports.engines import MAX_REPORTERS, EngineReports, add
from kvpool_server.reports.ledger_file import LedgerFile, Reporter

log = structlog.get_logger()

_T = TypeVar("_T")
SAMPLE_S = 10.0
MAX_PENDING = 1_024
"""Rows that wait for a file that cannot be written; the oldest are dropped beyond that."""
MAX_COUNTED = 4_096
"""Blocks of one run that `count_evictions` looks at."""
_MOVED = ("stored_bytes", "loaded_bytes", "hit_tokens")
"""What a sample takes from the pool's usage."""
_GIB_HOUR = float((1 << 30) * HOUR_S)


@dataclass(eq=False)
class UsageLedger:
    """The ledger of one server.

    Args:
        file: its thread is this object's.
        usage: what models and tenants have used since the start.
        unix_clock: seconds, for the hours.
        clock: monotonic seconds.
    """

    _file: LedgerFile
    _reports: EngineReports
    _pairs: Pairs
    _usage: Callable[[], list[pb.UsageStats]]
    _unix_clock: Callable[[], float]
    _clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "kvpool-ledger")
        self._pending: dict[tuple[int, Pair], pb.LedgerRow] = {}
        self._reporters: dict[Reporter, int] = {}
        self._sampled_at = self._clock()
        self._moved: dict[Pair, pb.UsageStats] = {}
        self._is_failing = False
        self._is_flushing = asyncio.Lock()
        for (tenant, reporter), sequence in self._file.reporters().items():
            self._reports.restore(tenant, reporter, sequence)
        self._reports.listener = self._reported

    def _row(self, pair: Pair) -> pb.LedgerRow:
        hour = int(self._unix_clock()) // HOUR_S * HOUR_S
        row = self._pending.get((hour, pair))
        if row is None:
            if len(self._pending) >= MAX_PENDING:
                del self._pending[min(self._pending)]
            row = self._pending[hour, pair] = pb.LedgerRow(hour=hour, tenant=pair.tenant, model=pair.model)
        return row

    def _reported(self, pair: Pair, tenant: str, report: ReportRequest) -> None:
        devices = max(1, report.num_devices)
        add(
            self._row(pair),
            report.computed_tokens,
            saved_gpu_seconds=report.saved_seconds * devices,
            lost_gpu_seconds=report.lost_seconds * devices,
            loaded_tokens=report.loaded_tokens,
            num_requests=report.num_requests,
        )
        self._reporters[tenant, report.reporter] = report.sequence
        if len(self._reporters) > 2 * MAX_REPORTERS:
            self._forget_reporters()

    def evicted(self, of: tuple[str, str], by: tuple[str, str], num_tokens: int) -> None:
        """A lookup has missed tokens that had made room for another tenant's.

        Args:
            of: model and tenant of the lookup.
            by: model and tenant of the blocks for which they had made room.
        """
        add(self._row(self._pairs.of(*of)), {}, evicted_by_others_tokens=num_tokens)
        add(self._row(self._pairs.of(*by)), {}, evicted_of_others_tokens=num_tokens)

    def sample(self) -> None:
        """Adds what the pool has moved, and held, since the last sample."""
        now = self._clock()
        seconds, self._sampled_at = now - self._sampled_at, now
        usages = {Pair(each.model, each.tenant): each for each in self._usage()}
        for pair, usage in usages.items():
            before = self._moved.get(pair, pb.UsageStats())
            moved = {name: max(0, getattr(usage, name) - getattr(before, name)) for name in _MOVED}
            add(self._row(pair), {}, gib_hours=usage.held_bytes * seconds / _GIB_HOUR, **moved)
        self._moved = usages

    async def run(self) -> None:
        """Samples and writes, for ever."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            try:
                self.sample()
                await self.flush()
            except Exception:
                log.exception("sampling the ledger failed; the next sample goes on")

    async def flush(self) -> None:
        """Writes pending rows to the file; rows that fail stay pending."""
        async with self._is_flushing:
            pending, self._pending = self._pending, {}
            reporters, self._reporters = self._reporters, {}
            if not pending and not reporters:
                return
            rows = [row for row in pending.values() if row.computed_tokens or any(getattr(row, each) for each in SUMS)]
            now = int(self._unix_clock())
            try:
                await self._in_thread(lambda: self._file.add(rows, reporters, now))
            except Exception as error:
                if not self._is_failing:
                    log.warning("the ledger cannot be written, its figures wait in memory", error=str(error))
                self._is_failing = True
                self._put_back(pending, reporters)
            else:
                if self._is_failing:
                    log.info("the ledger is written again")
                self._is_failing = False

    def _put_back(self, pending: dict[tuple[int, Pair], pb.LedgerRow], reporters: dict[Reporter, int]) -> None:
        for key, row in self._pending.items():
            if key in pending:
                add(pending[key], row.computed_tokens, **{name: getattr(row, name) for name in SUMS})
            else:
                pending[key] = row
        self._pending = dict(sorted(pending.items())[-MAX_PENDING:])
        self._reporters = reporters | self._reporters
        self._forget_reporters()

    def _forget_reporters(self) -> None:
        """Forgets the numbers of those that `EngineReports` has forgotten, so that few wait for the file."""
        self._reporters = {key: newest for key, newest in self._reporters.items() if self._reports.remembers(*key)}

    async def page(self, since: int, until: int, tenant: str | None) -> pb.LedgerResponse:
        """The rows of hours that end after `since` and begin before `until`; only of `tenant`, unless it is None."""
        await asyncio.shield(self.flush())  # Else a caller that goes away would take everybody's figures with it.
        until = until or int(self._unix_clock()) + 1
        return await self._in_thread(lambda: self._page(since, until, tenant))

    def _page(self, since: int, until: int, tenant: str | None) -> pb.LedgerResponse:
        rows, next_since = self._file.rows(since, until, tenant, MAX_LEDGER_ROWS)
        if tenant is not None:  # The file has looked for the tenant's own. `OTHER` twice stands for several tenants.
            rows = [row for row in rows if row.tenant == tenant and (row.tenant, row.model) != (OTHER, OTHER)]
        file = self._file
        return pb.LedgerResponse(rows=rows, is_persistent=file.is_persistent, begins=file.begins, next_since=next_since)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self) -> None:
        self.sample()
        await self.flush()
        await self._in_thread(self._file.close)
        await asyncio.to_thread(self._thread.shutdown)


def count_evictions(
    pool: Pool, fingerprint: bytes, runs: Sequence[BlockRun], hits: Sequence[RunHits], ledger: UsageLedger
) -> None:
    """Counts the missing tokens of one lookup, by whose blocks had needed the room.

    Each departure counts once, however often the block is looked up in vain: else a tenant could repeat a lookup to
    blame another tenant. The groups of a model have the same tokens: the first one with such blocks counts.

    Args:
        hits: with the causes of what is missing.
    """
    evicted: Counter[EvictedFor] = Counter()
    has_evicted = False
    seen: set[int] = set()
    namespace = pool.namespace(fingerprint)
    if namespace is None or namespace.spec.pipeline_stage:  # As in `count_tokens`: every stage asks for each token.
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
