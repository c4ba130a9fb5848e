"""Hits are judged by the rates of the transport that the scheduler's sessions have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.clock import FakeClock
from tests.support.vllm_objects import make_request, tokens
from tests.vllm_plugin.core import Core, MakeCore, blocks, fill, lose_pool
from vllm_plugin.metadata import WorkerMetadata
from vllm_plugin.metrics import Recorder
from vllm_plugin.scheduler.load_policy import (
    MIN_LOADS,
    MIN_STEPS,
    Connection,
    Load,
    LoadPolicy,
    PrefillQueue,
    Stage,
    Verdict,
)


def taught(connection: Connection) -> LoadPolicy:
    """A policy that knows how fast the engine computes, and that loads over `connection` are far slower."""
    clock = FakeClock()
    policy = LoadPolicy(Recorder(), PrefillQueue(), {}, clock=clock)
    for _ in range(MIN_STEPS):
        policy.step_began(1_000, 0)
        clock.advance(0.1)
        policy.step_ended()
    policy.verdict("r", 1_000, 1_000, connection)
    for _ in range(MIN_LOADS):
        policy.load_ended(Load(clock(), 1_000, 1_000_000, False, connection), 50.0, succeeded=True)
    return policy


def connected(core: MakeCore, transport: str) -> Core:
    # Three seconds of a busy machine are no reason to decline a hit.
    return core(transport=transport, lookup_timeout_ms=3_000).connected()


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_a_slow_transport_declines_hits_over_itself_alone(core: MakeCore, transport: str) -> None:
    one = connected(core, transport)
    boot_token = one.side.stages.boot_token
    request = make_request("r", tokens(100))
    fill(one, request.block_hashes)
    for slow in ("shm", "tcp", "grpc"):
        one.side.loads.policy = taught(Connection(slow, boot_token))
        assert one.ask(request) == (0 if slow == transport else blocks(6))
        one.finish(request)


def test_a_load_remembers_what_it_goes_over(core: MakeCore) -> None:
    one = connected(core, "tcp")
    request = make_request("r", tokens(100))
    fill(one, request.block_hashes)
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
    request = make_request("r", tokens(100))
    fill(one, request.block_hashes)
    one.side.loads.verdict = lambda request_id, start, stop: Verdict(stop - start - blocks(2) - 3)
    assert one.ask(request) == blocks(3), "a cut lies at a boundary"
    one.allocate(request, blocks(3))
    assert one.side.queue.tokens == {Stage.WAITING: 0, Stage.LOADING: 100 - blocks(3), Stage.RUNNING: 0}
    assert sum(map(len, one.step().loads[0].groups)) == 3
    one.finish(request)


def test_a_hit_that_is_cut_within_its_first_block_is_declined(core: MakeCore) -> None:
    one = connected(core, "tcp")
    request = make_request("r", tokens(100))
    fill(one, request.block_hashes)
    one.side.loads.verdict = lambda request_id, start, stop: Verdict(blocks(1) - 1)
    assert one.ask(request) == 0
    assert one.ask(request) == 0, "it is judged once"
    one.finish(request)


def test_the_policy_learns_how_long_the_slowest_rank_took(core: MakeCore) -> None:
    one = connected(core, "tcp")
    request = make_request("r", tokens(100))
    fill(one, request.block_hashes)
    one.allocate(request, one.ask(request))
    one.side.loads.transferred({"r": 0.5, "gone": 9.0})
    one.side.loads.transferred({"r": 0.25})
    assert one.side.loads.loading["r"].transfer_s == 0.5
    learned = WorkerMetadata(load_seconds={"r": 1.0, "s": 2.0}).aggregate(WorkerMetadata(load_seconds={"r": 3.0}))
    assert learned.load_seconds == {"r": 3.0, "s": 2.0}
