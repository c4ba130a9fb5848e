"""Beside a connector whose loads fail, under vLLM's MultiConnector and its real scheduler: nothing wrong is stored.

An engine that shares the pool checks every byte that it reads; see `tests/support/toy/engine.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.support.processes import wait_for
from tests.support.toy.cache import Wrong
from tests.support.toy.engine import Rank, ToyEngine
from tests.support.toy.fixtures import BLOCK_TOKENS
from tests.support.toy.fleet import Fleet
from tests.support.toy.model import Chunk, answer
from tests.support.vllm_objects import make_request, tokens
from tests.vllm_plugin.core import MakeCore
from vllm_plugin.connector import KVPoolConnector
from vllm_plugin.scheduler.peer_loads import PeerLoads
from vllm_plugin.scheduler.scheduler import KVPoolScheduler
from vllm_plugin.worker.worker import KVPoolWorker

pytestmark = pytest.mark.usefixtures("answered_at_once")

PROMPT = 100
PROMISED = 96
MASK = (1 << 64) - 1


class BesidePeer(ToyEngine):
    """An engine whose attention may read what the peer has spoiled: vLLM lets it, and throws the answer away."""

    def __init__(self, *args: Any, **options: Any):
        self.num_wrong_reads = self.num_submitted = self.num_stored = self.num_loaded_blocks = 0
        self.peer_loads_well = False
        super().__init__(*args, wait=False, **options)
        self.wait_until_connected()

        for worker in self._workers():
            self._count_stores(worker.sender)

    @property
    def connector(self) -> KVPoolScheduler:
        (ours,) = (each for each in self.scheduler.connector._connectors if isinstance(each, KVPoolConnector))
        return ours.scheduler_side

    def wait_until_connected(self) -> None:
        sessions = [*self.connector.stages.sessions, *(worker.session for worker in self._workers())]
        wait_for(lambda: all(session.namespace for session in sessions), "connections to the pool")

    def _workers(self) -> list[KVPoolWorker]:
        connectors = [each for rank in self.ranks for each in rank.connector._connectors]  # type: ignore[attr-defined]
        return [each.worker_side for each in connectors if isinstance(each, KVPoolConnector)]

    def _count_stores(self, sender: Any) -> None:
        submit, transfer = sender.submit, sender._transfer

        def counted_submit(job: Any) -> None:
            self.num_submitted += 1
            submit(job)

        def counted_transfer(job: Any, mark: Any) -> bool:
            try:
                return bool(transfer(job, mark))
            finally:
                self.num_stored += 1

        sender.submit, sender._transfer = counted_submit, counted_transfer

    def _update(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """What a step stores is stored before the next one computes anything again: the worst case."""
        wait_for(lambda: self.num_stored == self.num_submitted, "the stores of the step")
        super()._update(scheduled, output)

    def run_rank(self, rank: Rank, scheduled: SchedulerOutput, metadata: Any, chunks: Mapping[str, Chunk]) -> Any:
        if scheduled.has_sync_kv_loads and self.peer_loads_well:
            for chunk in chunks.values():
                rank.cache.write(chunk.tables, chunk.model.hashes, 0, chunk.start)
        return super().run_rank(rank, scheduled, metadata, chunks)

    def forward(self, rank: Rank, request_id: str, chunk: Chunk) -> None:
        """What is computed from wrong KV is wrong itself."""
        before = self.num_wrong_reads
        super().forward(rank, request_id, chunk)
        if self.num_wrong_reads > before:
            spoiled = [~each & MASK for each in chunk.hashes()]
            rank.cache.write(chunk.tables, spoiled, chunk.first(), chunk.first() + chunk.count)

    def found_wrong(self, rank: Rank, request_id: str, wrong: Wrong) -> None:
        self.num_wrong_reads += 1

    def _sample(self, chunk: Chunk) -> list[int]:
        model, stop = chunk.model, chunk.first() + chunk.count
        (request_id,) = (name for name, each in self.sequences.items() if each is model)
        request = self.scheduler.requests.get(request_id)
        if request is not None and request.num_tokens <= stop < len(model.tokens):
            return [model.tokens[stop]]  # Again: the first answer was thrown away.
        return super()._sample(chunk)

    def count_stats(self, stats: dict[str, Any]) -> None:
        ours = stats.get("KVPoolConnector", {})
        self.num_loaded_blocks += ours.get("data", ours).get("loaded_blocks", 0)


def beside_peer(
    fleet: Fleet,
    mode: str = "sync",
    good: int = 0,
    steps_ahead: int = 0,
    policy: str = "recompute",
    options: dict[str, Any] | None = None,
    **extra: Any,
) -> BesidePeer:
    """An engine of the fleet with a peer that promises `PROMISED` tokens of one prompt."""
    plain = fleet.config(extra=extra, **(options or {}))
    plain.kv_transfer_config.kv_load_failure_policy = policy
    ours = {
        "kv_connector": "KVPoolConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": plain.kv_transfer_config.kv_connector_extra_config,
    }
    peer = {
        "kv_connector": "FailingPeer",
        "kv_connector_module_path": "tests.support.failing_peer",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tokens": PROMISED, "mode": mode, "good": good},
    }
    plain.kv_transfer_config.kv_connector = "MultiConnector"
    plain.kv_transfer_config.kv_connector_module_path = None
    plain.kv_transfer_config.kv_connector_extra_config = {"connectors": [peer, ours]}
    return fleet.make(plain, kind=BesidePeer, steps_ahead=steps_ahead)


def assert_reads_right(fleet: Fleet, *prompts: list[int]) -> list[int]:
    """Another engine reads nothing wrong: it would fail in its step. Returns how many tokens it loads of each."""
    reader = fleet.start()
    cached = []
    for prompt in prompts:
        assert reader.generate(prompt) == [answer(prompt, 8)]
        cached.append(reader.cached_tokens.pop("prompt-0"))
    return cached


@pytest.mark.parametrize("good", [0, 3])
def test_what_a_failed_synchronous_load_left_is_not_stored(good: int, fleet: Fleet) -> None:
    engine, prompt = beside_peer(fleet, good=good), tokens(PROMPT)
    engine.peer_loads_well = True  # As far as it is good.
    assert engine.generate(prompt) == [answer(prompt, 8)]
    assert engine.num_wrong_reads > 0, "the peer has spoiled nothing"
    assert_reads_right(fleet, prompt)
    assert not any(engine.connector.held().values()) and engine.num_used_blocks() == 0


def test_a_request_that_ends_in_the_step_of_the_load_stores_nothing_wrong(fleet: Fleet) -> None:
    engine, prompt = beside_peer(fleet), tokens(PROMPT)
    engine.generate(prompt, max_tokens=1)
    assert engine.num_wrong_reads > 0
    assert_reads_right(fleet, prompt)
    assert not any(engine.connector.held().values()) and engine.num_used_blocks() == 0


def test_requests_that_share_the_blocks_of_a_failed_load_store_nothing_wrong(fleet: Fleet) -> None:
    """The second one finds in the engine's own cache what the first one loads in the same step."""
    engine, prompt = beside_peer(fleet), tokens(PROMPT)
    prompts = [prompt, prompt[:PROMISED] + tokens(40, "on"), tokens(PROMPT, "of its own")]
    assert engine.generate(*prompts) == [answer(each, 8) for each in prompts]
    assert engine.cached_tokens["prompt-1"] == PROMISED, "the second request shares nothing"
    # Nor does one that comes while the first is still computed again, step by step.
    assert_reads_right(fleet, *prompts)
    # The engine is none the worse for it: what it computes from now on is stored.
    assert engine.generate(*prompts) == [answer(each, 8) for each in prompts]
    assert assert_reads_right(fleet, *prompts) == [96, 128, 96]


def test_blocks_that_are_computed_again_bit_by_bit_are_read_by_no_later_request(fleet: Fleet) -> None:
    engine, prompt = beside_peer(fleet, options={"long_prefill_token_threshold": 16}), tokens(PROMPT)
    engine.add("first", prompt)
    wait_for(engine.step, "the step of the load")
    wrong = engine.num_wrong_reads
    assert wrong > 0
    engine.add("second", prompt)
    engine.run()
    assert engine.num_wrong_reads == wrong, "the second request has read what was not computed yet"
    assert engine.answers == {"first": answer(prompt, 8), "second": answer(prompt, 8)}
    assert_reads_right(fleet, prompt)


def test_a_load_that_fails_the_request_stores_nothing_wrong(fleet: Fleet) -> None:
    engine, prompt = beside_peer(fleet, policy="fail"), tokens(PROMPT)
    engine.generate(prompt)
    assert engine.answers["prompt-0"] == [] and engine.num_wrong_reads > 0
    assert_reads_right(fleet, prompt)
    assert not any(engine.connector.held().values()) and engine.num_used_blocks() == 0


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_is_not_known_to_have_failed_when_the_next_step_is_scheduled_is_not_stored(
    mode: str, fleet: Fleet
) -> None:
    engine, prompt = beside_peer(fleet, mode, steps_ahead=1), tokens(PROMPT)
    prompts = [prompt, prompt[:PROMISED] + tokens(40, "on")]
    # vLLM's own answer is not right here: it keeps the token of the step that was under way.
    engine.generate(*prompts)
    assert (engine.num_wrong_reads > 0) == (mode == "sync")
    assert_reads_right(fleet, *prompts)
    engine.generate(*prompts)
    assert assert_reads_right(fleet, *prompts)[0] == 96


@pytest.mark.parametrize("mode", ["async", "async by request"])
def test_a_failed_asynchronous_load_is_computed_and_stored(mode: str, fleet: Fleet) -> None:
    engine, prompt = beside_peer(fleet, mode), tokens(PROMPT)
    assert engine.generate(prompt) == [answer(prompt, 8)]
    assert engine.num_wrong_reads == 0
    assert assert_reads_right(fleet, prompt) == [96]


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_what_a_peer_has_loaded_well_is_stored_one_step_later(max_tokens: int, fleet: Fleet) -> None:
    """Also where its request ends in the step of the load."""
    engine, prompt = beside_peer(fleet, good=6), tokens(PROMPT)
    engine.peer_loads_well = True
    assert engine.generate(prompt, max_tokens=max_tokens) == [answer(prompt, max_tokens)]
    assert engine.num_wrong_reads == 0 and engine.cached_tokens["prompt-0"] == PROMISED
    assert assert_reads_right(fleet, prompt) == [96]
    assert not any(engine.connector.held().values()) and engine.num_used_blocks() == 0


def test_a_request_that_is_aborted_while_its_load_is_under_way_leaves_nothing_wrong(fleet: Fleet) -> None:
    engine, prompt = beside_peer(fleet, steps_ahead=1), tokens(PROMISED + 64)
    engine.add("aborted", prompt)
    wait_for(engine.step, "the step of the load")
    engine.abort("aborted")
    engine.run()
    wrong = engine.num_wrong_reads
    # What was computed from invalid blocks must not follow what is computed again.
    for _ in range(2):
        assert engine.generate(prompt) == [answer(prompt, 8)]
        assert engine.num_wrong_reads == wrong
    assert_reads_right(fleet, prompt)


# What a step costs


def test_a_step_after_a_failed_load_looks_at_new_blocks_alone(core: MakeCore) -> None:
    """Not at all blocks of all requests that store nothing since."""
    one = core().connected()
    loads, pool, requests = PeerLoads(one.side.stores, one.side.jobs), one.pool, []
    loads.bind(pool)
    for nth in range(4):
        request = make_request(f"{nth}", tokens(12 * BLOCK_TOKENS, nth))
        one.allocate(request, 0, num_blocks=10)
        (table,) = one.tables[request.request_id]
        pool.cache_full_blocks(request, table, 0, 10, BLOCK_TOKENS, 0)
        request.status = RequestStatus.RUNNING
        requests.append(request)
    resolved: list[str] = []

    def step(new: dict[str, list[int]] | None = None, sync: bool = False) -> int:
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = {request.request_id: 1 for request in requests}
        output.has_sync_kv_loads = sync
        cached = output.scheduled_cached_reqs
        for request in requests:
            cached.req_ids.append(request.request_id)
            ids = (new or {}).get(request.request_id)
            cached.new_block_ids.append((ids,) if ids else None)

        def resolve(name: str) -> tuple[list[int], ...]:
            resolved.append(name)
            return ([block.block_id for block in one.tables[name][0]],)

        output.kv_connector_block_state = KVConnectorBlockState(set(output.num_scheduled_tokens), resolve, {})
        return loads.prepare(output)

    def num_cached() -> int:
        return sum(block.block_hash is not None for (table,) in one.tables.values() for block in table)

    number = step(sync=True)
    loads.update({number}, {one.ids(request)[2] for request in requests})
    assert num_cached() == 4 * 2, "all blocks from the first invalid one on are evicted"
    resolved.clear()
    evicted: list[int] = []
    evict = pool.evict_blocks
    pool.evict_blocks = lambda ids: (evicted.extend(ids), evict(ids))[1]  # type: ignore[method-assign]
    new = pool.get_new_blocks(1)
    one.tables["0"][0].extend(new)
    step({"0": [new[0].block_id]})
    assert (resolved, evicted) == ([], [])
    pool.cache_full_blocks(requests[0], one.tables["0"][0], 10, 11, BLOCK_TOKENS, 0)  # It is full, two steps later.
    step()
    assert (resolved, evicted) == ([], [new[0].block_id])
    assert num_cached() == 4 * 2


@pytest.mark.parametrize("shares", [True, False])
def test_a_request_that_found_an_invalid_block_before_it_waited_stores_nothing(shares: bool, core: MakeCore) -> None:
    """It had found the block in the engine's own cache, and did not run when the load was found to have failed."""
    one = core().connected()
    loads, pool = PeerLoads(one.side.stores, one.side.jobs), one.pool
    loads.bind(pool)
    first, late = (make_request(name, tokens(8 * BLOCK_TOKENS, "one prompt")) for name in ("first", "late"))
    one.allocate(first, 0)
    (table,) = one.tables["first"]
    pool.cache_full_blocks(first, table, 0, 8, BLOCK_TOKENS, 0)
    first.status = RequestStatus.RUNNING
    if shares:
        pool.touch(table[:6])
    one.tables["late"] = [[*(table[:6] if shares else pool.get_new_blocks(6)), *pool.get_new_blocks(2)]]
    one.side.stores.track(late)
    late.status = RequestStatus.WAITING_FOR_REMOTE_KVS

    def step(*requests: Request, sync: bool = False) -> int:
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = {request.request_id: 1 for request in requests}
        output.has_sync_kv_loads = sync
        output.kv_connector_block_state = KVConnectorBlockState(
            set(output.num_scheduled_tokens), lambda name: (one.ids(one.side.stores.tracked[name].request),), {}
        )
        return loads.prepare(output)

    number = step(first, sync=True)
    loads.update({number}, {table[4].block_id})
    assert not one.side.stores.tracked["first"].may_store
    late.status = RequestStatus.RUNNING
    loads.admitted("late")
    step(first, late)
    assert one.side.stores.tracked["late"].may_store is not shares
