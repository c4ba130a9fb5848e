"""Callers that hang up: what they have changed is whole and logged, and what goes on for them counts as theirs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool.protocol import wire
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.audit import AuditLog
from kvpool_server.cache.lookups import Lookups
from kvpool_server.cache.steps import Steps
from kvpool_server.rpc import grpc_server
from kvpool_server.tiering.tiered_pool import TieredPool
from tests.support.audit_log import entries
from tests.support.in_process_server import InProcessServer
from tests.support.processes import wait_for
from tests.support.values import namespace_spec, run_of


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "audit.json"


@pytest.fixture
def server(log: Path) -> Iterator[InProcessServer]:
    audit = AuditLog(str(log))
    server = InProcessServer(1 << 20, 1 << 16, audit=audit)
    yield server
    server.close()
    audit.close()


def test_a_clear_whose_caller_hangs_up_clears_the_tiers_and_is_logged(
    server: InProcessServer, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    clear = TieredPool.clear

    async def slow(tiered: TieredPool, fingerprint: bytes = b"") -> int:
        began.set()
        while not go_on.is_set():
            await asyncio.sleep(0.01)
        count = await clear(tiered, fingerprint)
        ended.set()
        return count

    monkeypatch.setattr(TieredPool, "clear", slow)
    call = server.stub.Clear.future(pb.ClearRequest())
    assert began.wait(10)
    call.cancel()
    server.stub.Ping(pb.PingRequest(), timeout=10)  # The server has seen that the caller has hung up.
    wait_for(lambda: [(each["call"], each["outcome"]) for each in entries(log)] == [("Clear", "CANCELLED")], "the line")
    assert not ended.is_set()
    go_on.set()
    assert ended.wait(10)


def test_work_without_effects_ends_when_its_caller_hangs_up(
    server: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    ended = threading.Event()

    def endless(*_: Any, **__: Any) -> Steps[Any]:
        try:
            while True:
                begun.append(1)
                yield
        finally:
            ended.set()

    fingerprint = server.on_loop(lambda: server.pool.open_namespace(namespace_spec())[0].fingerprint)
    monkeypatch.setattr(Lookups, "find", endless)
    question = pb.ExistsRequest(namespace=fingerprint, runs=wire.encode_runs([run_of("block")]))
    call = server.stub.Exists.future(question, timeout=30)
    wait_for(lambda: len(begun) > 1, "the work to go on")
    call.cancel()
    assert ended.wait(10)


def test_a_change_that_goes_on_for_a_caller_who_hung_up_counts_as_a_call(
    server: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "MAX_CALLS", 2)
    began, go_on = threading.Event(), asyncio.Event()

    async def slow(_: TieredPool, fingerprint: bytes = b"") -> int:
        began.set()
        await go_on.wait()
        return 0

    monkeypatch.setattr(TieredPool, "clear", slow)
    call = server.stub.Clear.future(pb.ClearRequest())
    assert began.wait(10)
    call.cancel()
    wait_for(call.done, "the end of the call")
    with pytest.raises(grpc.RpcError, match="1 calls of this caller are under way"):
        server.stub.Ping(pb.PingRequest(), timeout=10)
    monkeypatch.setattr(grpc_server, "MAX_CALLS", 1)  # None is left for any caller.
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert check.status == check.SERVING, "it has a reserve"
    monkeypatch.setattr(grpc_server, "MAX_CALLS", 2)
    server.on_loop(go_on.set)

    def is_served() -> bool:
        with contextlib.suppress(grpc.RpcError):
            return bool(server.stub.Ping(pb.PingRequest(), timeout=10).version)
        return False

    wait_for(is_served, "the end of the change")


def test_work_that_goes_on_for_a_caller_who_hung_up_counts_as_a_call(
    server: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "MAX_CALLS", 6)
    go_on = threading.Event()
    began: list[int] = []
    find = Lookups.find

    def slow(lookups: Lookups, *arguments: Any, **options: Any) -> Steps[Any]:
        began.append(1)
        while not go_on.is_set():
            yield
        return (yield from find(lookups, *arguments, **options))

    fingerprint = server.on_loop(lambda: server.pool.open_namespace(namespace_spec())[0].fingerprint)
    monkeypatch.setattr(Lookups, "find", slow)
    question = pb.LookupRequest(namespace=fingerprint, runs=wire.encode_runs([run_of("block")]))
    for nth in range(1, 4):
        call = server.stub.Lookup.future(question, timeout=30)
        wait_for(lambda nth=nth: len(began) == nth, "the lookup to begin")
        call.cancel()
    with pytest.raises(grpc.RpcError) as refused:
        server.stub.Lookup(question, timeout=10)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "3 calls of this caller are under way" in refused.value.details()
    go_on.set()

    def is_served() -> bool:
        try:
            return bool(server.stub.Lookup(question, timeout=10))
        except grpc.RpcError:
            return False

    wait_for(is_served, "the caller's calls to end")
