"""A pool above tiers: lookups, removals and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kvpool.protocol.errors import UnknownNamespaceError
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import BlockRun, RunHits, ShardRange
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.entry import Group
from kvpool_server.observability.metrics import pool_families
from kvpool_server.tiering import tiered_pool as tiering
from kvpool_server.tiers.calls import AWAY_S
from kvpool_server.tiers.tier import COUNTERS, TierError
from tests.contracts.tier_contract import awaited
from tests.support.memory_tier import SLOT, MemoryTier, Rig, asked, play, turns
from tests.support.values import block_hash, group_spec, namespace_spec, run_of


@play()
async def test_stored_blocks_are_demoted_and_promoted_again_behind_a_miss_too_unless_only_the_prefix_counts(
    rig: Rig, tier: MemoryTier
) -> None:
    await rig.demote(*"abcd")
    assert set(tier.kept) == {block_hash(name) for name in "abcd"} and tier.counters["demoted_blocks"] == 4
    found = rig.lookup(*"abcde")
    assert (found.hits[0].num_leading, found.hits[0].num_pending) == (0, 4) and 1 <= found.retry_after_ms <= 50
    assert (await rig.hits(*"abcde")).num_leading == 4
    assert tier.counters["promoted_blocks"] == 4 and tier.calls["write"] == 1
    rig.evict_all()
    del tier.kept[block_hash("b")]
    assert rig.lookup(*"abcd", prefix_only=False).hits[0].num_pending == 3
    assert (await rig.hits(*"abcd", prefix_only=False)).complete == 0b1101
    assert (await rig.hits(*"abcd")).num_leading == 1


@play(MemoryTier, asked)
async def test_blocks_that_the_first_tier_lacks_come_from_the_second(
    rig: Rig, first: MemoryTier, second: MemoryTier
) -> None:
    await rig.demote("a", "b", "c", "d")
    del first.kept[block_hash("c")], first.kept[block_hash("d")], second.kept[block_hash("a")]
    assert (await rig.hits("a", "b", "c", "d")).num_leading == 4
    assert (first.counters["promoted_blocks"], second.counters["promoted_blocks"]) == (2, 2)
    await rig.wait_idle()
    assert set(first.kept) == {block_hash(name) for name in "abcd"}, "what came up from below was not written above"
    held = rig.tiered.holdings(rig.namespace.fingerprint)
    assert [(each.tier, each.num_entries) for each in held] == [("memory:", 4), ("asked:", 4)]


@play()
async def test_drain_returns_how_many_blocks_are_not_written(rig: Rig, tier: MemoryTier) -> None:
    tier.gate.clear()
    rig.put("a")
    await turns()
    rig.put("b", "c")
    assert await rig.tiered.drain(0.05) == 2
    tier.gate.set()
    assert await rig.tiered.drain(5) == 0 and len(tier.kept) == 3


@play()
async def test_transfers_go_on_after_an_unexpected_exception(
    rig: Rig, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiering, "RESTART_S", 0.0)
    write = tier.write

    async def broken(*_: object) -> int:
        raise ZeroDivisionError

    tier.write = broken  # type: ignore[method-assign]
    rig.put("a")
    await turns()
    tier.write = write  # type: ignore[method-assign]
    rig.clock.advance(AWAY_S[1])
    rig.put("b")
    await rig.wait_idle()
    assert block_hash("b") in tier.kept


@play()
async def test_a_pending_lookup_counts_once_and_only_when_its_blocks_are_got(rig: Rig, tier: MemoryTier) -> None:
    await rig.demote("a", "b")
    rig.put("a")
    await rig.wait_idle()
    tier.gate.clear()
    found = [rig.lookup("a", "b") for _ in range(3)]
    assert all(each.hits[0] == RunHits(1, 0, 1) for each in found)
    assert not rig.pool.counters["lookups"]
    run = BlockRun(0, [block_hash("a")])
    for _ in range(2):
        located = rig.pool.get(found[-1].lease_id, rig.namespace.fingerprint, [run], ShardRange(0, 1))
        assert located.present == (True,)
    counted = [rig.pool.counters[name] for name in ("lookups", "lookup_blocks", "lookup_hits")]
    assert counted == [1, 2, 1]
    rig.pool.release([each.lease_id for each in found])
    tier.gate.set()
    await rig.wait_idle()


@play()
async def test_the_blocks_of_many_runs_leave_a_tier_in_one_call(rig: Rig, tier: MemoryTier) -> None:
    rig.put(*range(8))
    await rig.wait_idle()
    really, removed = tier.remove, list[int]()

    async def counted(group: Group, block_hashes: Sequence[bytes]) -> None:
        removed.append(len(block_hashes))
        await really(group, block_hashes)

    tier.remove = counted  # type: ignore[method-assign]
    runs = [run_of(nth, nth + 1) for nth in range(0, 6, 2)]
    assert await rig.tiered.remove(rig.namespace.fingerprint, runs) == 6
    assert removed == [6], "each call has threads of its own, and waits for those before it"
    assert tier.kept.keys() == {block_hash(6), block_hash(7)}


@play()
async def test_a_tier_that_cannot_clear_raises(rig: Rig, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.put("a")
    await rig.wait_idle()

    async def fails(*_: Any) -> None:
        raise TierError("the master has gone")

    with monkeypatch.context() as patched:
        patched.setattr(tier, "clear", fails)
        with pytest.raises(TierError, match="the master has gone"):
            await rig.tiered.clear()
    assert not rig.tiered.stats().tiers[0].up
    assert tier.kept and await rig.tiered.clear(bytes(32)) == 0
    assert not tier.kept, "a namespace that only a tier knows cannot be cleared"


def test_a_tier_has_a_series_for_each_counter_and_a_directory_none_of_bytes() -> None:
    counters = {name: nth for nth, name in enumerate(COUNTERS, 1)}
    servers = [pb.TierServer(name="h:1", up=True, read_bytes=0), pb.TierServer(name="directory h:2", up=True)]
    tier = pb.TierStats(name="peers", counters=counters, up=True, servers=servers)
    samples = [each for family in pool_families(pb.StatsResponse(tiers=(tier,))) for each in family.samples]
    assert {each.value for each in samples if each.labels == {"tier": "peers"}} >= set(counters.values())
    assert {(each.name, each.labels["server"]): each.value for each in samples if each.labels.get("server")} == {
        ("kvpool_tier_server_up", "h:1"): 1,
        ("kvpool_tier_server_up", "directory h:2"): 1,
        ("kvpool_tier_server_read_bytes_total", "h:1"): 0,
    }


@awaited
async def test_without_tiers_every_call_is_the_pools_own() -> None:
    rig = Rig()
    assert not Rig(MemoryTier()).tiered.stats().tiers, "a scrape before the tiers are open"
    await rig.tiered.open()
    rig.put("a", "b")
    found = rig.lookup("a", "b", "c")
    assert (found.hits[0], found.retry_after_ms) == (RunHits(2), 0) and found.lease_id
    assert [rig.pool.counters[name] for name in ("lookups", "lookup_blocks", "lookup_hits")] == [1, 3, 2]
    rig.pool.release([found.lease_id])
    fingerprint = rig.namespace.fingerprint
    assert await rig.tiered.remove(fingerprint, [BlockRun(0, [block_hash("b")])]) == 1
    assert await rig.tiered.clear(fingerprint) == 1
    with pytest.raises(UnknownNamespaceError):
        await rig.tiered.clear(bytes(32))
    assert await rig.tiered.drain(1) == 0 and not rig.tiered.stats().tiers
    await rig.tiered.close()


COUNT = 80


class _ManyNamespaces(MemoryTier):
    """Of a tenant more than it may open, and one of another."""

    def specs(self) -> list[NamespaceSpec]:
        own = [namespace_spec(group_spec(chunk_bytes=SLOT), tenant="umbra", salt=f"{nth}") for nth in range(COUNT)]
        return [namespace_spec(group_spec(chunk_bytes=SLOT), tenant="acme", salt="0"), *own]


@play(_ManyNamespaces, has_tenants=True)
async def test_a_start_opens_a_tenants_newest_namespaces_and_leaves_it_room_for_another(
    rig: Rig, tier: MemoryTier
) -> None:
    most = rig.pool.limits.max_tenant_namespaces
    opened = [(each.spec.tenant, each.spec.salt) for each in rig.pool.open_namespaces()]
    assert ("acme", "0") in opened
    assert [salt for tenant, salt in opened if tenant == "umbra"] == [
        f"{nth}" for nth in range(COUNT + 1 - most, COUNT)
    ]
    rig.pool.open_namespace(namespace_spec(tenant="umbra"))


@play()
async def test_blocks_that_are_being_removed_are_not_promoted(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a", "b")
    await rig.wait_idle()
    fingerprint, run = rig.namespace.fingerprint, BlockRun(0, [block_hash("a")])
    really, gate = tier.remove, asyncio.Event()

    async def slowly(*args: Any) -> None:
        await gate.wait()
        await really(*args)

    tier.remove = slowly  # type: ignore[method-assign]
    removing = asyncio.create_task(rig.tiered.remove(fingerprint, [run]))
    await turns()
    assert rig.lookup("a").hits[0].num_pending == 0
    gate.set()
    await removing
    assert block_hash("a") not in tier.kept
