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


def _is_served(server: InProcessServer) -> bool:
    with contextlib.suppress(grpc.RpcError):
        return bool(server.stub.Ping(pb.PingRequest(), timeout=10).version)
    return False


def test_a_clear_whose_caller_hangs_up_clears_the_tiers_is_logged_and_counts_as_a_call(
    server: InProcessServer, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "MAX_CALLS", 2)
    began, go_on, ended = threading.Event(), asyncio.Event(), threading.Event()
    clear = TieredPool.clear

    async def slow(tiered: TieredPool, fingerprint: bytes = b"") -> int:
        began.set()
        await go_on.wait()
        count = await clear(tiered, fingerprint)
        ended.set()
        return count

    monkeypatch.setattr(TieredPool, "clear", slow)
    call = server.stub.Clear.future(pb.ClearRequest())
    assert began.wait(10)
    call.cancel()
    wait_for(call.done, "the end of the call")
    with pytest.raises(grpc.RpcError, match="1 calls of this caller are under way"):
        server.stub.Ping(pb.PingRequest(), timeout=10)
    wait_for(lambda: [(each["call"], each["outcome"]) for each in entries(log)] == [("Clear", "CANCELLED")], "the line")
    monkeypatch.setattr(grpc_server, "MAX_CALLS", 1)  # None is left for any caller.
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert check.status == check.SERVING, "it has a reserve"
    monkeypatch.setattr(grpc_server, "MAX_CALLS", 2)
    assert not ended.is_set()
    server.on_loop(go_on.set)
    assert ended.wait(10)
    wait_for(lambda: _is_served(server), "the end of the change")


@pytest.mark.parametrize("method", ["Exists", "Lookup"])
def test_work_whose_caller_hangs_up_ends_if_it_has_no_effects_and_else_counts_as_calls(
    server: InProcessServer, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(grpc_server, "MAX_CALLS", 6)
    go_on, begun, num_ended = threading.Event(), 0, 0
    find = Lookups.find

    def slow(lookups: Lookups, *arguments: Any, **options: Any) -> Steps[Any]:
        nonlocal begun, num_ended
        begun += 1
        try:
            while not go_on.is_set():
                yield
            return (yield from find(lookups, *arguments, **options))
        finally:
            num_ended += 1

    fingerprint = server.on_loop(lambda: server.pool.open_namespace(namespace_spec())[0].fingerprint)
    monkeypatch.setattr(Lookups, "find", slow)
    make, ask = getattr(pb, f"{method}Request"), getattr(server.stub, method)
    question = make(namespace=fingerprint, runs=wire.encode_runs([run_of("block")]))
    for nth in range(1, 4):
        call = ask.future(question, timeout=30)
        wait_for(lambda nth=nth: begun == nth, "the work to begin")
        call.cancel()
        if method == "Exists":
            wait_for(lambda nth=nth: num_ended == nth, "the end of the work")
    if method == "Lookup":
        with pytest.raises(grpc.RpcError, match="3 calls of this caller are under way") as refused:
            ask(question, timeout=10)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not num_ended
    go_on.set()
    wait_for(lambda: _is_served(server) and num_ended == 3, "the end of all work")
