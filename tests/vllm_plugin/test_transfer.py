"""Send and receive threads between real tensors and a real server."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from kvpool.config import ClientConfig
from kvpool.namespace import NamespaceSpec
from kvpool.transport.base import Buffers
from kvpool.types import ShardRange
from tests.conftest import StartServer
from tests.support.processes import ServerProcess, wait_for
from tests.support.values import group_spec, namespace_spec, run_of
from tests.vllm_plugin.faults import flip_arena, stopped
from vllm_plugin import transfer
from vllm_plugin.copy import Copier, make_copier
from vllm_plugin.layout import canonical_view
from vllm_plugin.metadata import LoadJob, StoreJob
from vllm_plugin.metrics import Recorder
from vllm_plugin.session import Session
from vllm_plugin.transfer import ReceiveThread, SendThread

LAYERS, BLOCKS, HEADS, TOKENS, COLUMNS = ("a", "b"), 16, 4, 8, 16
CHUNK_BYTES = len(LAYERS) * TOKENS * COLUMNS
TIMEOUT_MS = 200
REPORTED_S = 5.0


class Rank:
    """A KV cache of random bytes, and both threads on it."""

    def __init__(self, endpoint: str, spec: NamespaceSpec, shards: ShardRange, seed: int, **config: Any):
        generator = torch.Generator().manual_seed(seed)
        shape = (len(LAYERS), BLOCKS, shards.count, TOKENS, COLUMNS)
        self.kv = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        views = canonical_view(dict(zip(LAYERS, self.kv, strict=True)), LAYERS, BLOCKS, shards.count)
        self.copier: Copier = make_copier(views)
        self.recorder = Recorder()
        timeouts = {"timeout_ms": 2_000, "data_timeout_ms": 2_000, "lease_ttl_ms": 5_000, "ticket_ttl_ms": 5_000}
        self.session = Session(ClientConfig(endpoint, **{**timeouts, **config}), spec, "test")
        self.sender = SendThread("send", self.session, self.copier, shards, self.recorder)
        self.receiver = ReceiveThread("receive", self.session, self.copier, shards, self.recorder)
        self._job_ids = itertools.count(1)
        wait_for(lambda: self.session.namespace, "the session to be open")

    def store(self, names: Sequence[object], block_ids: Sequence[int], within_s: float = REPORTED_S) -> bool:
        self.sender.submit(StoreJob(next(self._job_ids), run_of(*names), list(block_ids)))
        return self._outcome(self.sender, within_s)

    def lease(self, names: Sequence[object]) -> int:
        found = self.session.client.lookup(self.session.namespace, [run_of(*names)])
        assert found.hits[0].num_leading == len(names)
        return found.lease_id

    def load(self, lease_id: int, names: Sequence[object], block_ids: Sequence[int], within_s: float = 5.0) -> bool:
        self.receiver.submit(LoadJob("request", lease_id, run_of(*names), list(block_ids)))
        return self._outcome(self.receiver, within_s)

    def counted(self) -> dict[str, Any]:
        stats = self.recorder.take()
        return {} if stats is None else stats.data

    def stop(self) -> None:
        for thread in (self.sender, self.receiver):
            thread.request_stop()
            thread.join(5)
            assert not thread.is_alive()
        self.session.close()

    @staticmethod
    def _outcome(thread: Any, within_s: float) -> bool:
        ((_, succeeded),) = wait_for(thread.take_ended, "the job to be reported", within_s)
        return succeeded


Start = Callable[..., Rank]


@pytest.fixture
def spec() -> NamespaceSpec:
    return namespace_spec(group_spec(chunk_bytes=CHUNK_BYTES, num_shards=HEADS))


@pytest.fixture
def start(spec: NamespaceSpec) -> Iterator[Start]:
    """Starts ranks of one namespace; the seed sets what their KV cache holds."""
    seeds = itertools.count()
    with ExitStack() as stack:

        def make(server: ServerProcess, shards: ShardRange | None = None, **config: Any) -> Rank:
            rank = Rank(server.endpoint, spec, shards or ShardRange(0, HEADS), next(seeds), **config)
            stack.callback(rank.stop)
            return rank

        yield make


class Broken:
    """A copier whose next copy fails; all later ones work."""

    def __init__(self, copier: Copier):
        self._copier = copier
        self._failures = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copier, name)

    def gather(self, mark: Any, block_ids: Sequence[int], buffers: Buffers) -> None:
        self._fail()
        self._copier.gather(mark, block_ids, buffers)

    def scatter(self, mark: Any, block_ids: Sequence[int], buffers: Buffers) -> None:
        self._fail()
        self._copier.scatter(mark, block_ids, buffers)

    def _fail(self) -> None:
        if self._failures:
            self._failures -= 1
            raise RuntimeError("the device is on fire")


@pytest.mark.parametrize("transport", ["shm", "stream"])
def test_what_one_rank_stores_another_loads(transport: str, start: Start, shared_server: ServerProcess) -> None:
    writer, reader = start(shared_server, transport=transport), start(shared_server, transport=transport)
    untouched = reader.kv.clone()
    assert writer.store("abc", [3, 1, 7])
    assert reader.load(reader.lease("abc"), "abc", [10, 11, 2])
    assert torch.equal(reader.kv[:, [10, 11, 2]], writer.kv[:, [3, 1, 7]])
    others = [block for block in range(BLOCKS) if block not in (10, 11, 2)]
    assert torch.equal(reader.kv[:, others], untouched[:, others])
    stored, loaded = writer.counted(), reader.counted()
    assert (stored["stored_blocks"], stored["stored_bytes"]) == (3, 3 * HEADS * CHUNK_BYTES)
    assert (loaded["loaded_blocks"], loaded["loaded_bytes"]) == (3, 3 * HEADS * CHUNK_BYTES)


def test_two_ranks_make_a_block_that_one_rank_reads(start: Start, shared_server: ServerProcess) -> None:
    low, high = start(shared_server, ShardRange(0, 2)), start(shared_server, ShardRange(2, 2))
    whole = start(shared_server)
    assert low.store("ab", [0, 1])
    assert whole.session.client.lookup(whole.session.namespace, [run_of("a", "b")]).hits[0].num_leading == 0
    assert high.store("ab", [4, 5])
    assert whole.load(whole.lease("ab"), "ab", [8, 9])
    assert torch.equal(whole.kv[:, [8, 9], :2], low.kv[:, [0, 1]])
    assert torch.equal(whole.kv[:, [8, 9], 2:], high.kv[:, [4, 5]])


def test_blocks_that_are_there_are_not_sent_again(start: Start, shared_server: ServerProcess) -> None:
    rank = start(shared_server)
    assert rank.store("ab", [0, 1])
    rank.counted()
    assert rank.store("abc", [0, 1, 2])
    counted = rank.counted()
    assert (counted["stored_blocks"], counted["store_skipped_blocks"]) == (1, 2)


# Failures are reported, each of them


def test_a_block_that_is_gone_fails_the_load(start: Start, shared_server: ServerProcess) -> None:
    rank = start(shared_server)
    assert rank.store("abc", [0, 1, 2])
    lease_id = rank.lease("abc")
    rank.session.client.remove(rank.session.namespace, [run_of("b")])
    assert not rank.load(lease_id, "abc", [5, 6, 7])
    assert rank.counted()["load_failures"] == 1
    assert rank.session.namespace is not None, "a missing block is no reason to give the pool up"


def test_a_lease_that_is_over_fails_the_load(start: Start, shared_server: ServerProcess) -> None:
    rank = start(shared_server)
    assert rank.store("a", [0])
    lease_id = rank.lease("a")
    rank.session.client.release([lease_id])
    assert not rank.load(lease_id, "a", [5])
    assert rank.counted()["load_failures"] == 1


def test_bytes_that_changed_fail_the_load_and_leave_the_pool(
    start: Start, pool_server: StartServer, shm_dir: str
) -> None:
    server = pool_server("--memory", "1MiB")
    rank = start(server)
    assert rank.store("ab", [0, 1])
    lease_id = rank.lease("ab")
    flip_arena(server, shm_dir)
    assert not rank.load(lease_id, "ab", [5, 6])
    stats = rank.session.client.stats()
    assert stats.counters["corrupt_blocks_dropped"] == 2
    assert stats.num_entries == 0


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("transport", ["shm", "stream"])
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
    wait_for(lambda: rank.session.client.stats().num_tickets == 0, "the ticket to be revoked")
    stats = rank.session.client.stats()
    assert (stats.num_entries, stats.num_incomplete) == (0, 0)


def test_jobs_after_the_pool_is_gone_are_reported_at_once(start: Start, pool_server: StartServer) -> None:
    server = pool_server()
    rank = start(server)
    assert rank.store("a", [0])
    lease_id = rank.lease("a")
    server.kill()
    assert not rank.load(lease_id, "a", [5], within_s=1.0)
    assert rank.session.namespace is None
    for _ in range(3):
        assert not rank.load(lease_id, "a", [5], within_s=0.5)
        assert not rank.store("b", [1], within_s=0.5)
    counted = rank.counted()
    assert (counted["load_failures"], counted["store_failures"]) == (4, 3)


@pytest.mark.parametrize("transport", ["shm", "stream"])
def test_a_server_that_does_not_answer_costs_no_more_than_the_deadlines(
    transport: str, start: Start, pool_server: StartServer
) -> None:
    server = pool_server()
    rank = start(server, transport=transport, timeout_ms=TIMEOUT_MS, data_timeout_ms=TIMEOUT_MS)
    assert rank.store("a", [0])
    lease_id = rank.lease("a")
    with stopped(server):
        assert not rank.load(lease_id, "a", [5], within_s=1.0)
        assert not rank.store("b", [1], within_s=1.0)
    wait_for(lambda: rank.session.namespace, "the session to be open", 15)
    assert rank.store("b", [1])


def test_a_stopped_thread_ends_the_job_under_way_and_drops_the_rest(start: Start, shared_server: ServerProcess) -> None:
    rank = start(shared_server)
    for nth in range(50):
        rank.sender.submit(StoreJob(nth, run_of(f"{nth}"), [nth % BLOCKS]))
    started = time.monotonic()
    rank.sender.request_stop()
    rank.sender.join(5)
    assert not rank.sender.is_alive()
    assert time.monotonic() - started < 5
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
    stats = rank.session.client.stats()
    assert stats.num_entries >= too_many - 100 - 64
    assert stats.num_tickets == 0
    assert rank.load(rank.lease(names[:64]), names[:64], [nth % BLOCKS for nth in range(64)])


def test_a_store_is_cut_into_puts_of_bounded_size_that_keep_their_order(
    start: Start, shared_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PUT_BYTES", 3 * HEADS * CHUNK_BYTES)
    rank = start(shared_server)
    run = run_of(*"abcdefgh", parent="root")
    shards = ShardRange(0, HEADS)
    parts = transfer._cut(run, rank.session.namespace, shards)
    assert [(first, len(part)) for first, part in parts] == [(0, 3), (3, 3), (6, 2)]
    assert [block_hash for _, part in parts for block_hash in part.block_hashes] == list(run.block_hashes)
    assert [part.parent_hash for _, part in parts] == [run.parent_hash, run.block_hashes[2], run.block_hashes[5]]
    assert rank.store("abcdefgh", range(8))
    assert rank.load(rank.lease("abcdefgh"), "abcdefgh", range(8, 16))
    assert torch.equal(rank.kv[:, 8:], rank.kv[:, :8])
