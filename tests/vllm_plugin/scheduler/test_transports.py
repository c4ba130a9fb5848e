"""Hits are judged by the rates of the transport that the scheduler's sessions have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.clock import FakeClock
from tests.support.vllm_objects import make_request, tokens
from tests.vllm_plugin.core import Core, MakeCore, blocks, fill, lose_pool
from vllm_plugin.metrics import Recorder
from vllm_plugin.scheduler.load_policy import MIN_LOADS, MIN_STEPS, Connection, LoadPolicy


def taught(connection: Connection) -> LoadPolicy:
    """A policy that knows how fast the engine computes, and that loads over `connection` are far slower."""
    clock = FakeClock()
    policy = LoadPolicy(Recorder(), clock)
    for _ in range(MIN_STEPS):
        policy.step_began(1_000, 0)
        clock.advance(0.1)
        policy.step_ended()
    policy.verdict(1_000, 1_000, connection)
    for _ in range(MIN_LOADS):
        policy.load_ended(1_000, 1_000_000, 50.0, succeeded=True, connection=connection)
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
