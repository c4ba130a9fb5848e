"""An engine tells a server that asks which tokens its blocks stand for, unless tokens alone do not name a block."""

from __future__ import annotations

from kvpool.types import BlockRun
from testbed.ports import free_endpoint
from tests.conftest import StartServer
from tests.support.processes import wait_for
from tests.support.routers import WireRouter
from tests.support.vllm_objects import make_request, tokens
from tests.vllm_plugin.core import MakeCore, fill
from vllm_plugin.metadata import GroupBlocks

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
