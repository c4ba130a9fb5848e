"""Send and receive threads between real tensors and a real server."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvpool import checksum
from kvpool.client.block_io import Checksums
from kvpool.client.config import ClientConfig
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import BlockRun, ShardRange
from kvpool.transport.base import Buffers, Transfer
from tests.conftest import StartServer
from tests.support.faults import stopped
from tests.support.processes import ServerProcess, wait_for
from tests.support.values import group_spec, namespace_spec, run_of
from tests.support.workers import wait_for_mover
from vllm_plugin.metadata import GroupBlocks, LoadJob, StoreJob
from vllm_plugin.metrics import Recorder
from vllm_plugin.model.groups import RankShards
from vllm_plugin.session import Session
from vllm_plugin.worker import transfer
from vllm_plugin.worker.copy import BlockIds, Copier, make_copier
from vllm_plugin.worker.layout import make_layout
from vllm_plugin.worker.transfer import ReceiveThread, SendThread

LAYERS, BLOCKS, HEADS, TOKENS, COLUMNS = ("a", "b"), 16, 4, 8, 16
CHUNK_BYTES = len(LAYERS) * TOKENS * COLUMNS
TIMEOUT_MS = 200
REPORTED_S = 20.0
BEHIND_S = 0.5


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


class Wrapped:
    """A copier around another one."""

    def __init__(self, copier: Copier):
        self._copier = copier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copier, name)


class Broken(Wrapped):
    """A copier whose next copy fails; all later ones work."""

    _failures = 1

    def gather(self, mark: Any, group_idx: int, block_ids: BlockIds, buffers: Buffers) -> None:
        self._fail()
        self._copier.gather(mark, group_idx, block_ids, buffers)

    def scatter(self, mark: Any, group_idx: int, block_ids: BlockIds, buffers: Buffers) -> None:
        self._fail()
        self._copier.scatter(mark, group_idx, block_ids, buffers)

    def _fail(self) -> None:
        if self._failures:
            self._failures -= 1
            raise RuntimeError("the device is on fire")


class Device(Wrapped):
    """A copier that answers for a device's: it returns the checksums of what it copies."""

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


@pytest.mark.parametrize("on_device", [False, True])
def test_bytes_of_a_device_move_in_a_process_of_their_own(
    on_device: bool, start: Start, shared_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = start(shared_server, transport="tcp", stream_connections=2)
    if on_device:
        rank.sender._copier = rank.receiver._copier = Device(rank.copier)
    transport = rank.session.namespace.transport
    apart: list[bool] = []
    if on_device:
        wait_for_mover(transport._movers)

    def move(act: Callable[..., bool], transfer: Transfer, local: Any, is_write: bool) -> bool:
        apart.append(act(transfer, local, is_write=is_write))
        return apart[-1]

    monkeypatch.setattr(transport._movers, "move", functools.partial(move, transport._movers.move))
    names, blocks = [f"apart {on_device} {nth}" for nth in range(3)], [3, 1, 7]
    assert rank.store(names, blocks)
    before = rank.kv[:, blocks].clone()
    rank.kv.zero_()
    assert rank.load(rank.lease(names), names, blocks)
    assert torch.equal(rank.kv[:, blocks], before)
    assert apart == [True, True] * on_device


class Behind(Device):
    """A device that is behind the host: it has done what it was given so far after `BEHIND_S`. Marks are times."""

    def mark(self) -> float:
        return time.perf_counter() + BEHIND_S

    def now(self) -> float:
        return time.perf_counter()

    def seconds_between(self, earlier: float, mark: float) -> float:
        return max(0.0, mark - earlier)

    def scatter(self, mark: float, group_idx: int, block_ids: BlockIds, buffers: Buffers) -> Checksums:
        time.sleep(max(0.0, mark - time.perf_counter()))
        return super().scatter(mark, group_idx, block_ids, buffers)


def test_a_load_takes_as_long_as_its_transfer_however_far_the_device_is_behind(
    start: Start, shared_server: ServerProcess
) -> None:
    rank = start(shared_server)
    assert rank.store(["behind"], [3])
    rank.counted()
    rank.receiver._copier = Behind(rank.copier)
    jobs = [LoadJob("r", (rank.lease(["behind"]),), [blocks_of(["behind"], [5])]) for _ in range(2)]
    rank.receiver.submit(jobs[0])
    assert rank._outcome(rank.receiver)
    (felt_s,) = rank.counted()["load_seconds"]
    # The mark is older than the load, by as long as the thread took to begin.
    assert 0 < jobs[0].seconds < felt_s - BEHIND_S / 2
    rank.receiver._copier = rank.copier
    rank.receiver.submit(jobs[1])
    assert rank._outcome(rank.receiver)
    assert jobs[1].seconds == rank.counted()["load_seconds"][0]


def test_blocks_that_are_there_are_not_sent_again(start: Start, shared_server: ServerProcess) -> None:
    rank = start(shared_server)
    assert rank.store("ab", [0, 1])
    rank.counted()
    assert rank.store("abc", [0, 1, 2])
    counted = rank.counted()
    assert (counted["stored_blocks"], counted["store_skipped_blocks"]) == (1, 2)


# Failures are reported, each of them


@pytest.mark.parametrize("what", ["block", "lease"])
def test_a_block_or_lease_that_is_gone_fails_the_load(what: str, start: Start, shared_server: ServerProcess) -> None:
    rank = start(shared_server)
    assert rank.store("abc", [0, 1, 2])
    lease_id = rank.lease("abc")
    if what == "block":
        rank.session.client.admin.remove(rank.session.namespace, [run_of("b")])
    else:
        rank.session.client.release([lease_id])
    assert not rank.load(lease_id, "abc", [5, 6, 7])
    assert not rank.last_load.is_unserved, "the engine came too late"
    assert rank.counted()["load_failures"] == 1
    assert rank.session.namespace is not None, "a missing block is no reason to give the pool up"


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_exception_in_a_copy_is_reported_and_the_thread_lives_on(
    transport: str, direction: str, start: Start, shared_server: ServerProcess
) -> None:
    rank = start(shared_server, transport=transport)
    assert rank.store("a", [0])
    if direction == "store":
        rank.sender._copier = Broken(rank.copier)
        assert not rank.store("b", [1])
        assert rank.store("b", [1])
    else:
        rank.receiver._copier = Broken(rank.copier)
        assert not rank.load(rank.lease("a"), "a", [5])
        assert rank.load(rank.lease("a"), "a", [5])
        assert torch.equal(rank.kv[:, 5], rank.kv[:, 0])


def test_a_failed_store_gives_its_space_back(start: Start, pool_server: StartServer) -> None:
    rank = start(pool_server())
    rank.sender._copier = Broken(rank.copier)
    assert not rank.store("ab", [0, 1])
    wait_for(lambda: rank.session.client.admin.stats().num_tickets == 0, "the ticket to be revoked")
    stats = rank.session.client.admin.stats()
    assert (stats.num_entries, stats.num_incomplete) == (0, 0)


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


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_server_that_does_not_answer_costs_no_more_than_the_deadlines(
    transport: str, start: Start, pool_server: StartServer
) -> None:
    server = pool_server()
    patient = start(server, transport=transport)
    assert patient.store("a", [0])
    lease_id = patient.lease("a")
    rank = start(server, transport=transport, timeout_ms=TIMEOUT_MS, data_timeout_ms=TIMEOUT_MS)
    with stopped(server):  # Without deadlines they would wait until the end of the block.
        assert not rank.load(lease_id, "a", [5])
        assert not rank.store("b", [1])
    wait_for(lambda: rank.store("b", [1]), "a store by the session that is open again")


class Slow:
    """A transport that takes 0.8 of the time that each transfer may take.

    Attributes:
        granted_s: how long each transfer was allowed to take.
    """

    def __init__(self, transport: Any):
        self._transport = transport
        self.granted_s: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def read(self, transfer: Transfer, *arguments: Any) -> Any:
        self._wait(transfer)
        return self._transport.read(transfer, *arguments)

    def write(self, transfer: Transfer, *arguments: Any) -> Any:
        self._wait(transfer)
        return self._transport.write(transfer, *arguments)

    def _wait(self, transfer: Transfer) -> None:
        self.granted_s.append(transfer.timeout_s)
        time.sleep(0.6 * transfer.timeout_s)


def slow_down(rank: Rank) -> Slow:
    namespace = rank.session.namespace
    assert namespace is not None
    slow = Slow(namespace.transport)
    rank.session.namespace = replace(namespace, transport=slow)  # type: ignore[arg-type]
    return slow


def test_the_deadline_of_a_load_is_that_of_all_its_groups(start: Start, shared_server: ServerProcess) -> None:
    rank = start(shared_server, load_timeout_s=2.0, store_timeout_s=10.0)
    of_second = GroupBlocks(1, [run_of("slow", group_idx=1)], [[3], [4]])
    assert rank.store_groups(blocks_of(["slow"], [3]), of_second)
    lease_ids = (rank.lease_runs(run_of("slow"), *of_second.runs),)
    slow = slow_down(rank)
    assert rank.load_groups(lease_ids, blocks_of(["slow"], [5]), of_second)
    assert len(slow.granted_s) == 2
    assert slow.granted_s[1] <= 0.4 * 2.0


def test_a_store_begins_no_put_after_its_deadline(
    start: Start, shared_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PUT_BYTES", HEADS * CHUNK_BYTES)
    rank = start(shared_server, store_timeout_s=2.0, ticket_ttl_ms=2_000)
    slow = slow_down(rank)
    assert not rank.store([f"slow {nth}" for nth in range(4)], [0, 1, 2, 3])
    assert len(slow.granted_s) == 2


def test_a_stopped_thread_ends_the_job_under_way_and_drops_the_rest(start: Start, shared_server: ServerProcess) -> None:
    rank = start(shared_server)
    for nth in range(50):
        rank.sender.submit(StoreJob(nth, [blocks_of([nth], [nth % BLOCKS])]))
    rank.sender.request_stop()
    rank.sender.join(30)
    assert not rank.sender.is_alive()
    assert all(succeeded for _, succeeded in rank.sender.take_ended())


# Sizes


def test_a_store_larger_than_the_pool_leaves_what_fits_of_it(
    start: Start, pool_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PUT_BYTES", 64 * HEADS * CHUNK_BYTES)
    rank = start(pool_server("--memory", "1MiB"))
    block_bytes = HEADS * CHUNK_BYTES
    too_many = (1 << 20) // block_bytes + 100
    names = [f"block {nth}" for nth in range(too_many)]
    assert not rank.store(names, [nth % BLOCKS for nth in range(too_many)])
    stats = rank.session.client.admin.stats()
    assert stats.num_entries >= too_many - 100 - 64
    assert stats.num_tickets == 0
    assert rank.load(rank.lease(names[:64]), names[:64], [nth % BLOCKS for nth in range(64)])


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


def test_a_stage_takes_the_lease_that_is_its_own(start: Start, shared_server: ServerProcess) -> None:
    rank = start(shared_server, stage=1)
    assert rank.store("a", [0])
    lease_id = rank.lease("a")
    assert not rank.load_groups((lease_id, lease_id + 1), blocks_of("a", [5]))
    assert rank.load_groups((lease_id + 1, lease_id), blocks_of("a", [5]))
    assert torch.equal(rank.kv[:, 5], rank.kv[:, 0])


def test_a_load_of_nothing_fails(start: Start, shared_server: ServerProcess) -> None:
    rank = start(shared_server)
    assert not rank.load_groups((0,))
    assert rank.counted() == {"load_failures": 1}
    assert rank.session.namespace is not None, "the pool has done no wrong"
