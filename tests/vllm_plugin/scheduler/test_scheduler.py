"""The scheduler's side alone, asked as vLLM asks it: real requests, a real block pool, a real server."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvpool.protocol.types import BlockRun
from kvpool.security.name_key import NameKey
from testbed.ports import free_endpoint
from tests.conftest import StartServer
from tests.support.faults import stopped
from tests.support.held import held_by
from tests.support.kept_server import KeptServer
from tests.support.processes import wait_for
from tests.support.toy.fixtures import BLOCK_TOKENS, MakeConfig
from tests.support.vllm_objects import cache_config, full_attention, make_request, tokens
from tests.vllm_plugin.core import NUM_BLOCKS, Core, MakeCore, blocks, fill, num_leases, stored, wait_for_leases
from tests.vllm_plugin.kinds import kv_cache, state, window
from vllm_plugin.breaker import FAILURES_TO_OPEN
from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metadata import GroupBlocks, Handshake, LoadJob, StoreJob, WorkerMetadata
from vllm_plugin.model.identity import namespace_spec
from vllm_plugin.scheduler.pool_contents import Events


def run_in(job: LoadJob | StoreJob) -> BlockRun:
    """The blocks of a job that has one run of them."""
    ((run,),) = [part.runs for part in job.groups]
    return run


def ids_in(job: LoadJob | StoreJob) -> list[int]:
    """Where they are."""
    ((row,),) = [part.block_ids for part in job.groups]
    return row


def names_in(part: GroupBlocks) -> list[bytes]:
    return [name for run in part.runs for name in run.block_hashes]


# Lookup


def test_asking_again_costs_no_lookup_and_no_second_lease(alone: Core) -> None:
    request = stored(alone)
    assert {alone.ask(request) for _ in range(20)} == {blocks(6)}
    assert num_leases(alone) == 1
    assert alone.counted()["lookups"] == 1


def test_an_own_hit_that_shrinks_is_looked_up_anew(alone: Core) -> None:
    request, other = make_request("r", tokens(100)), make_request("other", tokens(100, "other"))
    fill(alone, request.block_hashes[:5])
    fill(alone, other.block_hashes[3:5])
    assert alone.ask(request, computed=blocks(3)) == blocks(2)
    assert alone.ask(request, computed=blocks(1)) == blocks(4)
    wait_for_leases(alone, 1)  # The first lookup's lease is given back.
    assert alone.ask(other, computed=blocks(3)) == blocks(2)
    assert alone.ask(other, computed=blocks(1)) == 0, "nobody has seen blocks 1 and 2 of it"


def test_a_request_that_wants_no_cached_prefix_gets_none(one: Core) -> None:
    request = make_request("r", tokens(100), prompt_logprobs=1)
    assert request.skip_reading_prefix_cache
    fill(one, request.block_hashes)
    assert one.side.matched_tokens(request, 0) == (0, False)


def test_a_lookup_that_failed_is_not_repeated_for_the_same_request(core: MakeCore, pool_server: StartServer) -> None:
    server = pool_server()
    one = core(endpoint=server.endpoint, lookup_timeout_ms=100).connected()
    request = stored(one)
    with stopped(server):
        assert one.ask(request) == 0
    assert {one.ask(request) for _ in range(10)} == {0}
    names = (f"another {nth}" for nth in itertools.count())  # A busy machine may be too slow for the first of them.
    wait_for(lambda: one.ask(make_request(next(names), tokens(100, "r"))) == blocks(6), "another request's hit")


def test_an_answer_whose_lease_was_refused_is_a_miss(one: Core) -> None:
    client, request = one.side.stages.sessions[0].client, make_request("r", tokens(100))
    fill(one, request.block_hashes)
    sent = client.rpc.lookup_async
    client.rpc.lookup_async = lambda *arguments, **options: sent(*arguments, **options, lease=False)  # type: ignore[method-assign]
    assert one.ask(request) == 0


def test_an_answer_that_is_too_old_for_its_lease_is_asked_for_anew(core: MakeCore) -> None:
    one = core(load_timeout_ms=1_000).connected()  # Leases of 2 s, good to begin a load for 1 s.
    request = stored(one)
    assert one.ask(request) == blocks(6)
    time.sleep(1.1)
    assert one.ask(request) == blocks(6)
    assert one.counted()["lookups"] == 2


# Load


@pytest.mark.parametrize(("is_unserved", "expected"), [(True, False), (False, True)])
def test_loads_that_the_pool_does_not_serve_open_the_breaker(is_unserved: bool, expected: bool, one: Core) -> None:
    for nth in range(FAILURES_TO_OPEN):
        assert one.side.stages.are_open
        request = stored(one, f"r{nth}")
        one.allocate(request, one.ask(request))
        one.step()
        name = request.request_id
        # Of two ranks one has loaded the hit: vLLM reports the load when both have ended.
        served = WorkerMetadata(load_seconds={name: 0.1})
        told = WorkerMetadata(load_seconds={name: 0.2}, unserved_loads={name} if is_unserved else set())
        one.side.update(KVConnectorOutput(kv_connector_worker_meta=told.aggregate(served)))
        one.report(finished_recving={name}, failed_recving={name})
    assert one.side.stages.are_open is expected


def test_a_load_that_succeeds_ends_the_row_of_failures(one: Core) -> None:
    for nth in range(2 * FAILURES_TO_OPEN - 1):
        request = stored(one, f"r{nth}")
        one.allocate(request, one.ask(request))
        one.step()
        failed = {request.request_id} if nth != FAILURES_TO_OPEN - 1 else set()
        told = WorkerMetadata(load_seconds={request.request_id: 0.1}, unserved_loads=failed)
        one.side.update(
            KVConnectorOutput(
                kv_connector_worker_meta=told, finished_recving={request.request_id}, failed_recving=failed
            )
        )
    assert one.side.stages.are_open


# Store


@pytest.mark.parametrize(("store_decoded", "expected"), [(True, 1), (False, 0)])
def test_decoded_blocks_are_stored_only_if_that_is_wanted(store_decoded: bool, expected: int, core: MakeCore) -> None:
    one = core(store_decoded=store_decoded).connected()
    request = make_request("r", tokens(60))
    one.allocate(request, 0, num_blocks=12)
    assert len(one.step((request, 60)).stores) == 1
    request.append_output_token_ids(list(range(117)))
    assert len(one.step((request, 116)).stores) == expected


def test_a_store_that_found_no_pool_is_made_up_for(core: MakeCore, pool_server: StartServer) -> None:
    endpoint = free_endpoint()
    one = core(endpoint=endpoint)
    request = make_request("r", tokens(100))
    one.allocate(request, 0)
    assert one.step((request, 50)).stores == []
    assert not one.side.has_pinned_blocks()
    pool_server("--listen", endpoint)
    wait_for(lambda: one.side.stages.sessions[0].namespace, "the session to be open")
    (job,) = one.step((request, 50)).stores
    assert list(run_in(job).block_hashes) == request.block_hashes[:6]


# Pins


def test_the_deepest_block_is_reused_first(one: Core) -> None:
    request = make_request("r", tokens(96))
    (job,) = one.compute(request)
    one.finish(request)
    one.report(job.job_id)
    assert [block.block_id for block in one.pool.get_new_blocks(6)] == list(reversed(ids_in(job)))


def test_requests_that_hold_their_blocks_store_them_whatever_is_pinned(core: MakeCore) -> None:
    one = core(max_pinned_fraction=0.25).connected()  # 16 of 64 blocks.
    first, second = (make_request(name, tokens(192, name)) for name in "ab")
    for request in (first, second):
        one.allocate(request, 0)
    jobs = one.step((first, 192), (second, 192)).stores
    assert [len(run_in(job)) for job in jobs] == [12, 12]
    assert held_by(one.side)["pinned blocks"] == 24


def test_no_store_begins_while_others_outlive_their_requests_in_too_many_blocks(core: MakeCore) -> None:
    one = core(max_pinned_fraction=0.25).connected()  # 16 of 64 blocks.
    first, second, third = (make_request(name, tokens(192, name)) for name in "abc")
    for request in (first, second, third):
        one.allocate(request, 0)
    jobs = one.step((first, 192), (second, 192)).stores
    one.finish(first)
    one.finish(second)
    assert one.step((third, 192)).stores == []
    assert one.counted()["deferred_stores"] == 1
    one.report(jobs[0].job_id)
    (part,) = one.step((third, 0)).stores
    assert list(run_in(part).block_hashes) == third.block_hashes[:4]
    one.report(jobs[1].job_id)
    (rest,) = one.step((third, 0)).stores
    assert list(run_in(rest).block_hashes) == third.block_hashes[4:12]
    one.report(part.job_id, rest.job_id)
    assert held_by(one.side)["pinned blocks"] == 0


def test_a_prompt_longer_than_what_may_be_pinned_is_stored_bit_by_bit(core: MakeCore) -> None:
    one = core(max_pinned_fraction=0.05).connected()  # Three blocks.
    request = make_request("r", tokens(200))
    one.allocate(request, 0)
    stored: list[bytes] = []
    job_ids = []
    for count in (200, 0, 0, 0, 0):
        for job in one.step((request, count)).stores:
            stored.extend(run_in(job).block_hashes)
            job_ids.append(job.job_id)
            one.report(job.job_id)
    assert stored == request.block_hashes[:12]
    assert len(job_ids) == 4


# End


def test_a_reset_while_blocks_are_in_use_shares_nothing_until_one_succeeds(core: MakeCore) -> None:
    """vLLM asks for one even where it could not reset its own cache: what is in use is of the old weights."""
    one = core(weights_epoch="7").connected()
    request = make_request("r", tokens(100))
    one.allocate(request, 0)
    first = one.step((request, 32))
    assert one.side.reset() is False
    one.connected()
    assert one.step((request, 64)).stores == []
    one.report(*(job.job_id for job in first.stores))
    other = make_request("s", tokens(100))
    assert one.side.matched_tokens(other, 0) == (0, False)
    one.finish(request)
    assert one.side.reset() is True
    one.weights = b"2"
    one.allocate(other, 0)
    assert one.step((other, 48)).stores == [], "stored before the ranks have told their weights"
    one.connected()
    later = one.step((other, 52))
    assert [len(run_in(job).block_hashes) for job in later.stores] == [6]
    epochs = {first.weights_epoch, later.weights_epoch, *(job.weights_epoch for job in later.stores)}
    assert first.weights_epoch == "7" and len(epochs) == 2


def test_a_reset_works_without_a_pool(core: MakeCore) -> None:
    assert core(endpoint=free_endpoint()).side.reset() is True


def test_shutting_down_with_lookups_under_way_is_quiet(
    core: MakeCore, pool_server: StartServer, capfd: pytest.CaptureFixture[str]
) -> None:
    server = pool_server()
    one = core(endpoint=server.endpoint).connected()
    with stopped(server):
        request = make_request("r", tokens(100))
        assert one.side.matched_tokens(request, 0) == (None, False)
        one.side.request_finished(request, [[]])
        one.side.shutdown()
        one.side.shutdown()
    time.sleep(0.1)
    assert "Traceback" not in capfd.readouterr().err


# Several groups


def window_cache(**fields: Any) -> KVCacheConfig:
    """One group of full attention, and two with a window of 40 tokens, which are one to the pool."""
    return kv_cache(full_attention(), window(40), window(40), num_blocks=NUM_BLOCKS, **fields)


def fill_all(core: Core, request: Request, *groups: Sequence[int], stage: int = 0) -> None:
    """Puts blocks of every group of the pool, by index, into the pool."""
    for group, indices in enumerate(groups):
        if indices:
            fill(core, [request.block_hashes[idx] for idx in indices], group, stage)


def test_the_engines_own_blocks_are_not_loaded_again(core: MakeCore) -> None:
    one = core(cache=window_cache()).connected()
    request = make_request("r", tokens(100))
    fill_all(one, request, range(6), [3, 4, 5])
    assert one.ask(request, computed=blocks(4)) == blocks(2)
    one.allocate(request, blocks(2), skipped=[0, 3, 3])
    (job,) = one.step().loads
    assert [names_in(part) for part in job.groups] == [request.block_hashes[4:6]] * 2
    assert job.groups[1].block_ids == [one.ids(request, group)[4:6] for group in (1, 2)]


def test_a_cut_hit_that_cannot_be_resumed_becomes_a_load_that_fails(core: MakeCore, pool_server: StartServer) -> None:
    one = core(endpoint=pool_server().endpoint, cache=window_cache(), load_timeout_ms=30_000).connected()
    request = make_request("r", tokens(100))
    fill_all(one, request, range(6), [3, 4, 5])
    assert one.ask(request) == blocks(6)
    one.allocate(request, blocks(4), skipped=[0, 1, 1])  # Blocks 1 and 2 of the window are nowhere.
    (job,) = one.step().loads
    assert (job.lease_ids, job.groups) == ((0,), [])
    wait_for_leases(one, 0)
    one.report(finished_recving={"r"}, failed_recving={"r"})
    one.free(request)
    assert one.ask(request) == 0, "computed, and not asked for again"
    one.finish(request)
    assert not any(held_by(one.side).values())


@pytest.mark.parametrize("known", [[2, 3], []])
def test_where_a_prompt_parts_from_what_is_known_its_window_is_stored(known: list[int], core: MakeCore) -> None:
    one = core(cache=window_cache(), max_pinned_fraction=1.0).connected()
    request = make_request("r", tokens(320))
    # Full attention is known up to block 8, windows to block 4 or nowhere.
    fill_all(one, request, range(8), [1, *known] if known else [])
    hit = one.ask(request)
    assert hit == (blocks(4) if known else 0)
    one.allocate(request, hit, skipped=[0, 1, 1] if known else ())
    if known:
        one.step()
        one.report(finished_recving={"r"})
        request.num_computed_tokens = hit
        one.allocate(request, 0)
    (job,) = one.step((request, 320 - hit)).stores
    windows = [
        request.block_hashes.index(name) for part in job.groups if part.group_idx == 1 for name in names_in(part)
    ]
    assert windows == [5, 6, 7, 16, 17, 18, 19]


def test_of_states_only_what_the_engine_hands_over_is_stored(core: MakeCore) -> None:
    cache = kv_cache(full_attention(), state(), state(), num_blocks=NUM_BLOCKS)
    one = core(cache=cache).connected()
    request = make_request("r", tokens(100))
    one.allocate(request, 0)
    handed_over = one.pool.get_new_blocks(7)
    block_ids = [block.block_id for block in handed_over]
    # Group 2 lacks the state at 80; at 90 there is no boundary, and 112 is not computed yet. The step has given the
    # block of group 2's state at 64 to another request.
    one.offers = {"r": [(1, block_ids[0], 48), (2, block_ids[1], 48), (1, block_ids[2], 80), (1, block_ids[3], 90),
                        (2, block_ids[3], 90), (1, block_ids[4], 112), (2, block_ids[4], 112),
                        (1, block_ids[5], 64), (2, block_ids[6], 64)]}  # fmt: skip
    for nth, member, boundary in ((0, 1, 48), (1, 2, 48), (2, 1, 80), (5, 1, 64)):
        name = make_block_hash_with_group_id(request.block_hashes[boundary // BLOCK_TOKENS - 1], member)
        handed_over[nth].set_block_hash(name, num_tokens=boundary)
    (job,) = one.step((request, 100)).stores
    full, states = job.groups
    assert names_in(full) == request.block_hashes[:6]
    assert names_in(states) == request.block_hashes[2:3]
    assert states.runs[0].parent_hash == request.block_hashes[1]
    assert states.block_ids == [[block_ids[0]], [block_ids[1]]]


# Pipeline stages


def test_a_block_is_a_hit_only_if_every_stage_has_it(staged: Core) -> None:
    request = make_request("r", tokens(100))
    fill(staged, request.block_hashes[:5], stage=0)
    fill(staged, request.block_hashes[:3], stage=1)
    assert staged.ask(request) == blocks(3)
    other = make_request("other", tokens(100, "other"))
    fill(staged, other.block_hashes[:2], stage=0)
    fill(staged, other.block_hashes, stage=1)
    assert staged.ask(other) == blocks(2)


def test_the_leases_of_both_stages_end_if_the_hit_is_not_taken(staged: Core) -> None:
    request = stored(staged)
    assert staged.ask(request) == blocks(6)
    wait_for_leases(staged, 2)
    staged.finish(request)
    wait_for_leases(staged, 0)


def test_a_lease_of_one_stage_alone_is_no_hit_and_ends(staged: Core) -> None:
    request = make_request("r", tokens(100))
    fill(staged, request.block_hashes, stage=0)
    assert staged.ask(request) == 0
    staged.allocate(request, 0)
    staged.step()
    wait_for_leases(staged, 0)


def assert_shares_nothing(one: Core) -> None:
    request = make_request("r", tokens(100))
    assert one.side.matched_tokens(request, 0) == (0, False)
    assert one.compute(request) == []


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({(0, 0): "", (0, 1): "other", (1, 0): ""}, "stage 0 name 2 different namespaces"),
        ({(0, 0): "", (0, 1): ""}, "stage 1 name 0 different namespaces"),
    ],
    ids=["two ranks", "no rank"],
)
def test_where_ranks_disagree_at_the_start_nothing_is_shared(
    told: dict[tuple[int, int], str],
    message: str,
    core: MakeCore,
    vllm_config: MakeConfig,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = core(stages=2)
    config = vllm_config()
    config.parallel_config.pipeline_parallel_size = 2
    spec = namespace_spec(config, cache_config(), ConnectorConfig())
    one.side.stages.handshake(
        {ranks: Handshake(replace(spec, weights_digest=digest)) for ranks, digest in told.items()}
    )
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert message in record.getMessage() and "the same model files" in record.getMessage()
    assert_shares_nothing(one)
    assert one.counted()["namespaces_disagree"] == 1


def test_another_connectors_handshake_leaves_the_pool_alone(core: MakeCore, caplog: pytest.LogCaptureFixture) -> None:
    one = core(stages=2)
    one.side.stages.handshake({(0, 0): object(), (1, 0): object()})
    assert "the handshake of another connector" in caplog.text
    assert_shares_nothing(one)


def test_with_one_stage_a_foreign_handshake_changes_nothing(one: Core) -> None:
    one.side.stages.handshake({(0, 0): object()})
    assert one.side.stages.sessions[0].namespace is not None


def test_what_workers_tell_takes_the_place_of_what_was_worked_out(one: Core, vllm_config: MakeConfig) -> None:
    before = one.side.stages.sessions[0]
    spec = replace(before.namespace.spec, revision="as the workers have it") if before.namespace else None
    assert spec is not None
    one.side.stages.handshake({(0, 0): Handshake(spec), (0, 1): Handshake(spec)})
    one.connected()
    (after,) = one.side.stages.sessions
    assert after.namespace is not None and after.namespace.spec == spec
    assert before.namespace is None, "the first connection is closed"


@pytest.mark.parametrize("keys", [("one.key", ""), ("", "two.key"), ("one.key", "two.key")])
def test_beside_another_kvpool_a_handshake_may_be_of_the_others_workers(
    keys: tuple[str, str], core: MakeCore, tmp_path: Path
) -> None:
    """MultiConnector gives every connector the first one's handshake (`get_handshake_metadata`)."""
    one, two = ({"name_key_file": str(tmp_path / each)} if each else {} for each in keys)
    for given in (one, two):
        if given:
            NameKey.create(Path(given["name_key_file"]))
    first = core(salt="first", tenant="one", weights_epoch="old", **one)
    second = core(salt="second", tenant="two", **two)
    wanted = second.side.stages.specs
    second.side.stages.handshake({(0, 0): Handshake(first.side.stages.specs[0])})
    assert second.side.stages.specs == wanted != first.side.stages.specs


def test_a_lookup_that_finds_nothing_takes_back_what_was_announced(one: Core) -> None:
    """It has no lease, and an answer all the same."""
    taken_back: list[tuple[int, list[bytes]]] = []
    one.side.contents.missing = lambda group_idx, names: taken_back.append((group_idx, list(names)))
    request = make_request("gone", tokens(3 * BLOCK_TOKENS + 1, "gone"))
    assert one.ask(request) == 0
    assert taken_back == [(0, request.block_hashes[:3])]


def test_a_restart_that_keeps_the_blocks_takes_back_none_that_was_announced(core: MakeCore, tmp_path: Path) -> None:
    """A hit announces nothing: a router would not hear of the blocks again."""
    with closing(KeptServer(tmp_path)) as server:
        server.connect().close()
        one = core(endpoint=server.endpoint).connected()
        one.side.contents.events = Events(one.side.geometry.groups, enabled=True)
        request = stored(one)
        (job,) = one.compute(request)
        one.report(job.job_id)
        (event,) = one.side.take_events()
        assert isinstance(event, BlockStored) and len(event.block_hashes) == 6
        before = one.side.stages.boot_token
        server.kill_server()
        wait_for(lambda: one.side.stages.boot_token not in (0, before), "the next server")
        assert one.ask(make_request("again", tokens(100, "r"))) == blocks(6)
        assert one.side.take_events() == []
