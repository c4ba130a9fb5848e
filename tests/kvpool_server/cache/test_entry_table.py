"""The quarantine takes bounded memory, however many tickets of one block expire."""

from __future__ import annotations

from kvpool.protocol.types import ShardRange
from kvpool_server.cache.entry_table import Quarantine
from tests.kvpool_server.cache.test_pool import Bench


def test_the_tickets_of_a_block_that_expire_one_by_one_wait_as_one_item() -> None:
    bench = Bench()
    quarantine = bench.pool.entry_table.quarantine
    for shard, ttl_ms in enumerate((1_000, 125)):
        bench.start(*range(10), shards=ShardRange(shard, 1), ttl_ms=ttl_ms)
    for seconds in (0.125, 0.875):
        bench.seconds(seconds)
        assert (len(quarantine), len(quarantine._ends)) == (10, 10)
    bench.seconds(0.25)
    assert (len(quarantine), len(quarantine._ends)) == (0, 0)


def test_an_entry_whose_stay_grows_is_visited_again_at_its_later_end() -> None:
    bench = Bench()
    bench.store("a")
    (entry,) = bench.group.index.values()
    quarantine = Quarantine()
    for until in (1.0, 2.0, 4.0, 3.0):
        quarantine.add(entry, until)
    assert list(quarantine.visit_due(0.5)) == []
    assert list(quarantine.visit_due(1.0)) == [None] and len(quarantine) == 1
    assert list(quarantine.visit_due(3.5)) == []
    assert list(quarantine.visit_due(4.0)) == [entry] and len(quarantine) == 0
