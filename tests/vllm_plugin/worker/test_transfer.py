"""Send and receive threads between real tensors and a real server."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch

from kvpool import checksum
from kvpool.client.config import ClientConfig
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import BlockRun, ShardRange
from kvpool.transport.base import Buffers, Transfer
from kvpool.transport.chunk_sums import Checksums
from tests.conftest import StartServer
from tests.support.processes import ServerProcess, wait_for
from tests.support.values import group_spec, namespace_spec, run_of
from tests.support.workers import wait_for_mover
from vllm_plugin.metadata import GroupBlocks, LoadJob, StoreJob
from vllm_plugin.metrics import Recorder
from vllm_plugin.model.groups import RankShards
from vllm_plugin.session import Session
from vllm_plugin.worker import transfer
from vllm_plugin.worker.copy import BlockIds, Copier, make_copier, make_layout
from vllm_plugin.worker.transfer import ReceiveThread, SendThread

LAYERS, BLOCKS, HEADS, TOKENS, COLUMNS = ("a", "b"), 16, 4, 8, 16
CHUNK_BYTES = len(LAYERS) * TOKENS * COLUMNS
TIMEOUT_MS = 200
REPORTED_S = 20.0


def blocks_of(names: Sequence[object], *block_ids: Sequence[int], group_idx: int = 0) -> GroupBlocks:
    """One run of blocks, and where they are: a row for each block table."""
    return GroupBlocks(group_idx, [run_of(*names, group_idx=group_idx)], [list(row) for row in block_ids])


class Rank:
    """A KV cache of random bytes, and both threads on it."""

    def __init__(
        self,
        endpoint: str,
        spec: NamespaceSpec,
        shards: ShardRange,
        seed: int,
        stage: int = 0,
        load_timeout_s: float = 10.0,
        store_timeout_s: float = 10.0,
        **config: Any,
    ):
        generator = torch.Generator().manual_seed(seed)
        shape = (len(LAYERS), BLOCKS, shards.count, TOKENS, COLUMNS)
        self.kv = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        layout = make_layout(dict(zip(LAYERS, self.kv, strict=True)), [LAYERS], BLOCKS, shards.count)
        # Of the second group: one layer in each of two block tables.
        self.split = torch.randint(0, 256, (2, BLOCKS, 1, TOKENS, COLUMNS), dtype=torch.uint8, generator=generator)
        split = make_layout(dict(zip("cd", self.split, strict=True)), ["c", "d"], BLOCKS, 1)
        self.copier: Copier = make_copier([layout, split])
        mine = [RankShards(shards, True), RankShards(ShardRange(0, 1), True)]
        self.recorder = Recorder()
        timeouts = dict.fromkeys(("timeout_ms", "data_timeout_ms", "lease_ttl_ms", "ticket_ttl_ms"), 10_000)
        self.session = Session(ClientConfig(endpoint, **{**timeouts, **config}), spec, "test")
        threads = (self.session, self.copier, mine, stage, self.recorder)
        self.sender = SendThread("send", store_timeout_s, *threads)
        self.receiver = ReceiveThread("receive", load_timeout_s, *threads)
        self._job_ids = itertools.count(1)
        wait_for(lambda: self.session.namespace, "the session to be open")

    def store(self, names: Sequence[object], block_ids: Sequence[int]) -> bool:
        return self.store_groups(blocks_of(names, block_ids))

    def store_groups(self, *groups: GroupBlocks) -> bool:
        self.sender.submit(StoreJob(next(self._job_ids), list(groups)))
        return self._outcome(self.sender)

    def lease(self, names: Sequence[object]) -> int:
        return self.lease_runs(run_of(*names))

    def lease_runs(self, *runs: BlockRun) -> int:
        found = self.session.client.lookup(self.session.namespace, list(runs))
        assert [hits.num_leading for hits in found.hits] == [len(run) for run in runs]
        return found.lease_id

    def load(self, lease_id: int, names: Sequence[object], block_ids: Sequence[int]) -> bool:
        return self.load_groups((lease_id,), blocks_of(names, block_ids))

    def load_groups(self, lease_ids: tuple[int, ...], *groups: GroupBlocks) -> bool:
        self.last_load = LoadJob("request", lease_ids, list(groups))
        self.receiver.submit(self.last_load)
        return self._outcome(self.receiver)

    def counted(self) -> dict[str, Any]:
        stats = self.recorder.take()
        return {} if stats is None else stats.data

    def stop(self) -> None:
        for thread in (self.sender, self.receiver):
            thread.request_stop()
            thread.join(30)
            assert not thread.is_alive()
        self.session.close()

    @staticmethod
    def _outcome(thread: Any) -> bool:
        ((_, succeeded),) = wait_for(thread.take_ended, "the job to be reported", REPORTED_S)
        return succeeded


Start = Callable[..., Rank]


@pytest.fixture
def spec() -> NamespaceSpec:
    other = group_spec(kind="sliding_window", chunk_bytes=2 * TOKENS * COLUMNS, num_shards=1)
    return namespace_spec(group_spec(chunk_bytes=CHUNK_BYTES, num_shards=HEADS), other)


@pytest.fixture
def start(spec: NamespaceSpec) -> Iterator[Start]:
    """Starts ranks of one namespace; the seed sets what their KV cache holds."""
    seeds = itertools.count()
    with ExitStack() as stack:

        def make(server: ServerProcess, shards: ShardRange | None = None, **options: Any) -> Rank:
            rank = Rank(server.endpoint, spec, shards or ShardRange(0, HEADS), next(seeds), **options)
            stack.callback(rank.stop)
            return rank

        yield make


class Device:
    """A copier around another one that answers for a device's: it returns the checksums of what it copies."""

    def __init__(self, copier: Copier):
        self._copier = copier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copier, name)

    def sums(self, group_idx: int) -> bool:
        return True

    def in_place(self, group_idx: int, block_ids: BlockIds) -> None:
        return None

    def gather(self, mark: Any, group_idx: int, block_ids: BlockIds, buffers: Buffers) -> Checksums:
        self._copier.gather(mark, group_idx, block_ids, buffers)
        return self._summed(buffers)

    def scatter(self, mark: Any, group_idx: int, block_ids: BlockIds, buffers: Buffers) -> Checksums:
        self._copier.scatter(mark, group_idx, block_ids, buffers)
        return self._summed(buffers)

    @staticmethod
    def _summed(buffers: Buffers) -> Checksums:
        sums = [checksum(chunk) for buffer in buffers for chunk in buffer.reshape(-1, CHUNK_BYTES)]
        return lambda: sums


def test_bytes_of_a_device_move_in_a_process_of_their_own(
    start: Start, shared_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = start(shared_server, transport="tcp", stream_connections=2)
    movers = rank.session.namespace.transport._movers
    wait_for_mover(movers)
    move, apart, blocks = movers.move, list[bool](), [3, 1, 7]

    def moved(peer: Any, transfer: Transfer, local: Any, is_write: bool = False) -> bool:
        apart.append(move(peer, transfer, local, is_write=is_write))
        return apart[-1]

    monkeypatch.setattr(movers, "move", moved)
    for copier, is_apart in ((rank.copier, []), (Device(rank.copier), [True, True])):
        rank.sender._copier = rank.receiver._copier = copier
        names = [f"apart {is_apart} {nth}" for nth in range(3)]
        assert rank.store(names, blocks)
        before = rank.kv[:, blocks].clone()
        rank.kv.zero_()
        assert rank.load(rank.lease(names), names, blocks)
        assert torch.equal(rank.kv[:, blocks], before)
        assert apart == is_apart
        rank.kv.random_(0, 256)


# Failures are reported, each of them


def failing_once(function: Callable[..., Any]) -> Mock:
    """A function that raises the first time that it is called."""
    outcomes = itertools.chain([RuntimeError("the device is on fire")], itertools.repeat(DEFAULT))
    return Mock(side_effect=outcomes, wraps=function)


def test_a_block_or_lease_that_is_gone_fails_the_load(start: Start, shared_server: ServerProcess) -> None:
    rank = start(shared_server)
    assert rank.store("abc", [0, 1, 2])
    lease_ids = [rank.lease("abc") for _ in range(2)]
    rank.session.client.release(lease_ids[:1])
    rank.session.client.admin.remove(rank.session.namespace, [run_of("b")])
    for lease_id in lease_ids:
        assert not rank.load(lease_id, "abc", [5, 6, 7])
        assert not rank.last_load.is_unserved, "the engine came too late"
    assert not rank.load_groups((0,)), "a load of nothing"
    assert rank.counted()["load_failures"] == 3
    assert rank.session.namespace is not None, "a missing block is no reason to give the pool up"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_exception_in_a_copy_is_reported_and_the_thread_lives_on(
    transport: str, start: Start, shared_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = start(shared_server, transport=transport)
    for name in ("gather", "scatter"):
        monkeypatch.setattr(rank.copier, name, failing_once(getattr(rank.copier, name)))
    assert not rank.store("a", [0])
    wait_for(lambda: rank.session.client.admin.stats().num_tickets == 0, "the ticket to be revoked")
    assert rank.session.client.admin.stats().num_incomplete == 0, "a failed store gives its space back"
    assert rank.store("a", [0])
    assert not rank.load(rank.lease("a"), "a", [5])
    assert rank.load(rank.lease("a"), "a", [5])
    assert torch.equal(rank.kv[:, 5], rank.kv[:, 0])


def test_jobs_after_the_pool_is_gone_are_reported_at_once(start: Start, pool_server: StartServer) -> None:
    server = pool_server()
    rank = start(server)
    assert rank.store("a", [0])
    lease_id = rank.lease("a")
    server.kill()
    assert not rank.load(lease_id, "a", [5])
    assert rank.session.namespace is None
    for _ in range(3):
        assert not rank.load(lease_id, "a", [5])
        assert rank.last_load.is_unserved
        assert not rank.store("b", [1])
    counted = rank.counted()
    assert (counted["load_failures"], counted["store_failures"]) == (4, 3)


def slow_down(rank: Rank, patch: pytest.MonkeyPatch) -> list[float]:
    """Transfers take 0.6 of the time that each may take; returns how long each was allowed to take."""
    transport, granted_s = rank.session.namespace.transport, list[float]()

    def wait(transfer: Transfer, *_: Any) -> object:
        granted_s.append(transfer.timeout_s)
        time.sleep(0.6 * transfer.timeout_s)
        return DEFAULT

    for name in ("read", "write"):
        patch.setattr(transport, name, Mock(side_effect=wait, wraps=getattr(transport, name)))
    return granted_s


def test_the_deadline_of_a_load_is_that_of_all_its_groups_and_that_of_a_store_of_all_its_puts(
    start: Start, shared_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = start(shared_server, load_timeout_s=2.0, store_timeout_s=2.0, ticket_ttl_ms=2_000)
    of_second = GroupBlocks(1, [run_of("slow", group_idx=1)], [[3], [4]])
    assert rank.store_groups(blocks_of(["slow"], [3]), of_second)
    lease_ids = (rank.lease_runs(run_of("slow"), *of_second.runs),)
    granted_s = slow_down(rank, monkeypatch)
    assert rank.load_groups(lease_ids, blocks_of(["slow"], [5]), of_second)
    assert len(granted_s) == 2
    assert granted_s[1] <= 0.4 * 2.0
    monkeypatch.setattr(transfer, "PUT_BYTES", HEADS * CHUNK_BYTES)
    assert not rank.store([f"slow {nth}" for nth in range(4)], [0, 1, 2, 3])
    assert len(granted_s) == 4, "a put began after the deadline"


def test_a_stopped_thread_ends_the_job_under_way_and_drops_the_rest(start: Start, shared_server: ServerProcess) -> None:
    rank = start(shared_server)
    for nth in range(50):
        rank.sender.submit(StoreJob(nth, [blocks_of([nth], [nth % BLOCKS])]))
    rank.sender.request_stop()
    rank.sender.join(30)
    assert not rank.sender.is_alive()
    assert all(succeeded for _, succeeded in rank.sender.take_ended())


# Several groups, several stages


@pytest.mark.parametrize("transport", ["shm", "tcp", "mooncake"])
def test_groups_with_gaps_and_block_tables_of_their_own_travel_in_one_job(
    transport: str, start: Start, pool_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: tuple[str, ...] = ()
    if transport == "mooncake":
        pytest.importorskip("mooncake.engine", reason="mooncake-transfer-engine is not installed", exc_type=ImportError)
        flags = ("--memory", "64MiB", "--mooncake", "tcp", "--mooncake-trusted-network")
    server = pool_server(*flags)
    monkeypatch.setattr(transfer, "PUT_BYTES", 2 * HEADS * CHUNK_BYTES)
    writer, reader = start(server, transport=transport), start(server, transport=transport)
    # The second group lacks what is between "b" and "e".
    runs = [run_of("b", group_idx=1, parent="a"), run_of("e", "f", group_idx=1, parent="d")]
    assert writer.store_groups(blocks_of("abcdef", range(6)), GroupBlocks(1, runs, [[3, 9, 1], [8, 2, 7]]))
    lease_id = reader.lease_runs(run_of(*"abcdef"), *runs)
    untouched, untouched_kv = reader.split.clone(), reader.kv.clone()
    loaded = GroupBlocks(1, runs[1:], [[12, 4], [0, 13]])
    assert reader.load_groups((lease_id,), blocks_of("abcdef", range(10, 16)), loaded)
    assert torch.equal(reader.kv[:, 10:], writer.kv[:, :6]) and torch.equal(reader.kv[:, :10], untouched_kv[:, :10])
    assert torch.equal(reader.split[0, [12, 4]], writer.split[0, [9, 1]])
    assert torch.equal(reader.split[1, [0, 13]], writer.split[1, [2, 7]])
    for table, taken in enumerate([[12, 4], [0, 13]]):
        others = [block for block in range(BLOCKS) if block not in taken]
        assert torch.equal(reader.split[table, others], untouched[table, others])
    stored, loaded_stats = writer.counted(), reader.counted()
    of_first, of_second = 6 * HEADS * CHUNK_BYTES, 2 * TOKENS * COLUMNS
    assert (loaded_stats["loaded_blocks"], loaded_stats["loaded_bytes"]) == (8, of_first + 2 * of_second)
    assert (stored["stored_blocks"], stored["stored_bytes"]) == (9, of_first + 3 * of_second)
