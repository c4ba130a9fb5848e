"""Loads: which have room, and by which transport's rate hits are judged."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.clock import FakeClock
from tests.vllm_plugin.core import Core, MakeCore, blocks, lose_pool, stored
from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metadata import WorkerMetadata
from vllm_plugin.metrics import Recorder
from vllm_plugin.model.groups import Geometry, PoolGroup
from vllm_plugin.model.kinds import FullAttention
from vllm_plugin.scheduler.load_policy import (
    MIN_LOADS,
    Connection,
    Load,
    LoadPolicy,
    PrefillQueue,
    Stage,
)
from vllm_plugin.scheduler.loads import Loads
from vllm_plugin.scheduler.lookups import RequestLookup

BLOCK = 16
GROUP = PoolGroup(FullAttention(block_tokens=BLOCK), (0,))


def loads(num_blocks: int = 1000, *, declines: bool = True) -> Loads:
    names: Any = SimpleNamespace(are_known=lambda request: False)  # Which blocks are loaded does not matter here.
    geometry = Geometry([GROUP], alignment=BLOCK, names=names, num_blocks=num_blocks, step_tokens=2048)
    spec = SimpleNamespace(groups=[SimpleNamespace(slot_bytes=1)])
    stages: Any = SimpleNamespace(specs=[spec], transport="shm", boot_token=1, weights_epoch="")
    return Loads(
        geometry, stages, ConnectorConfig("127.0.0.1:1", decline_slow_loads=declines), PrefillQueue(), Recorder()
    )


def request(name: str, num_blocks: int) -> Any:
    return SimpleNamespace(request_id=name, num_tokens=num_blocks * BLOCK)


def begin(ledger: Loads, one: Any) -> None:
    lookup = RequestLookup(0, one.num_tokens, [], [], [])
    ledger.begin(one, lookup, [], 0, one.num_tokens)


def test_small_loads_do_not_overtake_a_large_one_for_ever() -> None:
    ledger, large = loads(), request("large", 900)
    small = [request(f"small {nth}", 100) for nth in range(50)]
    assert ledger.has_room(small[0])
    begin(ledger, small[0])
    for nth in range(1, 50):
        admitted = ledger.has_room(large)
        if admitted:
            break
        if ledger.has_room(small[nth]):
            begin(ledger, small[nth])
        ledger.ended(small[nth - 1].request_id, True)
    assert admitted


def test_a_request_that_stops_waiting_for_room_holds_up_no_other() -> None:
    ledger = loads()
    begin(ledger, request("first", 200))
    assert not ledger.has_room(request("large", 900))
    assert not ledger.has_room(request("small", 10))
    ledger.stop_waiting("small")
    assert not ledger.has_room(request("small", 10))
    ledger.stop_waiting("large")
    assert ledger.has_room(request("small", 10))


@pytest.mark.parametrize("declines", [True, False])
def test_where_no_hit_is_declined_computing_is_never_sooner(declines: bool) -> None:
    ledger = loads(declines=declines)
    for _ in range(MIN_LOADS):
        ledger.policy.step_began(1_000, 0)
        ledger.policy.step_ended()
    assert math.isinf(ledger.compute_seconds(1_000)) != declines


def taught(connection: Connection) -> LoadPolicy:
    """A policy that knows how fast the engine computes, and that loads over `connection` are far slower."""
    clock = FakeClock()
    policy = LoadPolicy(Recorder(), PrefillQueue(), {}, clock=clock)
    for _ in range(MIN_LOADS):
        policy.step_began(1_000, 0)
        clock.advance(0.1)
        policy.step_ended()
    policy.verdict("r", 1_000, 1_000, connection)
    for _ in range(MIN_LOADS):
        policy.load_ended(Load(clock(), 1_000, 1_000_000, connection), 50.0, succeeded=True)
    return policy


def connected(core: MakeCore, transport: str) -> Core:
    # Three seconds of a busy machine are no reason to decline a hit.
    return core(transport=transport, lookup_timeout_ms=3_000).connected()


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_a_slow_transport_declines_hits_over_itself_alone(core: MakeCore, transport: str) -> None:
    one = connected(core, transport)
    boot_token = one.side.stages.boot_token
    request = stored(one)
    for slow in ("shm", "tcp", "grpc"):
        one.side.loads.policy = taught(Connection(slow, boot_token))
        assert one.ask(request) == (0 if slow == transport else blocks(6))
        one.finish(request)


def test_a_load_remembers_what_it_goes_over(core: MakeCore) -> None:
    one = connected(core, "tcp")
    request = stored(one)
    one.allocate(request, one.ask(request))
    boot_token = one.side.stages.boot_token
    lose_pool(one)
    assert boot_token and one.side.loads.loading["r"].connection == Connection("tcp", boot_token)
    assert (one.side.stages.transport, one.side.stages.boot_token) == ("", 0)


def test_stages_over_one_transport_have_one_rate(core: MakeCore) -> None:
    one = connected(core, "tcp")
    (spec,) = one.side.stages.specs
    one.side.stages.open([spec, replace(spec, pipeline_stage=1)])
    assert one.connected().side.stages.transport == "tcp"


def test_a_hit_is_cut_where_the_policy_says_and_the_rest_is_declined(core: MakeCore) -> None:
    one = connected(core, "tcp")
    request = stored(one)
    one.side.loads.verdict = lambda request_id, start, stop: stop - start - blocks(2) - 3
    assert one.ask(request) == blocks(3), "a cut lies at a boundary"
    one.allocate(request, blocks(3))
    assert one.side.queue.tokens == {Stage.WAITING: 0, Stage.LOADING: 100 - blocks(3), Stage.RUNNING: 0}
    assert sum(map(len, one.step().loads[0].groups)) == 3
    one.finish(request)


def test_a_hit_that_is_cut_within_its_first_block_is_declined(core: MakeCore) -> None:
    one = connected(core, "tcp")
    request = stored(one)
    one.side.loads.verdict = lambda request_id, start, stop: blocks(1) - 1
    assert one.ask(request) == 0
    assert one.ask(request) == 0, "it is judged once"
    one.finish(request)


def test_the_policy_learns_how_long_the_slowest_rank_took(core: MakeCore) -> None:
    one = connected(core, "tcp")
    request = stored(one)
    one.allocate(request, one.ask(request))
    one.side.loads.transferred({"r": 0.5, "gone": 9.0})
    one.side.loads.transferred({"r": 0.25})
    assert one.side.loads.loading["r"].job.seconds == 0.5
    learned = WorkerMetadata(load_seconds={"r": 1.0, "s": 2.0}).aggregate(WorkerMetadata(load_seconds={"r": 3.0}))
    assert learned.load_seconds == {"r": 3.0, "s": 2.0}
