"""Random histories of a pool with a file tier, through crashes and power cuts: no wrong byte, nothing lost, no leak."""

from __future__ import annotations

import asyncio
import functools
import itertools
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpool.protocol.errors import OutOfSpaceError
from kvpool.protocol.hashing import checksum
from kvpool.protocol.types import BlockRun, HintKind, Lookup, ShardRange
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.eviction import POLICIES
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.cache.steps import finish
from kvpool_server.tiering.tiered_pool import TieredPool
from kvpool_server.tiers.file.extents import BlockSpot
from kvpool_server.tiers.file.tier import FileTier
from testbed.pool_at_once import PoolAtOnce
from tests.simulation.power import PowerDisk
from tests.support.clock import FakeClock
from tests.support.effort import effort
from tests.support.file_tier import file_tier
from tests.support.integrity import check_integrity
from tests.support.memory_tier import answered
from tests.support.values import block_hash, group_spec, namespace_spec, payload

SHARDS = 2
SLOT = 64 << 10
ARENA_BYTES, EXTENT_BYTES = 16 * SLOT, 4 * SLOT
TIER_BYTES = 8 << 20
"""128 slots, in extents of 32."""
SPECS = [namespace_spec(group_spec(chunk_bytes=SLOT // SHARDS, num_shards=SHARDS), salt=f"tier {n}") for n in range(2)]
CHAINS = 12
DEPTH = 16

T = TypeVar("T")


@functools.cache
def _payload(space: int, chain: int, depth: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return payload(f"{space} {chain} {depth}", SLOT)


def _run(space: int, chain: int, count: int) -> BlockRun:
    return BlockRun(0, [block_hash(f"{space} {chain} {depth}") for depth in range(count)])


def _flip(file: Path, at: int) -> None:
    """Changes a byte."""
    with file.open("r+b") as handle:
        handle.seek(at)
        byte = handle.read(1)
        handle.seek(at)
        handle.write(bytes(value ^ 0x40 for value in byte))  # None, where the tier has just cut it.


class World:
    """One server with a file tier, as long as it lives, and what lies on the disk, which lives longer."""

    def __init__(
        self,
        pool_class: type[PoolAtOnce] = PoolAtOnce,
        policy: str = "density",
        write_back: bool = False,
    ):
        self.root = Path(tempfile.mkdtemp(prefix="kvpool-tier-"))
        self.loop = asyncio.new_event_loop()
        self.clock = FakeClock()
        self.disk = PowerDisk()
        self._pool_class = pool_class
        self._policy = policy
        self._write_back = write_back
        self.crashes = self.hits = self.promoted = self.prefetched = 0
        self.start()

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(call, 30))

    def expect_gone(self, space: int, run: BlockRun) -> None:
        """What was removed is there no more, whatever was on its way up or down."""
        self.wait_idle()
        found = self.pool.lookup(SPECS[space].fingerprint(), [run], prefix_only=True, lease_ttl_ms=0)
        assert not found.hits[0].num_leading and self.tier.known(
            self.namespaces[space].groups[0], run.block_hashes
        ) == [False]

    def start(self) -> None:
        ids = itertools.count(1)
        self.memory = np.zeros(ARENA_BYTES, np.uint8)
        policy = POLICIES[self._policy]
        self.pool = self._pool_class(Arena(ARENA_BYTES, EXTENT_BYTES), self.clock, lambda: next(ids), policy=policy)
        self.tier = file_tier(self.root, size=TIER_BYTES, policy=policy, io="direct", disk=self.disk, kind=FileTier)
        self.tiered = TieredPool(self.pool, self.memory, [self.tier], [self._write_back])
        self.do(self.tiered.open())
        self.namespaces: list[PoolNamespace] = [self.pool.open_namespace(spec)[0] for spec in SPECS]

    # What clients do

    def put(self, space: int, chain: int, count: int) -> None:
        fingerprint = SPECS[space].fingerprint()
        try:
            grant = self.pool.put_start(fingerprint, [_run(space, chain, count)], ShardRange(0, SHARDS))
        except OutOfSpaceError:
            return
        offsets, sums = iter(grant.offsets), []
        for depth, status in enumerate(grant.statuses):
            if not status:
                data, offset = _payload(space, chain, depth), next(offsets)
                self.memory[offset : offset + SLOT] = data
                sums += [checksum(part) for part in np.split(data, SHARDS)]
        if grant.ticket_id:
            self.pool.put_end(grant.ticket_id, sums)

    def lookup(self, space: int, chain: int, count: int) -> Lookup:
        runs = [_run(space, chain, count)]
        return answered(self.tiered.lookup(SPECS[space].fingerprint(), runs, prefix_only=True, lease_ttl_ms=1_000))

    def get(self, space: int, chain: int, count: int) -> int:
        """Waits for what is on its way; checks what came; how many leading blocks that were."""
        found = self.lookup(space, chain, count)
        for _ in range(200):
            if not found.retry_after_ms:
                break
            self.pool.release([found.lease_id])
            self.do(asyncio.sleep(0.001))
            found = self.lookup(space, chain, count)
        leading = found.hits[0].num_leading
        if leading:
            located = self.pool.get(
                found.lease_id, SPECS[space].fingerprint(), [_run(space, chain, leading)], ShardRange(0, SHARDS)
            )
            for depth, offset in enumerate(located.offsets):
                got = self.memory[offset : offset + SLOT]
                assert np.array_equal(got, _payload(space, chain, depth)), f"wrong bytes at {space} {chain} {depth}"
            self.pool.release([found.lease_id])
        self.hits += leading
        return leading

    def hint(self, kind: HintKind, space: int, chain: int, count: int, pin_seconds: int = 0) -> None:
        """Says something of a prefix; whatever the arena has of it stays readable, and nothing is said to be more."""
        fingerprint, runs = SPECS[space].fingerprint(), [_run(space, chain, count)]
        before = self.pool.lookup(fingerprint, runs, prefix_only=False, lease_ttl_ms=0).hits
        if kind is HintKind.PREFETCH:
            try:
                result = self.do(self.tiered.prefetch(fingerprint, runs))
            except OutOfSpaceError:
                return  # Too many are followed.
            assert result.num_blocks + result.num_pending <= count
            self.prefetched += result.num_pending
            return
        hints = self.pool.hints
        if kind is HintKind.EXPIRE:
            result = finish(hints.expire_in_steps(fingerprint, runs))
        elif pin_seconds:
            result = finish(hints.pin_in_steps(fingerprint, runs, pin_seconds))
        else:
            result = finish(hints.unpin_in_steps(fingerprint, runs))
        assert result.num_blocks + result.num_refused <= count
        assert self.pool.lookup(fingerprint, runs, prefix_only=False, lease_ttl_ms=0).hits == before

    # What befalls the server

    def wait_idle(self) -> None:
        """Until no block is on its way."""

        async def idle() -> None:
            while not self.tiered.is_idle:
                await asyncio.sleep(0.001)

        self.do(idle())

    def there(self) -> list[list[bool]]:
        """What the tier says that it has."""
        return [
            self.tier.known(self.namespaces[space].groups[0], _run(space, chain, DEPTH).block_hashes)
            for space in range(len(SPECS))
            for chain in range(CHAINS)
        ]

    def stop(self) -> None:
        """In good order."""
        self.wait_idle()
        self.do(self.tiered.close())

    def kill(self) -> None:
        """Nothing more is written; what the kernel has, it keeps."""
        self.disk.ops_left = 0
        self.crashes += 1
        self.do(self.tiered.close())
        self.disk.ops_left = None

    def cut_power(self, random: Random) -> None:
        self.kill()
        self.disk.cut(self.root, random)
        self.disk = PowerDisk()

    def corrupt(self, random: Random) -> None:
        """A byte of a slot changes on the disk, unnoticed."""
        files = sorted(self.root.rglob("extent-*"))
        if files and (size := (file := random.choice(files)).stat().st_size):
            _flip(file, random.randrange(size))

    def check(self) -> None:
        check_integrity(self.pool)
        check_integrity(self.tier.pool)

    def end(self) -> None:
        try:
            self.wait_idle()
            self.check()
            self.do(self.tiered.clear())
            assert not self.tier.stats().used_bytes, "slots of the tier leak"  # Or a lease or a ticket of its own pool.
            self.stop()
            self.clock.advance(1_000)
            self.pool.expire()
            stats = self.pool.stats()
            assert not stats.num_leases and not stats.num_tickets, "a lease or a ticket leaks"
            assert stats.free_bytes == stats.arena_bytes and not stats.num_quarantined, "slots leak"
        finally:
            self.loop.close()
            shutil.rmtree(self.root)


class TierMachine(RuleBasedStateMachine):
    """Clients and calamities in any order."""

    world: World

    @initialize(policy=st.sampled_from(sorted(POLICIES)), write_back=st.booleans())
    def begin(self, policy: str, write_back: bool) -> None:
        self.world = World(policy=policy, write_back=write_back)

    chains = st.integers(0, CHAINS - 1)
    counts = st.integers(1, DEPTH)
    spaces = st.sampled_from([0, 0, 0, 1])
    seconds = st.sampled_from([0, 1, 600])

    @rule(space=spaces, chain=chains, count=counts, idle=st.booleans())
    def put(self, space: int, chain: int, count: int, idle: bool) -> None:
        self.world.put(space, chain, count)
        if idle:
            self.world.wait_idle()

    @rule(space=spaces, chain=chains, count=counts)
    def get(self, space: int, chain: int, count: int) -> None:
        self.world.get(space, chain, count)

    @rule(space=spaces, chain=chains, count=counts)
    def lookup_and_go(self, space: int, chain: int, count: int) -> None:
        """What is brought up then nobody waits for."""
        self.world.pool.release([self.world.lookup(space, chain, count).lease_id])

    @rule(kind=st.sampled_from(HintKind), space=spaces, chain=chains, count=counts, seconds=seconds, idle=st.booleans())
    def hint(self, kind: HintKind, space: int, chain: int, count: int, seconds: int, idle: bool) -> None:
        self.world.hint(kind, space, chain, count, seconds)
        if idle:
            self.world.wait_idle()

    @rule(space=spaces, chain=chains, depth=st.integers(0, DEPTH - 1))
    def remove(self, space: int, chain: int, depth: int) -> None:
        run = BlockRun(0, [block_hash(f"{space} {chain} {depth}")])
        self.world.do(self.world.tiered.remove(SPECS[space].fingerprint(), [run]))
        self.world.expect_gone(space, run)

    @rule(really=st.integers(0, 3), space=st.sampled_from([0, 1, None]))
    def clear(self, really: int, space: int | None) -> None:
        if really == 0:
            fingerprint = b"" if space is None else SPECS[space].fingerprint()
            self.world.do(self.world.tiered.clear(fingerprint))

    @rule()
    def restart(self) -> None:
        self.world.stop()
        before = self.world.there()
        self.world.start()
        assert self.world.there() == before, "a restart in good order has lost or found blocks"

    @rule(idle=st.booleans())
    def kill(self, idle: bool) -> None:
        if idle:
            self.world.wait_idle()
        before, num_dropped = self.world.there(), self.world.tier.counters["corrupt_blocks"]
        self.world.kill()
        self.world.start()
        if idle:
            after = self.world.there()
            assert not (np.array(before) & ~np.array(after)).any(), "a crash has lost blocks that were written"
            # Until its next write the journal lists corrupt blocks that reads have dropped: they are read once more.
            assert np.sum(after) - np.sum(before) <= num_dropped, "a crash has found blocks"

    @rule(seed=st.integers(0, 1 << 32), ops=st.integers(0, 12), chain=chains, sync=st.booleans())
    def power_cut(self, seed: int, ops: int, chain: int, sync: bool) -> None:
        """While something is being written: `ops` more changes reach the page cache."""
        if sync:
            self.world.disk.sync()
        self.world.disk.ops_left = ops
        self.world.put(0, chain, DEPTH)
        self.world.do(asyncio.sleep(0.002))
        self.world.cut_power(Random(seed))
        self.world.start()

    @rule(seed=st.integers(0, 1 << 32))
    def corrupt(self, seed: int) -> None:
        self.world.corrupt(Random(seed))

    @rule(seconds=st.sampled_from([0.1, 2.0, 60.0]))
    def advance(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=effort(30), stateful_step_count=30)


def _everything_once(world: World) -> None:
    """More than the arena holds, then through a restart, a crash and a power cut."""
    for chain in range(6):
        world.put(0, chain, DEPTH)
        world.wait_idle()
    assert sum(world.get(0, chain, DEPTH) for chain in range(6)) == 6 * DEPTH
    world.stop()
    world.start()
    assert sum(world.get(0, chain, DEPTH) for chain in range(6)) == 6 * DEPTH
    world.disk.sync()
    for chain in range(6, 12):  # More than the tier holds: slots are used again, and nothing of that is certain.
        world.put(0, chain, DEPTH)
        world.wait_idle()
    world.cut_power(Random(7))
    world.start()
    for chain in range(12):
        world.get(0, chain, DEPTH)


def test_what_one_server_stored_comes_back_after_everything() -> None:
    world = World()
    _everything_once(world)
    assert world.hits > 12 * DEPTH
    world.end()


def test_a_corrupt_block_that_a_crash_brings_back_is_dropped_again() -> None:
    """The removal of a corrupt block is in the journal with the next write, which the crash comes before."""
    world = World()
    world.put(0, 0, 1)
    world.wait_idle()
    _flip(next(world.root.rglob("extent-*")), 0)
    for _ in range(2):
        world.kill()
        world.start()
        assert sum(map(sum, world.there())) == 1
        assert world.get(0, 0, 1) == 0 and world.tier.counters["corrupt_blocks"] == 1
        assert sum(map(sum, world.there())) == 0
    world.end()


def test_the_oracle_sees_a_tier_that_does_not_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(BlockSpot, "is_sound", lambda spot: True)
    with pytest.raises(AssertionError, match="wrong bytes"):
        _everything_once(world)
    world.do(world.tiered.close())
    world.loop.close()
    shutil.rmtree(world.root)


def test_blocks_are_verified_shard_by_shard() -> None:
    data = payload("a", SLOT)
    sums = [checksum(part) for part in np.split(data, SHARDS)]
    assert BlockSpot(0, data.data, sums).is_sound()
    assert not BlockSpot(0, data.data, sums[::-1]).is_sound()
