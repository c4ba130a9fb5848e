"""Several of Mooncake's clients for one tier, on a real cluster: one that dies, one that is stopped, and bounds."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.tiers.mooncake import store_process
from kvpool_server.tiers.mooncake.store_process import StoreWorkers
from kvpool_server.tiers.mooncake.tier import MooncakeTier
from kvpool_server.tiers.mooncake.worker import StoreConfig
from kvpool_server.tiers.tier import Tier
from tests.contracts.tier_contract import Memory, PersistentTierContract, awaited, blocks_of, namespace_of, opened
from tests.support.mooncake import Cluster
from tests.support.processes import wait_for
from tests.support.values import block_hash, group_spec, namespace_spec

BLOCK = 1 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(1 << 30)
    yield made
    made.stop()


def _config(cluster: Cluster) -> StoreConfig:
    return StoreConfig(cluster.address, "P2PHANDSHAKE", "127.0.0.1", 0, "tcp", "")


class TestTierWithSeveralWorkers(PersistentTierContract):
    @pytest.fixture
    def make_tier(self, cluster: Cluster) -> Callable[[], Tier]:
        return lambda: MooncakeTier(_config(cluster), threads=3, workers=2)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that hangs is found out within seconds: sooner than a call to a stopped master ends, after 4 s."""
    monkeypatch.setattr(store_process, "QUIET_S", 0.3)
    monkeypatch.setattr(store_process, "PONG_S", 3.0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
@awaited
async def test_a_worker_that_dies_or_hangs_in_the_middle_fails_no_call_and_is_replaced(
    cluster: Cluster, num_workers: int, harm: signal.Signals
) -> None:
    namespace = namespace_of(namespace_spec(group_spec(chunk_bytes=BLOCK)))
    async with opened(MooncakeTier(_config(cluster), threads=3, workers=num_workers)) as tier:
        pids = tier.workers.pids
        parts = [[f"{part}-{nth}" for nth in range(16)] for part in range(6)]
        writing = [asyncio.create_task(_write(tier, namespace, names)) for names in parts]
        await asyncio.wait(writing, return_when=asyncio.FIRST_COMPLETED)
        os.kill(pids[0], harm)
        await asyncio.gather(*writing)
        reading = [asyncio.create_task(_read(tier, namespace, names)) for names in parts]
        # Blocks whose put was cut off may be missing; the others come, and are right.
        assert sum(await asyncio.gather(*reading)) >= 16 * (len(parts) - 3)
        await asyncio.to_thread(wait_for, lambda: _are_replaced(tier.workers, pids[0]), "all workers run again")
        assert tier.workers.pids[1:] == pids[1:], "a worker that worked was replaced"


async def _write(tier: MooncakeTier, namespace: PoolNamespace, names: list[str]) -> None:
    await tier.write(namespace, 0, blocks_of(*names, nbytes=BLOCK, shards=1))


async def _read(tier: MooncakeTier, namespace: PoolNamespace, names: list[str]) -> int:
    memory = Memory(len(names), BLOCK)
    sums = await tier.read(namespace, 0, [block_hash(name) for name in names], memory.views)
    for block, view, found in zip(blocks_of(*names, nbytes=BLOCK, shards=1), memory.blocks, sums, strict=True):
        assert found is None or np.array_equal(view, np.frombuffer(block.payload, np.uint8))
    return len(names) - sums.count(None)


def _are_replaced(workers: StoreWorkers, dead: int) -> bool:
    workers.ask("exist", ["something"])  # The next call after a death has the process started again.
    return dead not in workers.pids and all(os.path.exists(f"/proc/{pid}") for pid in workers.pids)


def test_a_question_waits_for_no_transfer(cluster: Cluster) -> None:
    workers = StoreWorkers(_config(cluster), 2, 3)
    try:
        with ExitStack() as stack:
            for nth in range(2):
                process = workers.start(nth)
                for _ in range(2):
                    channel = stack.enter_context(process.transfers.borrowed())
                    assert channel.memory.nbytes == store_process.STAGING_BYTES
            waiting = threading.Thread(target=workers.transfer, args=(lambda _: [],))
            waiting.start()
            assert workers.ask("exist", ["a", "b"]) == [0, 0]
            assert waiting.is_alive(), "there are more transfers at once than staging memory"
        waiting.join(5)
        assert not waiting.is_alive()
    finally:
        workers.close()


@pytest.mark.usefixtures("impatient")
def test_a_process_that_answers_pings_is_not_killed_for_a_slow_master() -> None:
    cluster = Cluster(16 << 20)
    try:
        workers = StoreWorkers(_config(cluster), 1, 1)
        try:
            pid = workers.start(0).pid
            cluster.harm_master("stopped")
            began_at = time.monotonic()
            assert min(workers.ask("exist", ["a"])) < 0
            assert time.monotonic() - began_at > store_process.QUIET_S + store_process.PONG_S
            assert workers.start(0).pid == pid
        finally:
            workers.close()
    finally:
        cluster.stop()


def test_a_process_without_an_answer_for_too_long_is_killed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_process, "ANSWER_S", 0.3)
    workers = StoreWorkers(_config(cluster), 1, 1)
    try:
        process = workers.start(0)
        with pytest.raises(store_process.StoreError, match="did not answer within 0 s, and was killed"):
            process.check_alive(time.monotonic() - 0.31)
        assert not process.is_alive and workers.start(0).is_alive
    finally:
        workers.close()
