"""The scheduler's side alone, asked as vLLM asks it: real requests, a real block pool, a real server."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvpool.types import BlockRun
from tests.conftest import StartServer
from tests.support.processes import ServerProcess, wait_for
from tests.vllm_plugin.conftest import BLOCK_TOKENS, MakeConfig
from tests.vllm_plugin.faults import free_endpoint, stopped
from tests.vllm_plugin.support import cache_config, make_request, tokens
from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metadata import ConnectorMetadata, LoadJob, WorkerMetadata
from vllm_plugin.scheduler import KVPoolScheduler

NUM_BLOCKS = 64
STEP_S = 0.05
"""Far more than a step may wait (2 ms), far less than a deadline of the pool."""

_salts = itertools.count()


class Core:
    """What EngineCore does around the connector's scheduler side."""

    def __init__(self, config: Any, extra: dict[str, Any]):
        self.side = KVPoolScheduler(config, cache_config(num_blocks=NUM_BLOCKS), ConnectorConfig.parse(extra))
        self.pool = BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        self.side.bind_block_pool(self.pool)
        self.tables: dict[str, list[Any]] = {}

    def connected(self) -> Core:
        wait_for(lambda: self.side._session.namespace, "the session to be open")
        return self

    def ask(self, request: Request, computed: int = 0) -> int:
        """Asks once a step until there is an answer."""

        def answer() -> tuple[int] | None:
            matched, is_async = self.side.matched_tokens(request, computed)
            self.step()
            if matched is None:
                assert not is_async
                return None
            assert is_async == (matched > 0)
            return (matched,)

        return wait_for(answer, "an answer")[0]

    def allocate(self, request: Request, external_tokens: int, num_blocks: int | None = None) -> list[int]:
        """Gives a request blocks for all its tokens (or `num_blocks`) and says how much of the answer is taken."""
        count = num_blocks if num_blocks is not None else -(-request.num_tokens // BLOCK_TOKENS)
        held = self.tables.setdefault(request.request_id, [])
        held.extend(self.pool.get_new_blocks(max(0, count - len(held))))
        self.side.after_alloc(request, KVCacheBlocks((held,)), external_tokens)
        return [block.block_id for block in held]

    def step(self, *scheduled: tuple[Request, int]) -> ConnectorMetadata:
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = {request.request_id: count for request, count in scheduled}
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        output.kv_connector_block_state = KVConnectorBlockState(
            set(output.num_scheduled_tokens), lambda name: ([block.block_id for block in self.tables[name]],), {}
        )
        metadata = self.side.build_metadata(output)
        for request, count in scheduled:
            request.num_computed_tokens += count
        return metadata

    def report(self, *jobs: int, ranks: int = 1, **loads: Any) -> None:
        stores = WorkerMetadata(dict.fromkeys(jobs, ranks)) if jobs else None
        self.side.update(KVConnectorOutput(kv_connector_worker_meta=stores, **loads))

    def free(self, request: Request) -> None:
        """Preemption: the blocks go, and nobody tells the connector."""
        self.pool.free_blocks(reversed(self.tables.pop(request.request_id)))
        request.num_computed_tokens = 0

    def finish(self, request: Request) -> None:
        self.side.request_finished(request)
        if request.request_id in self.tables:
            self.free(request)

    def num_used_blocks(self) -> int:
        return NUM_BLOCKS - 1 - self.pool.get_num_free_blocks()


MakeCore = Callable[..., Core]


@pytest.fixture
def core(vllm_config: MakeConfig, shared_server: ServerProcess) -> Iterator[MakeCore]:
    """`core(endpoint=..., role=..., store_decoded=False)`: on the shared server, in a namespace of its own."""
    with ExitStack() as stack:

        def make(endpoint: str = shared_server.endpoint, role: str = "kv_both", **extra: Any) -> Core:
            extra = {"salt": f"{next(_salts)}", "lookup_timeout_ms": 5_000, **extra, "endpoint": endpoint}
            made = Core(vllm_config(endpoint, role=role), extra)
            stack.callback(made.side.shutdown)
            return made

        yield make


@pytest.fixture
def alone(core: MakeCore, pool_server: StartServer) -> Core:
    """On a server of its own: every lease there is this core's."""
    # Leases that outlive the test: none ends by itself.
    return core(endpoint=pool_server().endpoint, load_timeout_ms=30_000).connected()


def fill(core: Core, hashes: Sequence[bytes]) -> None:
    """Puts blocks into the pool."""
    client, namespace = core.side._session.client, core.side._session.namespace
    assert namespace is not None
    client.put_blocks(namespace, BlockRun(0, hashes), [bytes(namespace.spec.groups[0].slot_bytes)] * len(hashes))


def num_leases(core: Core) -> int:
    return core.side._session.client.stats().num_leases


def wait_for_leases(core: Core, count: int) -> None:
    wait_for(lambda: num_leases(core) == count, f"{count} leases on the server")


def blocks(count: int) -> int:
    return count * BLOCK_TOKENS


# Lookup


def test_the_first_answer_may_be_ask_again_and_then_comes_the_value(core: MakeCore) -> None:
    one = core().connected()
    request = make_request("r", tokens(100))
    fill(one, request.block_hashes[:3])
    first = one.side.matched_tokens(request, 0)
    assert first in ((None, False), (blocks(3), True))
    assert one.ask(request) == blocks(3)


def test_asking_again_costs_no_lookup_and_no_second_lease(alone: Core) -> None:
    one = alone
    request = make_request("r", tokens(100))
    fill(one, request.block_hashes)
    assert {one.ask(request) for _ in range(20)} == {blocks(6)}
    assert num_leases(one) == 1
    assert one.side.stats().data["lookups"] == 1


def test_the_engines_own_hit_is_not_counted_again(core: MakeCore) -> None:
    one = core().connected()
    request = make_request("r", tokens(100))
    fill(one, request.block_hashes[:5])
    assert one.ask(request, computed=blocks(2)) == blocks(3)
    assert one.ask(request, computed=blocks(4)) == blocks(1)
    assert one.ask(request, computed=blocks(5)) == 0


def test_an_own_hit_that_shrinks_is_looked_up_anew(alone: Core) -> None:
    one = alone
    request, other = make_request("r", tokens(100)), make_request("other", tokens(100, "other"))
    fill(one, request.block_hashes[:5])
    fill(one, other.block_hashes[3:5])
    assert one.ask(request, computed=blocks(3)) == blocks(2)
    assert one.ask(request, computed=blocks(1)) == blocks(4)
    wait_for_leases(one, 1)  # The first lookup's lease is given back.
    assert one.ask(other, computed=blocks(3)) == blocks(2)
    assert one.ask(other, computed=blocks(1)) == 0, "nobody has seen blocks 1 and 2 of it"


@pytest.mark.parametrize(("num_tokens", "expected"), [(15, 0), (16, 0), (17, 1), (63, 3), (64, 3), (65, 4), (100, 6)])
def test_a_hit_of_the_whole_prompt_leaves_its_last_token(num_tokens: int, expected: int, core: MakeCore) -> None:
    one = core().connected()
    request = make_request("r", tokens(num_tokens))
    if request.block_hashes:
        fill(one, request.block_hashes)
    assert one.ask(request) == blocks(expected)


def test_a_gap_ends_the_hit(core: MakeCore) -> None:
    one = core().connected()
    request = make_request("r", tokens(100))
    fill(one, [*request.block_hashes[:2], *request.block_hashes[3:]])
    assert one.ask(request) == blocks(2)


def test_a_request_that_wants_no_cached_prefix_gets_none(core: MakeCore) -> None:
    one = core().connected()
    request = make_request("r", tokens(100), prompt_logprobs=1)
    assert request.skip_reading_prefix_cache
    fill(one, request.block_hashes)
    assert one.side.matched_tokens(request, 0) == (0, False)


def test_a_producer_never_looks_up(core: MakeCore) -> None:
    one = core(role="kv_producer").connected()
    request = make_request("r", tokens(100))
    fill(one, request.block_hashes)
    assert one.side.matched_tokens(request, 0) == (0, False)
    assert one.side.stats() is None


def test_without_a_pool_everything_is_a_miss_at_once(core: MakeCore) -> None:
    one = core(endpoint=free_endpoint())
    started = time.monotonic()
    for nth in range(100):
        assert one.side.matched_tokens(make_request(f"r{nth}", tokens(100)), 0) == (0, False)
    assert time.monotonic() - started < 1


def test_steps_wait_next_to_nothing_for_a_server_that_does_not_answer(core: MakeCore, pool_server: StartServer) -> None:
    server = pool_server()
    one = core(endpoint=server.endpoint, lookup_timeout_ms=300).connected()
    requests = [make_request(f"r{nth}", tokens(100, nth)) for nth in range(100)]
    with stopped(server):
        unanswered = dict.fromkeys(requests)
        started = time.monotonic()
        steps_s = []
        while unanswered:
            began = time.monotonic()
            for request in list(unanswered):
                matched, is_async = one.side.matched_tokens(request, 0)
                assert matched in (None, 0) and not is_async
                if matched == 0:
                    del unanswered[request]
            steps_s.append(time.monotonic() - began)
            one.step()
            assert time.monotonic() - started < 5
            time.sleep(0.001)
        # A budget for each lookup instead of one for all would be 200 ms a step. (The median: machines are busy.)
        assert statistics.median(steps_s) < STEP_S
        assert one.side._session.namespace is None
    assert one.side.stats().data["lookup_failures"] == len(requests)


def test_a_lookup_that_failed_is_not_repeated_for_the_same_request(core: MakeCore, pool_server: StartServer) -> None:
    server = pool_server()
    one = core(endpoint=server.endpoint, lookup_timeout_ms=100).connected()
    request = make_request("r", tokens(100))
    fill(one, request.block_hashes)
    with stopped(server):
        assert one.ask(request) == 0
    assert {one.ask(request) for _ in range(10)} == {0}
    assert one.ask(make_request("another", tokens(100))) == blocks(6)


def test_an_answer_that_is_too_old_for_its_lease_is_asked_for_anew(core: MakeCore) -> None:
    one = core(load_timeout_ms=100).connected()  # Leases of 200 ms, good to begin a load for 100 ms.
    request = make_request("r", tokens(100))
    fill(one, request.block_hashes)
    assert one.ask(request) == blocks(6)
    time.sleep(0.15)
    assert one.ask(request) == blocks(6)
    assert one.side.stats().data["lookups"] == 2


# Load


def test_a_load_names_the_leased_blocks_and_their_places(core: MakeCore) -> None:
    one = core().connected()
    request = make_request("r", tokens(100))
    fill(one, request.block_hashes)
    own_hit = one.ask(request, computed=blocks(2))
    block_ids = one.allocate(request, own_hit)
    (job,) = one.step().loads
    assert list(job.run.block_hashes) == request.block_hashes[2:6]
    assert job.run.parent_hash == request.block_hashes[1]
    assert job.block_ids == block_ids[2:6]
    assert job.lease_id
    assert one.step().loads == [], "a load is told once"


def test_a_core_that_takes_less_than_it_was_offered_loads_less(core: MakeCore) -> None:
    one = core().connected()
    request = make_request("r", tokens(100))
    fill(one, request.block_hashes)
    assert one.ask(request) == blocks(6)
    block_ids = one.allocate(request, blocks(2))
    (job,) = one.step().loads
    assert (list(job.run.block_hashes), job.block_ids) == (request.block_hashes[:2], block_ids[:2])


def test_a_hit_that_another_connector_serves_is_not_loaded_and_its_lease_ends(alone: Core) -> None:
    one = alone
    request = make_request("r", tokens(100))
    fill(one, request.block_hashes)
    assert one.ask(request) == blocks(6)
    wait_for_leases(one, 1)
    one.allocate(request, 0)  # The request's real blocks, and not one token for us.
    assert one.step().loads == []
    wait_for_leases(one, 0)


def test_a_lease_ends_when_every_rank_has_loaded(alone: Core) -> None:
    one = alone
    request = make_request("r", tokens(100))
    fill(one, request.block_hashes)
    one.allocate(request, one.ask(request))
    assert num_leases(one) == 1
    one.report(finished_recving={"r"})
    wait_for_leases(one, 0)


def test_the_second_allocation_after_a_load_changes_nothing(core: MakeCore) -> None:
    one = core().connected()
    request = make_request("r", tokens(100))
    fill(one, request.block_hashes)
    one.allocate(request, one.ask(request))
    (job,) = one.step().loads
    one.report(finished_recving={"r"})
    request.num_computed_tokens = blocks(6)
    one.allocate(request, 0)
    metadata = one.step((request, 4))
    assert job.request_id == "r" and metadata.loads == []
    assert metadata.stores == [], "what came from the pool is not sent back to it"


def test_a_request_whose_load_failed_never_looks_up_again(core: MakeCore) -> None:
    one = core().connected()
    request = make_request("r", tokens(100))
    fill(one, request.block_hashes)
    one.allocate(request, one.ask(request))
    one.step()
    one.report(finished_recving={"r"}, failed_recving={"r"})
    one.free(request)
    assert {one.ask(request) for _ in range(5)} == {0}
    one.finish(request)
    # The name is free again, and so is its past.
    assert one.ask(make_request("r", tokens(100))) == blocks(6)


def test_blocks_of_a_failed_load_are_stored_once_they_are_computed(core: MakeCore) -> None:
    one = core().connected()
    request = make_request("r", tokens(100))
    fill(one, request.block_hashes)
    one.allocate(request, one.ask(request))
    one.step()
    one.report(finished_recving={"r"}, failed_recving={"r"})
    one.free(request)
    one.allocate(request, 0)
    (job,) = one.step((request, 100)).stores
    assert list(job.run.block_hashes) == request.block_hashes[:6]


def test_a_request_aborted_while_it_loads_leaves_nothing_behind(alone: Core) -> None:
    one = alone
    request = make_request("r", tokens(100))
    fill(one, request.block_hashes)
    one.allocate(request, one.ask(request))
    one.step()
    one.side.request_finished(request)
    # Its blocks are held until the ranks report; that the load failed as well is nobody's loss.
    one.report(finished_recving={"r"}, failed_recving={"r"})
    wait_for_leases(one, 0)
    again = make_request("r", tokens(100))
    assert one.ask(again) == blocks(6), "the same name has no past"
    assert not one.side._stored and not one.side._failed


def test_a_request_aborted_while_it_is_looked_up_gives_its_lease_back(alone: Core) -> None:
    one = alone
    requests = [make_request(f"r{nth}", tokens(100)) for nth in range(10)]
    fill(one, requests[0].block_hashes)
    for request in requests:
        one.side.matched_tokens(request, 0)
        one.side.request_finished(request)
    wait_for_leases(one, 0)
    assert not one.side._sought


# Store


def test_full_blocks_are_stored_as_they_are_computed(core: MakeCore) -> None:
    one = core().connected()
    request = make_request("r", tokens(100))
    block_ids = one.allocate(request, 0)
    (first,) = one.step((request, 40)).stores
    assert (list(first.run.block_hashes), first.block_ids) == (request.block_hashes[:2], block_ids[:2])
    assert first.run.parent_hash == b""
    (second,) = one.step((request, 60)).stores
    assert (list(second.run.block_hashes), second.block_ids) == (request.block_hashes[2:6], block_ids[2:6])
    assert second.run.parent_hash == request.block_hashes[1]
    assert first.job_id != second.job_id


def test_the_block_of_the_last_sampled_token_waits_until_that_token_is_computed(core: MakeCore) -> None:
    one = core().connected()
    request = make_request("r", tokens(63))
    one.allocate(request, 0, num_blocks=5)
    (job,) = one.step((request, 63)).stores
    assert len(job.run) == 3
    request.append_output_token_ids(7)  # The 64th token is known, its KV is not there yet.
    assert len(request.block_hashes) == 4
    assert one.step().stores == []
    (job,) = one.step((request, 1)).stores
    assert list(job.run.block_hashes) == request.block_hashes[3:4]


def test_a_block_that_a_chunk_leaves_one_token_short_waits(core: MakeCore) -> None:
    one = core().connected()
    request = make_request("r", tokens(100))
    one.allocate(request, 0)
    (first,) = one.step((request, 47)).stores
    assert list(first.run.block_hashes) == request.block_hashes[:2]
    (second,) = one.step((request, 1)).stores
    assert list(second.run.block_hashes) == request.block_hashes[2:3]


def test_tokens_that_are_scheduled_but_not_known_are_not_stored(core: MakeCore) -> None:
    one = core().connected()
    request = make_request("r", tokens(60))
    one.allocate(request, 0, num_blocks=6)
    one.step((request, 60))
    # Draft tokens, or asynchronous scheduling: eight more are computed, none of them has a name.
    assert one.step((request, 8)).stores == []


@pytest.mark.parametrize(("store_decoded", "expected"), [(True, 1), (False, 0)])
def test_decoded_blocks_are_stored_only_if_that_is_wanted(store_decoded: bool, expected: int, core: MakeCore) -> None:
    one = core(store_decoded=store_decoded).connected()
    request = make_request("r", tokens(60))
    one.allocate(request, 0, num_blocks=6)
    assert len(one.step((request, 60)).stores) == 1
    request.append_output_token_ids(list(range(5)))
    assert len(one.step((request, 4)).stores) == expected


def test_a_consumer_never_stores(core: MakeCore) -> None:
    one = core(role="kv_consumer").connected()
    request = make_request("r", tokens(100))
    one.allocate(request, 0)
    assert one.step((request, 100)).stores == []
    assert not one.side.has_pinned_blocks()


def test_more_hashes_than_blocks_store_the_blocks_there_are(core: MakeCore) -> None:
    one = core().connected()
    request = make_request("r", tokens(100))
    block_ids = one.allocate(request, 0, num_blocks=4)
    (job,) = one.step((request, 100)).stores
    assert (list(job.run.block_hashes), job.block_ids) == (request.block_hashes[:4], block_ids)


def test_a_store_that_found_no_pool_is_made_up_for(core: MakeCore, pool_server: StartServer) -> None:
    endpoint = free_endpoint()
    one = core(endpoint=endpoint)
    request = make_request("r", tokens(100))
    one.allocate(request, 0)
    assert one.step((request, 50)).stores == []
    assert not one.side.has_pinned_blocks()
    pool_server("--listen", endpoint)
    wait_for(lambda: one.side._session.namespace, "the session to be open", 15)
    (job,) = one.step((request, 50)).stores
    assert list(job.run.block_hashes) == request.block_hashes[:6]


# Pins


def test_blocks_are_pinned_until_every_rank_has_reported(core: MakeCore) -> None:
    one = core().connected()
    one.side._world_size = 2
    request = make_request("r", tokens(100))
    one.allocate(request, 0)
    (job,) = one.step((request, 100)).stores
    one.finish(request)
    assert one.num_used_blocks() == 6 and one.side.has_pinned_blocks()
    one.report(job.job_id)
    assert one.num_used_blocks() == 6 and one.side.has_pinned_blocks()
    one.report(job.job_id)
    assert one.num_used_blocks() == 0 and not one.side.has_pinned_blocks()


def test_the_deepest_block_is_reused_first(core: MakeCore) -> None:
    one = core().connected()
    request = make_request("r", tokens(96))
    one.allocate(request, 0)
    (job,) = one.step((request, 96)).stores
    one.finish(request)
    one.report(job.job_id)
    assert [block.block_id for block in one.pool.get_new_blocks(6)] == list(reversed(job.block_ids))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_report_too_many_is_a_broken_invariant(ranks: int, core: MakeCore) -> None:
    one = core().connected()
    request = make_request("r", tokens(100))
    one.allocate(request, 0)
    (job,) = one.step((request, 100)).stores
    with pytest.raises(AssertionError, match="reported by too many ranks"):
        one.report(job.job_id, ranks=ranks)


def test_blocks_that_are_freed_by_preemption_while_they_are_sent_are_not_reused(core: MakeCore) -> None:
    one = core().connected()
    request = make_request("r", tokens(100))
    one.allocate(request, 0)
    (job,) = one.step((request, 100)).stores
    one.free(request)
    others = one.pool.get_new_blocks(one.pool.get_num_free_blocks())
    assert not {block.block_id for block in others} & set(job.block_ids)
    one.pool.free_blocks(others)
    one.report(job.job_id)
    assert one.num_used_blocks() == 0


def test_a_resumed_request_stores_from_its_new_blocks(core: MakeCore) -> None:
    one = core().connected()
    request = make_request("r", tokens(100))
    before = one.allocate(request, 0)
    (first,) = one.step((request, 50)).stores
    one.free(request)
    after = one.allocate(request, 0)
    assert not set(after) & set(first.block_ids), "the pinned ones are still taken"
    one.step((request, 50))
    (second,) = one.step((request, 50)).stores
    assert second.block_ids == after[3:6] and not set(second.block_ids) & set(before[3:6]) - set(after)
    assert list(second.run.block_hashes) == request.block_hashes[3:6]
    one.report(first.job_id, second.job_id)


def test_no_more_blocks_are_pinned_than_allowed(core: MakeCore) -> None:
    one = core(max_pinned_fraction=0.25).connected()  # 16 of 64 blocks.
    first, second = (make_request(name, tokens(192, name)) for name in "ab")
    for request in (first, second):
        one.allocate(request, 0)
    jobs = one.step((first, 192), (second, 192)).stores
    assert [len(job.run) for job in jobs] == [12, 4]
    assert one.side._num_pinned == 16
    assert one.step((first, 0), (second, 0)).stores == []
    assert one.side.stats().data["store_deferred"] == 2
    one.report(jobs[0].job_id)
    (rest,) = one.step((second, 0)).stores
    assert list(rest.run.block_hashes) == second.block_hashes[4:12]
    one.report(jobs[1].job_id, rest.job_id)
    assert one.side._num_pinned == 0


def test_a_prompt_longer_than_what_may_be_pinned_is_stored_bit_by_bit(core: MakeCore) -> None:
    one = core(max_pinned_fraction=0.05).connected()  # Three blocks.
    request = make_request("r", tokens(200))
    one.allocate(request, 0)
    stored: list[bytes] = []
    job_ids = []
    for count in (200, 0, 0, 0, 0):
        for job in one.step((request, count)).stores:
            stored.extend(job.run.block_hashes)
            job_ids.append(job.job_id)
            one.report(job.job_id)
    assert stored == request.block_hashes[:12]
    assert len(job_ids) == 4


# End


def test_reset_empties_the_namespace_and_ends_what_was_found(alone: Core) -> None:
    one = alone
    request = make_request("r", tokens(100))
    fill(one, request.block_hashes)
    assert one.ask(request) == blocks(6)
    assert one.side.reset() is True
    wait_for_leases(one, 0)
    assert one.ask(request) == 0


def test_reset_without_a_pool_says_that_it_failed(core: MakeCore) -> None:
    assert core(endpoint=free_endpoint()).side.reset() is False


def test_reset_leaves_other_namespaces_alone(core: MakeCore) -> None:
    one, other = core().connected(), core().connected()
    request = make_request("r", tokens(100))
    fill(other, request.block_hashes)
    assert one.side.reset() is True
    assert other.ask(request) == blocks(6)


def test_shutting_down_with_lookups_under_way_is_quiet(
    core: MakeCore, pool_server: StartServer, capfd: pytest.CaptureFixture[str]
) -> None:
    server = pool_server()
    one = core(endpoint=server.endpoint).connected()
    with stopped(server):
        request = make_request("r", tokens(100))
        assert one.side.matched_tokens(request, 0) == (None, False)
        one.side.request_finished(request)
        one.side.shutdown()
        one.side.shutdown()
    time.sleep(0.1)
    assert "Traceback" not in capfd.readouterr().err


def test_a_load_job_survives_the_way_to_a_worker(core: MakeCore) -> None:
    one = core().connected()
    request = make_request("r", tokens(100))
    fill(one, request.block_hashes)
    one.allocate(request, one.ask(request))
    (job,) = one.step().loads
    assert isinstance(job, LoadJob) and type(job.run.block_hashes) is list
