"""The scheduler's side alone, asked as vLLM asks it: real requests, a real block pool, a real server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from kvpool.protocol.types import BlockRun
from kvpool.security.name_key import NameKey
from tests.conftest import StartServer
from tests.support.held import held_by
from tests.support.kept_server import KeptServer
from tests.support.processes import wait_for
from tests.support.toy.fixtures import BLOCK_TOKENS
from tests.support.vllm_objects import full_attention, make_request, tokens
from tests.vllm_plugin.core import NUM_BLOCKS, Core, MakeCore, blocks, fill, stored, wait_for_leases
from tests.vllm_plugin.kinds import kv_cache, state, window
from tests.vllm_plugin.tier import Tier
from vllm_plugin.metadata import GroupBlocks, Handshake, LoadJob, StoreJob
from vllm_plugin.scheduler import lookups
from vllm_plugin.scheduler.load_policy import Stage
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


def test_an_own_hit_that_shrinks_is_looked_up_anew(alone: Core) -> None:
    request, other = make_request("r", tokens(100)), make_request("other", tokens(100, "other"))
    fill(alone, request.block_hashes[:5])
    fill(alone, other.block_hashes[3:5])
    assert alone.ask(request, computed=blocks(3)) == blocks(2)
    assert alone.ask(request, computed=blocks(1)) == blocks(4)
    wait_for_leases(alone, 1)  # The first lookup's lease is given back.
    assert alone.ask(other, computed=blocks(3)) == blocks(2)
    assert alone.ask(other, computed=blocks(1)) == 0, "nobody has seen blocks 1 and 2 of it"


# What may wait, and which part of a hit is loaded


@pytest.fixture
def one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "MAX_WALKS_S", 0.0)
    monkeypatch.setattr(lookups, "MAX_LOOKUP_WALKS_S", 0.0)


@pytest.mark.usefixtures("one_waits")
def test_beyond_the_bound_a_request_is_computed_instead_of_waiting_for_its_lookup(alone: Core) -> None:
    Tier(alone.side.stages.sessions[0], up=6, coming=0).is_slow = True
    first, second = (make_request(name, tokens(100, name)) for name in "ab")
    assert alone.side.matched_tokens(first, 0) == (None, False)
    assert alone.side.matched_tokens(second, 0) == (0, False)
    alone.step()
    assert alone.side.matched_tokens(second, 0) == (None, False), "it was not admitted, and may wait now"


@pytest.mark.usefixtures("one_waits")
def test_beyond_the_bound_a_request_is_computed_instead_of_waiting_for_room(alone: Core) -> None:
    large, second, third = (make_request(name, tokens(800, name)) for name in "abc")
    for request in (large, second, third):
        fill(alone, request.block_hashes)
        assert alone.ask(request) == blocks(49)
    alone.allocate(large, blocks(49))
    alone.step()
    assert alone.side.matched_tokens(second, 0) == (None, False)
    assert alone.side.matched_tokens(third, 0) == (0, False)


def test_a_hit_is_cut_where_the_policy_says_and_the_rest_is_declined(core: MakeCore) -> None:
    one = core(transport="tcp").connected()
    request = stored(one)
    one.side.loads.verdict = lambda request_id, start, stop: stop - start - blocks(2) - 3
    assert one.ask(request) == blocks(3), "a cut lies at a boundary"
    one.allocate(request, blocks(3))
    assert one.side.queue.tokens == {Stage.WAITING: 0, Stage.LOADING: 100 - blocks(3), Stage.RUNNING: 0}
    assert sum(map(len, one.step().loads[0].groups)) == 3
    one.finish(request)


# Store


@pytest.mark.parametrize(("store_decoded", "expected"), [(True, 1), (False, 0)])
def test_decoded_blocks_are_stored_only_if_that_is_wanted(store_decoded: bool, expected: int, core: MakeCore) -> None:
    one = core(store_decoded=store_decoded).connected()
    request = make_request("r", tokens(60))
    one.allocate(request, 0, num_blocks=12)
    assert len(one.step((request, 60)).stores) == 1
    request.append_output_token_ids(list(range(117)))
    assert len(one.step((request, 116)).stores) == expected


# Several groups


def window_cache(**fields: Any) -> KVCacheConfig:
    """One group of full attention, and two with a window of 40 tokens, which are one to the pool."""
    return kv_cache(full_attention(), window(40), window(40), num_blocks=NUM_BLOCKS, **fields)


def fill_all(core: Core, request: Request, *groups: Sequence[int], stage: int = 0) -> None:
    """Puts blocks of every group of the pool, by index, into the pool."""
    for group, indices in enumerate(groups):
        if indices:
            fill(core, [request.block_hashes[idx] for idx in indices], group, stage)


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


def test_a_lease_of_one_stage_alone_is_no_hit_and_ends(staged: Core) -> None:
    request = make_request("r", tokens(100))
    fill(staged, request.block_hashes, stage=0)
    assert staged.ask(request) == 0
    staged.allocate(request, 0)
    staged.step()
    wait_for_leases(staged, 0)
    other = stored(staged, "other")
    assert staged.ask(other) == blocks(6)
    wait_for_leases(staged, 2)
    staged.allocate(other, 0)  # Another connector loads the hit.
    staged.step()
    wait_for_leases(staged, 0)
    staged.finish(other)


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
)
def test_where_ranks_disagree_at_the_start_nothing_is_shared(
    told: dict[tuple[int, int], str], message: str, core: MakeCore, caplog: pytest.LogCaptureFixture
) -> None:
    one = core(stages=2)
    spec = core().side.stages.specs[0]
    given = {rank: Handshake(replace(spec, weights_digest=digest)) for rank, digest in told.items()}
    one.side.stages.handshake(given)
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert message in record.getMessage() and "the same model files" in record.getMessage()
    assert_shares_nothing(one)
    assert one.counted()["namespaces_disagree"] == 1


def test_another_connectors_handshake_leaves_the_pool_alone(core: MakeCore, caplog: pytest.LogCaptureFixture) -> None:
    one = core(stages=2)
    one.side.stages.handshake({(0, 0): object(), (1, 0): object()})
    assert "the handshake of another connector" in caplog.text
    assert_shares_nothing(one)


def test_what_workers_tell_takes_the_place_of_what_was_worked_out(one: Core) -> None:
    before = one.side.stages.sessions[0]
    one.side.stages.handshake({(0, 0): object()})  # Another connector's.
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


def test_an_answer_whose_lease_was_refused_is_a_miss(one: Core) -> None:
    client, request = one.side.stages.sessions[0].client, make_request("r", tokens(100))
    fill(one, request.block_hashes)
    sent = client.rpc.lookup_async
    client.rpc.lookup_async = lambda *arguments, **options: sent(*arguments, **options, lease=False)  # type: ignore[method-assign]
    assert one.ask(request) == 0


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
