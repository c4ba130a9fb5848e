"""Another server may send anything: no error leaves the tier, and no block that it did not store becomes one."""

from __future__ import annotations

import asyncio
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.client.config import ClientConfig
from kvpool_server.cache.arena import Arena
from kvpool_server.tiers.peers import peer
from kvpool_server.tiers.peers.tier import PeersTier
from kvpool_server.tiers.tier import TierError
from testbed.pool_at_once import PoolAtOnce
from tests.support.clock import FakeClock
from tests.support.cpu_time import MAX_CPU_S, LongestPart
from tests.support.effort import effort
from tests.support.lying_pool import LyingPool, altered
from tests.support.values import block_hash, group_spec, namespace_spec, payload, run_of

SPEC = namespace_spec(group_spec(num_shards=2))
BLOCK_BYTES = 512
NAMES = [f"block {nth}" for nth in range(12)]
LIE_SHARE = 0.7
MAX_GROWTH_MIB = 100


def test_no_reply_of_a_peer_brings_a_server_down_or_becomes_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, clock = LyingPool(), FakeClock()
    monkeypatch.setattr(peer, "Client", pool.client)
    owner = pool.client(ClientConfig("127.0.0.1:1"))
    owner.put_blocks(owner.open_namespace(SPEC), run_of(*NAMES), [payload(name, BLOCK_BYTES) for name in NAMES])
    namespace, _ = PoolAtOnce(Arena(1 << 20), clock, iter(range(1, 9)).__next__).open_namespace(SPEC)
    tier = PeersTier("peers:x", ClientConfig("127.0.0.1:1", timeout_ms=500), ["127.0.0.1:1"], clock=clock)
    num_read, longest = 0, LongestPart()

    async def one_load(seed: int) -> None:
        nonlocal num_read
        dice = random.Random(seed)
        clock.advance(100)
        pool.clock.advance(10)
        pool.alter = lambda _, reply: altered(reply, dice) if dice.random() < LIE_SHARE else reply.SerializeToString()
        hashes = [block_hash(name) for name in [*NAMES, "nobody's"]]
        try:
            found = await tier.find(namespace.groups[0], hashes)
        except TierError:
            return
        wanted = [nth for nth, is_there in enumerate(found) if is_there]
        assert len(found) == len(hashes) and len(NAMES) not in wanted, "a block that nobody has"
        into = [np.empty(BLOCK_BYTES, np.uint8) for _ in wanted]
        sums = await tier.read(namespace.groups[0], [hashes[nth] for nth in wanted], [each.data for each in into])
        assert len(sums) == len(wanted)
        for nth, block, checksums in zip(wanted, into, sums, strict=True):
            if checksums is not None:
                assert np.array_equal(block, payload(NAMES[nth], BLOCK_BYTES)), "a lie became a block"
                num_read += 1

    async def all_loads() -> None:
        await tier.open()
        loop = asyncio.get_running_loop()
        try:
            await asyncio.to_thread(lambda: every_seed(loop))
        finally:
            await tier.close()

    def every_seed(loop: asyncio.AbstractEventLoop) -> None:
        @settings(max_examples=effort(400))
        @given(st.integers(0, (1 << 64) - 1))
        def with_seed(seed: int) -> None:
            with longest.part():
                asyncio.run_coroutine_threadsafe(one_load(seed), loop).result(60)

        with_seed()

    tracemalloc.start()
    try:
        asyncio.run(all_loads())
        growth_mib = tracemalloc.get_traced_memory()[1] / (1 << 20)
    finally:
        tracemalloc.stop()
    assert pool.num_altered > effort(400) and num_read > effort(100)
    assert longest.seconds < MAX_CPU_S
    assert growth_mib < MAX_GROWTH_MIB
