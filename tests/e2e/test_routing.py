"""A router behind the bridge learns from the server's and a real engine's events what the next request would find."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.hashing import block_hashes
from kvpool.protocol.types import BlockRun
from testbed.engine import BLOCK_TOKENS, EngineSpec, kvpool_transfer_config
from testbed.ports import free_endpoint
from testbed.tiny_models import write
from tests.conftest import StartServer
from tests.e2e.conftest import FLOAT32, PATIENT, prompt, running
from tests.support.processes import wait_for
from tests.support.real_engines import drain
from tests.support.routers import Bridge, WireRouter

pytestmark = pytest.mark.vllm


@pytest.fixture
def router() -> Iterator[WireRouter]:
    made = WireRouter()
    yield made
    made.close()


def test_a_router_promises_what_an_engine_finds(
    pool_server: StartServer, router: WireRouter, tmp_path: Path, shapes_dir: Path
) -> None:
    model = write("llama", shapes_dir)
    publish, replay = (f"tcp://{free_endpoint()}" for _ in range(2))
    server = pool_server("--memory", "64MiB", "--kv-events", publish, "--kv-events-replay", replay)
    text, other = prompt(200, "routed"), prompt(120, "other")
    events, port = {"enable_kv_cache_events": True, "publisher": "zmq"}, free_endpoint().split(":")[1]
    options = {**FLOAT32, "kv_events_config": {**events, "endpoint": f"tcp://*:{port}"}}
    spec = EngineSpec(model, kvpool_transfer_config(server.endpoint, **PATIENT), options, in_process=True)
    with (
        running(tmp_path, spec) as (engine,),
        Client(ClientConfig(server.endpoint, timeout_ms=60_000)) as client,
        ExitStack() as stack,
    ):
        (info,) = client.admin.namespaces(holdings=False)
        bridge = Bridge((publish, replay), [f"tcp://127.0.0.1:{port}"], info.fingerprint, info.spec.model)
        stack.callback(bridge.close)
        router.follow(0, bridge.endpoint)
        wait_for(lambda: router.promised([]) == {} and router.has_snapshots, "the bridge", 60)
        engine.generate([text, text[:96] + other])
        drain(engine)

        def usable(tokens: list[int]) -> int:
            hashes = block_hashes(tokens, BLOCK_TOKENS)
            return client.exists(info.fingerprint, [BlockRun(0, hashes)]).usable_tokens

        wanted = 200 // BLOCK_TOKENS * BLOCK_TOKENS
        wait_for(lambda: router.promised(text) == {0: wanted}, "the router's knowledge of the prompt", 30)
        wait_for(lambda: router.promised(text[:96] + other).get(0, 0) > 96, "its knowledge of the other", 30)
        for asked in (text, text[:96] + other, text[:100], text[:50] + other, other):
            assert router.promised(asked).get(0, 0) == usable(asked)
        client.admin.clear()
        wait_for(lambda: not router.promised(text), "the router's knowledge that all is gone", 30)
