"""The Mooncake tier on real clusters: the contract, what is its own, and its client process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.protocol.errors import ConfigError
from kvpool.transport.mooncake_engine import RDMA_DEVICES
from kvpool_server.cache.eviction.policy import PrefixLRU
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.tiers.mooncake import store_process
from kvpool_server.tiers.mooncake.store_process import (
    STAGING_BYTES,
    StagedRead,
    StoreChannel,
    encode_footer,
    footer_bytes,
)
from kvpool_server.tiers.mooncake.tier import MooncakeTier
from kvpool_server.tiers.mooncake.worker import StoreConfig
from kvpool_server.tiers.registry import parse
from kvpool_server.tiers.tier import Tier, TierContext, TierError
from tests.contracts.tier_contract import (
    SHARDS,
    SLOT,
    Memory,
    PersistentTierContract,
    TierContract,
    awaited,
    blocks_of,
    namespace_of,
    opened,
    read_back,
    there,
)
from tests.support.mooncake import Cluster
from tests.support.values import block_hash, group_spec, namespace_spec

MakeCluster = Callable[..., Cluster]
ENDS_S = 15.0
BLOCK = 1 << 20


def _config(master: str, segment_bytes: int = 0, protocol: str = "tcp") -> StoreConfig:
    return StoreConfig(master, "P2PHANDSHAKE", "127.0.0.1", segment_bytes, protocol, "")


def _key(namespace: PoolNamespace, name: str) -> str:
    return f"kvpool/{namespace.fingerprint.hex()}/0/{block_hash(name).hex()}"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """For all who harm it in nothing."""
    made = Cluster(1 << 30)
    yield made
    made.stop()


@pytest.fixture
def own_cluster() -> Iterator[MakeCluster]:
    """Makes a cluster that the test may break."""
    made: list[Cluster] = []

    def make(segment_bytes: int = 32 << 20) -> Cluster:
        made.append(Cluster(segment_bytes))
        return made[-1]

    yield make
    for each in made:
        each.stop()


class TestMooncakeTier(PersistentTierContract):
    @pytest.fixture
    def make_tier(self, cluster: Cluster) -> Callable[[], Tier]:
        return lambda: MooncakeTier(_config(cluster.address))

    @pytest.mark.parametrize("harm", ["payload", "footer", "another's", "shorter", "longer", "foreign"])
    @awaited
    async def test_what_is_not_what_was_stored_is_a_miss_once_and_then_gone(
        self, cluster: Cluster, namespace: PoolNamespace, harm: str
    ) -> None:
        (block, other) = blocks_of("a", "b")
        sound = bytes(block.payload) + encode_footer(_key(namespace, "a"), SLOT, block.checksums)
        harmed = {
            "payload": bytes([sound[0] ^ 1]) + sound[1:],
            "footer": sound[:-1] + bytes([sound[-1] ^ 1]),
            "another's": bytes(other.payload) + encode_footer(_key(namespace, "b"), SLOT, other.checksums),
            "shorter": sound[1:],
            "longer": sound + b"\0",
            "foreign": os.urandom(len(sound)),
        }[harm]
        async with opened(MooncakeTier(_config(cluster.address))) as tier:

            def put_harmed(channel: StoreChannel) -> list[int]:
                channel.memory[: len(harmed)] = np.frombuffer(harmed, np.uint8)
                return channel.call("put", [_key(namespace, "a")], len(harmed))

            assert tier.store.transfer(put_harmed) == [0]
            await tier.write(namespace.groups[0], [other])
            assert await there(tier, namespace, ["a", "b"]) == [True, True]
            assert await read_back(tier, namespace, ["a", "b"]) == [None, "b"]
            assert tier.stats().counters["corrupt_blocks"] == 1
            assert await there(tier, namespace, ["a", "b"]) == [False, True]
            assert await tier.write(namespace.groups[0], [block]) == 1
            assert await read_back(tier, namespace, ["a"]) == ["a"]

    @awaited
    async def test_a_block_larger_than_the_staging_memory_is_refused(self, cluster: Cluster) -> None:
        namespace = namespace_of(namespace_spec(group_spec(chunk_bytes=STAGING_BYTES)))
        async with opened(MooncakeTier(_config(cluster.address))) as tier:
            assert await tier.write(namespace.groups[0], blocks_of("huge", nbytes=STAGING_BYTES, shards=1)) == 0
            assert tier.stats().counters["refused_blocks"] == 1
            into = Memory(1, STAGING_BYTES).views
            assert await tier.read(namespace.groups[0], [block_hash("huge")], into) == [None]

    @awaited
    async def test_a_full_cluster_refuses_and_is_no_failure(self, own_cluster: MakeCluster) -> None:
        namespace = namespace_of(namespace_spec(group_spec(chunk_bytes=BLOCK)))
        address = own_cluster(16 << 20).address
        async with opened(MooncakeTier(_config(address))) as tier:
            names = [f"f{nth}" for nth in range(32)]
            kept = await tier.write(namespace.groups[0], blocks_of(*names, nbytes=BLOCK, shards=1))
            assert 0 < kept < 16 and tier.stats().counters["refused_blocks"] == 32 - kept
            assert tier.holdings(namespace.fingerprint).nbytes == kept << 20

    @awaited
    async def test_a_cancelled_read_does_not_write_to_its_view(
        self, cluster: Cluster, namespace: PoolNamespace
    ) -> None:
        async with opened(MooncakeTier(_config(cluster.address))) as tier:
            await tier.write(namespace.groups[0], blocks_of("a"))
            memory = Memory(1)
            name = (namespace.fingerprint, 0, block_hash("a"))
            reading = StagedRead([name], memory.views, SHARDS, None)
            reading.cancel()
            assert tier.store.transfer(reading.run) == [SLOT + footer_bytes(SHARDS)]
            assert (memory.blocks == 0xA5).all() and reading.found == [None] and not reading.corrupt


@pytest.mark.parametrize("way", ["killed", "stopped"])
@awaited
async def test_without_its_master_it_fails_and_with_it_works_again(own_cluster: MakeCluster, way: str) -> None:
    namespace = namespace_of(TierContract.spec)
    cluster = own_cluster()
    async with opened(MooncakeTier(_config(cluster.address, segment_bytes=16 << 20))) as tier:
        await tier.write(namespace.groups[0], blocks_of("a"))
        cluster.harm_master(way)
        for call in (
            tier.find(namespace.groups[0], [block_hash("b")]),
            tier.write(namespace.groups[0], blocks_of("c")),
            tier.read(namespace.groups[0], [block_hash("a")], Memory(1).views),
            tier.remove(namespace.groups[0], [block_hash("a")]),
        ):
            began_at = time.monotonic()
            with pytest.raises(TierError, match="does not answer"):
                await call
            assert time.monotonic() - began_at < 30  # 60 s, were Mooncake left to itself.
        cluster.restore_master()
        ends_at = time.monotonic() + 60
        while True:
            try:
                if await tier.write(namespace.groups[0], blocks_of("new")) == 1:
                    break
            except TierError:
                pass
            assert time.monotonic() < ends_at, "it has not found its master again"
        (sums,) = await tier.read(namespace.groups[0], [block_hash("new")], Memory(1).views)
        assert sums is not None


@awaited
async def test_a_host_that_stops_dead_is_a_miss_and_touches_nothing_later(own_cluster: MakeCluster) -> None:
    namespace = namespace_of(namespace_spec(group_spec(chunk_bytes=BLOCK)))
    cluster = own_cluster(64 << 20)
    names = [f"h{nth}" for nth in range(16)]
    async with opened(MooncakeTier(_config(cluster.address))) as tier:
        assert await tier.write(namespace.groups[0], blocks_of(*names, nbytes=BLOCK, shards=1)) == 16
        assert cluster.holder is not None
        pid = tier.store.start().pid
        cluster.holder.send_signal(signal.SIGSTOP)
        os.waitpid(cluster.holder.pid, os.WUNTRACED)  # Until it has stopped, on a busy machine.
        memory = Memory(16, BLOCK)
        began_at = time.monotonic()
        assert await tier.read(namespace.groups[0], [block_hash(name) for name in names], memory.views) == [None] * 16
        assert time.monotonic() - began_at < 50  # 60 s, were Mooncake left to itself.
        assert tier.store.start().pid == pid, "a client that waits for a host was taken for one that hangs"
        cluster.holder.send_signal(signal.SIGCONT)
        await asyncio.sleep(1)
        assert (memory.blocks == 0xA5).all(), "what came late went to where it was to be"


@pytest.mark.parametrize("way", ["there", "stopped", "killed"])
@awaited
async def test_it_ends_within_seconds_whatever_its_master_does(own_cluster: MakeCluster, way: str) -> None:
    namespace = namespace_of(TierContract.spec)
    cluster = own_cluster()
    async with opened(MooncakeTier(_config(cluster.address, segment_bytes=16 << 20))) as tier:
        pid = tier.store.start().pid
        cluster.harm_master(way)
        calls = [asyncio.create_task(tier.find(namespace.groups[0], [block_hash(nth)])) for nth in range(4)]
        await asyncio.sleep(0.1)
        began_at = time.monotonic()
    assert time.monotonic() - began_at < ENDS_S
    assert not Path(f"/proc/{pid}").exists()
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("who", ["nobody", "one who says nothing"])
@awaited
async def test_a_master_that_is_not_there_is_said_at_the_start(who: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if who == "nobody":
            listener.close()
        began_at = time.monotonic()
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*start mooncake_master first"):
            await MooncakeTier(_config(f"127.0.0.1:{port}")).open()
        assert time.monotonic() - began_at < 40


def test_a_segment_that_other_hosts_cannot_reach_is_said_at_the_start() -> None:
    here = TierContext(("127.0.0.1", 0), PrefixLRU)
    with pytest.raises(ConfigError, match="give host="):
        parse("mooncake:master=10.0.0.1:1,segment=16MiB").make(here)
    for reached in (
        "master=10.0.0.1:1,segment=16MiB,host=10.0.0.2",
        "master=10.0.0.1:1",
        "master=127.0.0.1:1,segment=16MiB",
    ):
        parse(f"mooncake:{reached}").make(here)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("segment=1MiB", "segment=1048576 is too small for Mooncake; give at least 16MiB"),
        ("segment=100TiB", "segment=109951162777600"),
        pytest.param(
            "protocol=rdma",
            f"no RDMA device in {RDMA_DEVICES}",
            marks=pytest.mark.skipif(RDMA_DEVICES.is_dir(), reason="this machine has RDMA"),
        ),
    ],
)
def test_a_segment_or_protocol_that_cannot_be_is_said_at_the_start(cluster: Cluster, options: str, says: str) -> None:
    tier = parse(f"mooncake:master={cluster.address},{options}").make(TierContext(("127.0.0.1", 0), PrefixLRU))
    with pytest.raises(ConfigError, match=says):
        asyncio.run(tier.open())


# The client process


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that hangs is found out within seconds."""
    monkeypatch.setattr(store_process, "LOOK_S", 0.3)
    monkeypatch.setattr(store_process, "ANSWER_S", 5.0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
@awaited
async def test_a_process_that_dies_or_hangs_in_the_middle_fails_no_call_and_is_replaced(
    cluster: Cluster, harm: signal.Signals
) -> None:
    namespace = namespace_of(namespace_spec(group_spec(chunk_bytes=BLOCK)))
    async with opened(MooncakeTier(_config(cluster.address))) as tier:
        pid = tier.store.start().pid
        parts = [[f"{part}-{nth}" for nth in range(16)] for part in range(6)]
        blocks = [blocks_of(*names, nbytes=BLOCK, shards=1) for names in parts]
        writing = [asyncio.create_task(tier.write(namespace.groups[0], each)) for each in blocks]
        await asyncio.wait(writing, return_when=asyncio.FIRST_COMPLETED)
        os.kill(pid, harm)
        await asyncio.gather(*writing)
        reading = [asyncio.create_task(_read_all(tier, namespace, names)) for names in parts]
        # Blocks whose put was cut off may be missing; the others come, and are right.
        assert sum(await asyncio.gather(*reading)) >= 16 * (len(parts) - 3)
        assert tier.store.start().pid != pid


async def _read_all(tier: MooncakeTier, namespace: PoolNamespace, names: list[str]) -> int:
    memory = Memory(len(names), BLOCK)
    sums = await tier.read(namespace.groups[0], [block_hash(name) for name in names], memory.views)
    for block, view, found in zip(blocks_of(*names, nbytes=BLOCK, shards=1), memory.blocks, sums, strict=True):
        assert found is None or np.array_equal(view, np.frombuffer(block.payload, np.uint8))
    return len(names) - sums.count(None)
