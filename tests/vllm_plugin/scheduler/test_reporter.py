"""Engines tell the server what they count, in the background, and never twice."""

from __future__ import annotations

import os
import time
from unittest.mock import patch

import grpc
import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.rpc import PoolRpc
from kvpool.v1 import pool_pb2 as pb
from kvpool.version import __version__
from tests.conftest import StartServer
from tests.support.faults import stopped
from tests.support.processes import wait_for
from tests.support.vllm_objects import make_request, tokens
from tests.vllm_plugin.core import Core, MakeCore, lose_pool
from vllm_plugin.scheduler import telemetry

LENGTH = 100


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "REPORT_EVERY_S", 0.05)
    monkeypatch.setattr(telemetry, "FIRST_REPORT_EVERY_S", 0.05)


def compute(core: Core, name: str) -> None:
    """Computes one prompt of which the pool has nothing."""
    request = make_request(name, tokens(LENGTH, name))
    core.ask(request)
    assert request.prefill_stats is not None
    request.prefill_stats.set(LENGTH, 0, 0)
    core.allocate(request, 0)
    core.step((request, LENGTH))
    core.finish(request)


def computed(core: Core) -> dict[str, int]:
    """Computed tokens by cause of the engine's namespace, as the server tells them."""
    session = core.side.stages.sessions[0]
    assert session.namespace is not None
    (info,) = [each for each in session.client.admin.namespaces() if each.fingerprint == session.namespace.fingerprint]
    return dict(info.computed_tokens)


def stats(core: Core) -> pb.StatsResponse:
    return core.side.stages.sessions[0].client.admin.stats()


def test_the_server_knows_what_an_engine_counts(core: MakeCore) -> None:
    one = core().connected()
    for nth in range(3):
        compute(one, f"r{nth}")
    wait_for(lambda: sum(computed(one).values()) == 3 * LENGTH, "the report")
    (mine,) = [engine for engine in stats(one).engines if engine.engine.endswith(f":{os.getpid()}")]
    assert mine.version == __version__ and not mine.breaker_open and mine.transport == one.side.stages.transport
    assert mine.namespaces == [one.side.stages.sessions[0].namespace.fingerprint]  # type: ignore[union-attr]
    compute(one, "last")
    other = Client(ClientConfig(one.side.stages.sessions[0].client.config.endpoint))
    fingerprint = mine.namespaces[0]
    one.side.shutdown()
    with other as client:
        (info,) = [each for each in client.admin.namespaces() if each.fingerprint == fingerprint]
        assert sum(info.computed_tokens.values()) == 4 * LENGTH, "with the last report"
        assert not [engine for engine in client.admin.stats().engines if engine.namespaces == mine.namespaces]


def test_an_open_breaker_is_told(core: MakeCore) -> None:
    one = core().connected()
    wait_for(lambda: stats(one).engines, "the first report")
    fingerprint = one.side.stages.sessions[0].namespace.fingerprint  # type: ignore[union-attr]
    lose_pool(one)
    wait_for(
        lambda: [each for each in stats(one).engines if each.namespaces == [fingerprint] and each.breaker_open],
        "the report",
    )


def test_a_lost_answer_counts_nothing_twice(core: MakeCore) -> None:
    one = core().connected()
    send, lost = PoolRpc.report, []

    def lossy(rpc: PoolRpc, report: object, timeout_ms: int) -> bool:
        taken = send(rpc, report, timeout_ms)  # type: ignore[arg-type]
        if len(lost) < 5:
            lost.append(report)
            raise rpc.error_of(grpc.FutureTimeoutError())
        return taken

    with patch.object(PoolRpc, "report", lossy):
        for nth in range(3):
            compute(one, f"r{nth}")
        wait_for(lambda: len(lost) == 5 and sum(computed(one).values()) == 3 * LENGTH, "the report")
    assert len({report.sequence for report in lost}) == 1  # type: ignore[attr-defined]


def test_a_server_of_an_older_release_is_left_alone(core: MakeCore) -> None:
    asked: list[object] = []

    def older(_: PoolRpc, report: object, timeout_ms: int) -> bool:
        asked.append(report)
        return False

    with patch.object(PoolRpc, "report", older):
        one = core().connected()
        wait_for(lambda: asked, "a report")
        time.sleep(0.3)  # Six times as long as between two reports.
        assert len(asked) == 1
        one.side.shutdown()
    assert len(asked) == 1


def test_a_server_that_hangs_holds_up_the_end_for_a_moment(core: MakeCore, pool_server: StartServer) -> None:
    server = pool_server()
    one = core(endpoint=server.endpoint).connected()
    wait_for(lambda: stats(one).engines, "the first report")
    with stopped(server):
        began = time.monotonic()
        one.side._reporter.close()
        assert time.monotonic() - began < 2 * telemetry.LAST_REPORT_S
