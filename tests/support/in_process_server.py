"""A gRPC server on an event loop of its own thread, whose pool the test can fill directly, and a probe of that loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
import numpy as np

from kvpool.protocol.messages import PiecedChannel
from kvpool.protocol.wire import MAX_MESSAGE_BYTES
from kvpool.v1 import pool_pb2 as pb
from kvpool.v1.pool_pb2_grpc import PoolStub
from kvpool_server.access.audit import AuditLog
from kvpool_server.access.authentication import Context, Credential
from kvpool_server.access.caller import RunningCalls
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.steps import Steps
from kvpool_server.data_plane.permits import PermitTable
from kvpool_server.rpc.chunks import WRITTEN_BYTES
from kvpool_server.rpc.grpc_server import GrpcServer
from kvpool_server.rpc.turns import Turns
from kvpool_server.sharing import Limits
from kvpool_server.tiering.tiered_pool import TieredPool
from testbed.pool_at_once import PoolAtOnce
from tests.support.clock import FakeClock
from tests.support.pool_service import pool_service

Value = TypeVar("Value")
SETTLE_EVERY_S = 0.05


class LoopProbe:
    """Measures the CPU time of every callback of one thread's event loop.

    CPU time, because a test's machine is shared: what others compute meanwhile does not count.

    Attributes:
        longest_s: of one callback since the last `reset`.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.culprit = ""
        self._thread: threading.Thread | None = None

    def reset(self) -> None:
        self.longest_s, self.culprit = 0.0, ""

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Watches the loop that the calling thread runs in the body."""
        self._thread, run = threading.current_thread(), asyncio.Handle._run

        def measured(handle: Any) -> None:
            if threading.current_thread() is not self._thread:
                return run(handle)
            began = time.thread_time()
            run(handle)
            if (seconds := time.thread_time() - began) > self.longest_s:
                self.longest_s, self.culprit = seconds, repr(handle)

        asyncio.Handle._run = measured  # type: ignore[method-assign]
        try:
            yield
        finally:
            asyncio.Handle._run = run  # type: ignore[method-assign]


class InProcessServer:
    """Serves until `close`.

    Args:
        credentials, who: of TLS, for callers that prove who they are; the test makes its own clients then.
        has_tenants: whether extents belong to the tenants of namespaces, although callers prove nothing.
        permits: of a data port.

    Attributes:
        clock: the pool's; leases and tickets expire only when the test advances it.
        stub: calls the server.
    """

    def __init__(
        self,
        arena_bytes: int,
        extent_bytes: int,
        limits: Limits | None = None,
        credentials: Callable[[], grpc.ServerCredentials] | None = None,
        who: Callable[[Context], Credential] | None = None,
        *,
        has_tenants: bool = False,
        permits: PermitTable | None = None,
        audit: AuditLog | None = None,
    ):
        ids = itertools.count(1)
        self.clock = FakeClock()
        self.probe = LoopProbe()
        arena = Arena(arena_bytes, extent_bytes, zero=self._zero if has_tenants else None)
        self.pool = PoolAtOnce(arena, self.clock, lambda: next(ids), limits)
        self.memory = np.zeros(arena_bytes, np.uint8)
        self._credentials, self._who, self._permits = credentials, who, permits
        self._audit = audit
        self.port = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._ready.wait(30), "the server did not start"
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}", options)
        self.stub = PoolStub(PiecedChannel(self.channel))  # type: ignore[no-untyped-call]

    def _zero(self, start: int, nbytes: int) -> None:
        self.memory[start : start + nbytes] = 0

    async def _run(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        turns = Turns()
        tiered = TieredPool(self.pool, self.memory, run=turns.run)
        who: Any = self._who
        service = pool_service(
            tiered,
            self.memory,
            offer=pb.PingResponse(piece_bytes=WRITTEN_BYTES),
            permits=self._permits,
            who=who,
            turns=turns,
        )
        running = RunningCalls(lambda credential: credential, 0.0) if who is not None else None
        server = GrpcServer(
            "127.0.0.1:0",
            service,
            credentials=self._credentials,
            running=running,
            audit=self._audit,
        )
        await server.start()
        self.port = server.port
        with self.probe.installed():
            self._ready.set()
            while not self._stopping.is_set():
                await turns.run(self._settle())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), SETTLE_EVERY_S)
        await server.stop()

    def _settle(self) -> Steps[None]:
        while self.pool.settle() or self.pool.rebalance():
            yield

    def on_loop(self, function: Callable[[], Value]) -> Value:
        """Calls a function on the server's loop, for example on its pool."""

        async def call() -> Value:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(60)

    def close(self) -> None:
        self.channel.close()
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server did not stop"
