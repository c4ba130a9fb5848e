"""An engine tells a server that asks which tokens its blocks stand for, unless tokens alone do not name a block."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from kvpool.errors import PermissionDeniedError
from kvpool.rpc import Namespace
from kvpool.types import BlockRun
from testbed.ports import free_endpoint
from tests.conftest import StartServer
from tests.support.processes import wait_for
from tests.support.routers import WireRouter
from tests.support.vllm_objects import make_request, tokens
from tests.vllm_plugin.core import MakeCore, fill
from vllm_plugin.metadata import GroupBlocks
from vllm_plugin.scheduler import announcer

LENGTH = 96


def test_tokens_reach_the_router_but_for_blocks_that_fold_in_more(core: MakeCore, pool_server: StartServer) -> None:
    publish, replay = (f"tcp://{free_endpoint()}" for _ in range(2))
    model = core().side.stages.specs[0].model
    server = pool_server("--kv-events-router", f"pool={model},{publish},{replay}")
    one, router = core(endpoint=server.endpoint).connected(), WireRouter()
    router.follow(0, publish, replay)
    plain, pictured = (
        make_request("plain", tokens(LENGTH, 1)),
        make_request("pictured", tokens(LENGTH, 2), images={"a": (0, 8)}),
    )
    try:
        for request in (pictured, plain):
            hashes = list(request.block_hashes)
            fill(one, hashes)
            part = GroupBlocks(0, [BlockRun(0, hashes)], [list(range(len(hashes)))], [0])
            one.side.contents.announcer.are_there(request, [part])
        wait_for(lambda: router.promised(tokens(LENGTH, 1)) == {0: LENGTH}, "the router's knowledge of the prompt")
        assert not router.promised(tokens(LENGTH, 2))
    finally:
        router.close()


def test_a_server_that_refuses_an_announcement_gets_no_further_one_and_one_warning(
    core: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = core().connected()
    (session,) = one.side.stages.sessions
    assert session.namespace is not None
    session.namespace = replace(session.namespace, wants_tokens=True)
    said: list[str] = []
    monkeypatch.setattr(announcer.logger, "warning", lambda text, *values: said.append(text % values))
    calls: list[BlockRun] = []
    goes_on = threading.Event()

    def announce(_: object, run: BlockRun, *__: object) -> None:
        calls.append(run)
        goes_on.wait(60)
        raise PermissionDeniedError("its role is engine-read, and the call needs engine-write or operator")

    monkeypatch.setattr(session.client.rpc, "announce", announce)

    def tell(nth: int) -> None:
        request = make_request(f"{nth}", tokens(LENGTH, nth))
        hashes = list(request.block_hashes)
        part = GroupBlocks(0, [BlockRun(0, hashes)], [list(range(len(hashes)))], [0])
        one.side.contents.announcer.are_there(request, [part])

    for nth in range(3):
        tell(nth)  # The first is on its way, and the others wait.
    goes_on.set()
    wait_for(lambda: said, "the warning")
    tell(3)
    one.side.contents.announcer.close()
    (warning,) = said
    assert len(calls) == 1
    assert "give the engine a certificate or token of role engine-write, and restart it" in warning
    assert "its role is engine-read" in warning
    assert one.ask(make_request("asks", tokens(LENGTH, 9))) == 0, "the engine goes on"


def test_a_server_that_has_restarted_is_told_again(core: MakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    one = core().connected()
    (session,) = one.side.stages.sessions
    opened = session.namespace
    assert opened is not None
    calls: list[int] = []

    def announce(namespace: Namespace, *_: object) -> None:
        calls.append(namespace.boot_token)
        raise PermissionDeniedError("its role is engine-read")

    monkeypatch.setattr(session.client.rpc, "announce", announce)
    request = make_request("one", tokens(LENGTH, 1))
    part = GroupBlocks(0, [BlockRun(0, list(request.block_hashes))], [list(range(6))], [0])
    for boot_token in (1, 2):
        session.namespace = replace(opened, wants_tokens=True, boot_token=boot_token)
        one.side.contents.announcer.are_there(request, [part])
    one.side.contents.announcer.close()
    assert calls == [1, 2]
