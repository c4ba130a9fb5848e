"""Many calls of one client at once, which has one connection: none is refused, and none waits for what waits long."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from kvpool.client.channel import MAX_AT_ONCE
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool_server.rpc.grpc_server import MAX_STREAMS
from kvpool_server.tiering.tiered_pool import TieredPool
from tests.support.in_process_server import InProcessServer
from tests.support.values import namespace_spec, run_of


def test_lookups_that_wait_leave_calls_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them wait on the server; the others are answered at once, over the stream."""
    waiting, go_on = threading.Semaphore(0), threading.Event()
    lookup = TieredPool.lookup

    async def slow(tiered: TieredPool, *arguments: object) -> object:
        *_, wait_ms, _ = arguments
        if wait_ms:
            waiting.release()
            while not go_on.is_set():
                await asyncio.sleep(0.01)
        return await lookup(tiered, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(TieredPool, "lookup", slow)
    server = InProcessServer(1 << 20, 1 << 16)
    with closing(server), Client(ClientConfig(f"127.0.0.1:{server.port}", timeout_ms=20_000)) as client:
        namespace = client.open_namespace(namespace_spec())
        pending = [client.rpc.lookup_async(namespace, [run_of("a")], wait_ms=1_000) for _ in range(2 * MAX_AT_ONCE)]
        for each in pending[MAX_AT_ONCE:]:
            assert each.result().hits
        assert all(waiting.acquire(timeout=10) for _ in range(MAX_AT_ONCE))
        assert client.lookup(namespace, [run_of("a")]).hits, "the stream is free"
        go_on.set()
        for each in pending[:MAX_AT_ONCE]:
            assert each.result().hits
        with ThreadPoolExecutor(4 * MAX_STREAMS) as threads:  # More than a connection has calls.
            assert all(threads.map(lambda _: client.admin.ping().boot_token, range(1_000)))
