"""Each eviction for another tenant's blocks counts once, however often the blocks are looked up."""

from __future__ import annotations

import asyncio
import itertools
import time

from kvpool.protocol.types import BlockRun, ShardRange
from kvpool_server.cache.allocator.arena import Arena
from kvpool_server.cache.limits import Limits
from kvpool_server.observability.pairs import Pairs
from kvpool_server.reports.engines import EngineReports
from kvpool_server.reports.evictions import count_evictions
from kvpool_server.reports.ledger_file import LedgerFile
from kvpool_server.reports.usage_ledger import UsageLedger
from testbed.pool_at_once import PoolAtOnce
from tests.support.values import block_hash, group_spec, namespace_spec

CHUNK_BYTES = 64


def test_a_repeated_lookup_blames_nobody_again() -> None:
    ids = itertools.count(1)
    pool = PoolAtOnce(Arena(64 * CHUNK_BYTES, 64 * CHUNK_BYTES), time.monotonic, lambda: next(ids), Limits())
    spec = group_spec(chunk_bytes=CHUNK_BYTES)
    run = BlockRun(0, [block_hash(nth) for nth in range(60)])
    spaces = {
        tenant: pool.open_namespace(namespace_spec(spec, tenant=tenant))[0].fingerprint for tenant in ("bob", "acme")
    }
    for fingerprint in spaces.values():
        grant = pool.put_start(fingerprint, [run], ShardRange(0, 1), 60_000)
        pool.put_end(grant.ticket_id, [0] * len(grant.offsets))

    async def scenario() -> None:
        pairs = Pairs(True)
        reports = EngineReports(time.monotonic, pairs)
        ledger = UsageLedger(LedgerFile("", 0), reports, pairs, list, time.time, time.monotonic)
        counted = []
        for _ in range(3):
            found = pool.lookup(spaces["bob"], [run], prefix_only=True)
            hits = pool.explanations.misses(spaces["bob"], [run], found.hits)
            count_evictions(pool, spaces["bob"], [run], hits, ledger)
            (row,) = (await ledger.page(0, 0, "acme")).rows
            counted.append(row.evicted_of_others_tokens)
        num_evicted = len(run) - found.hits[0].num_leading
        assert num_evicted > 1 and counted == [num_evicted * spec.block_tokens] * 3
        await ledger.close()

    asyncio.run(scenario())
