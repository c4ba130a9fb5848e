"""A kvpool server in this process, and clients that reach it through messages whose ways the schedule decides.

All but gRPC and shared memory is the real thing: `Client`, `wire`, `PoolService`, `Pool`. A message waits for its turn
before it reaches the server; the server may be away, hang, come back as another, lose a message, or say that what it
has is still on its way up from a tier.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.rpc import PoolRpc
from kvpool.client.transport_choice import Choice
from kvpool.protocol.errors import (
    DrainingError,
    KVPoolError,
    LeaseExpiredError,
    PoolTimeoutError,
    TransferError,
    UnavailableError,
)
from kvpool.protocol.types import BlockRun, Lookup, RunHits
from kvpool.protocol.wire import metadata_of, status_of
from kvpool.transport.base import Local, Transfer
from kvpool.transport.segment import Bytes
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.entry import Observer
from kvpool_server.cache.leases import NOBODY, Owner
from kvpool_server.rpc.chunks import PIECE_BYTES
from kvpool_server.rpc.drain import Drain
from kvpool_server.sharing import Limits
from kvpool_server.tiering.tiered_pool import TieredPool
from testbed.pool_at_once import PoolAtOnce
from tests.simulation.deterministic_runtime import DeterministicRuntime, Message
from tests.support.pool_service import pool_service
from tests.support.service_loop import CallContext, ServiceLoop

LIMITS = Limits(max_batch_blocks=96, max_ttl_ms=20_000, grace_ms=1_000)
METHODS = (
    "OpenNamespace", "Lookup", "PutStart", "PutEnd", "PutRevoke", "Get", "Release", "Verify", "Remove", "Clear", "Ping",
    "ListNamespaces", "WhoAmI",
)  # fmt: skip
POISON = 0xDD


class RpcFailed(grpc.RpcError):
    """What gRPC raises."""

    def __init__(self, code: grpc.StatusCode, details: str = "", metadata: tuple[tuple[str, str], ...] = ()):
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata


DRAIN_MS = 60_000


async def _tell_nobody() -> None:
    """The simulation has no health checks."""


@dataclass(frozen=True, slots=True)
class Lag:
    """What one lookup is told of a tier.

    Args:
        num_up: blocks of each run that are up; what else is there is on its way.
        num_lost: blocks that are said to be on their way, and never come.
    """

    num_up: int
    num_lost: int
    retry_ms: int


class _LaggingPool(TieredPool):
    """A pool whose next lookups find a part of its blocks, and call the others pending."""

    def __init__(self, pool: PoolAtOnce, memory: npt.NDArray[np.uint8], lags: list[Lag]):
        super().__init__(pool, memory)
        self.lags = lags

    async def lookup(
        self,
        fingerprint: bytes,
        runs: Sequence[BlockRun],
        prefix_only: bool,
        lease_ttl_ms: int = 0,
        locate: bool = False,
        owner: Owner = NOBODY,
        wait_ms: int = 0,
        here: bool = False,
    ) -> Lookup:
        """Waits for nothing: the network decides how late an answer is."""
        if not self.lags or not lease_ttl_ms:
            return await super().lookup(fingerprint, runs, prefix_only, lease_ttl_ms, locate, owner, here=here)
        lag = self.lags.pop(0)
        whole = await super().lookup(fingerprint, runs, prefix_only)
        seen = [replace(run, block_hashes=_hidden(run.block_hashes, lag.num_up)) for run in runs]
        found = await super().lookup(fingerprint, seen, prefix_only, lease_ttl_ms)
        hits = tuple(
            replace(up, num_pending=min(len(run) - _count(up), _count(there) - _count(up) + lag.num_lost))
            for run, up, there in zip(runs, found.hits, whole.hits, strict=True)
        )
        return replace(found, hits=hits, retry_after_ms=lag.retry_ms if any(hit.num_pending for hit in hits) else 0)


def _hidden(names: Sequence[bytes], num_up: int) -> list[bytes]:
    """The same run, its later blocks under names that were never stored."""
    return [*names[:num_up], *(bytes(255 - byte for byte in name) for name in names[num_up:])]


def _count(hits: RunHits) -> int:
    return max(hits.num_leading, hits.complete.bit_count())


class SimServer:
    """One server, through restarts.

    Args:
        observer: of every pool it will have.
        shares_memory: clients read and write the arena themselves; else through the server, which checks.

    Attributes:
        up, hung: a server that hangs answers nobody; one that is not up refuses.
        lags: of each of the next lookups, what it is told of a tier.
        losses: "request" or "answer" of each of the next messages that is lost; "" for one that is not.
        num_drained: calls that were refused because the server drains.
        is_lossless: nobody was ever left without an answer, and nothing but the time has ended a lease.
    """

    def __init__(
        self,
        runtime: DeterministicRuntime,
        extent_bytes: int,
        num_extents: int,
        observer: Observer,
        *,
        shares_memory: bool = True,
    ):
        self.runtime = runtime
        self.shares_memory = shares_memory
        self.up, self.hung = True, False
        self.lags: list[Lag] = []
        self.losses: list[str] = []
        self.is_lossless = True
        self.num_drained = 0
        self._size = extent_bytes, num_extents
        self._observer = observer
        self._ids = itertools.count(1)
        self._loop = ServiceLoop()
        self.start()

    def start(self) -> None:
        """Comes up, empty."""
        extent_bytes, num_extents = self._size
        self.memory = np.full(extent_bytes * num_extents, POISON, np.uint8)
        self.boot_token = next(self._ids)
        arena = Arena(extent_bytes * num_extents, extent_bytes)
        self.pool = PoolAtOnce(arena, self.runtime.clock, lambda: next(self._ids), LIMITS)
        self.pool.observe(self._observer)
        tiered, offer = _LaggingPool(self.pool, self.memory, self.lags), pb.PingResponse(piece_bytes=PIECE_BYTES)
        self._drain = Drain(tiered, DRAIN_MS, _tell_nobody, self.runtime.clock)
        self._service = pool_service(
            tiered,
            self.memory,
            offer=offer,
            boot_token=self.boot_token,
            stats=self.pool.stats,
            drain=self._drain,
        )
        self.up = True

    def drain(self) -> None:
        """Grants no lease and no ticket until the next start."""
        self._loop.run(self._drain.begin())

    def reachable(self) -> bool:
        """Whether a message gets an answer, a refusal included."""
        return not (self.up and self.hung)

    def serve(self, method: str, request: Any) -> Any:
        """Handles one request.

        Raises:
            RpcFailed: what gRPC would raise at the client.
        """
        if not self.up:
            self.is_lossless = False
            raise RpcFailed(grpc.StatusCode.UNAVAILABLE, "injected: away")
        try:
            return self._loop.run(getattr(self._service, method)(request, CallContext()))
        except KVPoolError as error:
            self.num_drained += isinstance(error, DrainingError)
            raise RpcFailed(status_of(error), str(error), metadata_of(error)) from None

    def pop_loss(self) -> str:
        loss = self.losses.pop(0) if self.losses else ""
        if loss:
            self.is_lossless = False
        return loss


class _Call:
    """A pending call: the part of grpc.Future that `Client` uses."""

    def __init__(self, client: SimClient, method: str, request: Any, timeout_s: float):
        self._client, self._method, self._request = client, method, request
        self._runtime = client.server.runtime
        self._deadline = self._runtime.clock.now + timeout_s
        self._outcome: tuple[Any, RpcFailed | None] | None = None
        self._callbacks: list[Callable[[Any], None]] = []
        self._loss = client.server.pop_loss()
        self._wait(self._arrive, lambda: client.closed or (self._loss != "request" and client.server.reachable()))

    def _wait(self, step: Callable[[], None], ready: Callable[[], bool]) -> None:
        self._runtime.add(Message(f"{self._method} {step.__name__}", step, ready, self._deadline))

    def _arrive(self) -> None:
        if self._has_failed():
            return
        try:
            reply = self._client.server.serve(self._method, self._request)
        except RpcFailed as error:
            self._end(None, error)
            return
        server, boot = self._client.server, self._client.server.boot_token

        def answer() -> None:
            if not self._has_failed():
                lost = server.boot_token != boot or not server.up
                server.is_lossless &= not lost
                self._end(reply, RpcFailed(grpc.StatusCode.UNAVAILABLE, "injected: broken off") if lost else None)

        answer.__name__ = "answer"
        self._wait(answer, lambda: self._client.closed or (self._loss != "answer" and server.reachable()))

    def _has_failed(self) -> bool:
        if self._outcome is None and self._client.closed:
            self._end(None, RpcFailed(grpc.StatusCode.CANCELLED))
        elif self._outcome is None and self._runtime.clock.now >= self._deadline:
            self._client.server.is_lossless = False
            self._end(None, RpcFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "injected: no answer"))
        return self._outcome is not None

    def _end(self, reply: Any, error: RpcFailed | None) -> None:
        self._outcome = reply, error
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def done(self) -> bool:
        return self._outcome is not None

    def result(self, timeout: float | None = None) -> Any:
        if not self._has_failed():
            assert timeout is not None, "nobody may wait for ever"
            self._runtime.clock.advance(timeout)
            if not self._has_failed():
                raise grpc.FutureTimeoutError
        assert self._outcome is not None
        reply, error = self._outcome
        if error is not None:
            raise error
        return reply

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self._outcome is not None:
            callback(self)
        else:
            self._callbacks.append(callback)

    def cancel(self) -> None:
        if self._outcome is None:
            self._end(None, RpcFailed(grpc.StatusCode.CANCELLED))


class _Method:
    """One method of a stub."""

    def __init__(self, client: SimClient, name: str):
        self._client, self._name = client, name

    def __call__(self, request: Any, timeout: float) -> Any:
        client, server, runtime = self._client, self._client.server, self._client.server.runtime
        client.check_open()
        deadline = runtime.clock.now + timeout
        loss = server.pop_loss()

        def way(is_lost: bool) -> None:
            runtime.wait(lambda: client.closed or (not is_lost and server.reachable()), deadline)
            if client.closed:
                raise RpcFailed(grpc.StatusCode.CANCELLED)
            if runtime.clock.now >= deadline:
                server.is_lossless = False
                raise RpcFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "injected: no answer")

        way(loss == "request")
        boot = server.boot_token
        reply = server.serve(self._name, request)
        if loss == "answer" or server.hung:
            way(loss == "answer")
            if server.boot_token != boot or not server.up:
                server.is_lossless = False
                raise RpcFailed(grpc.StatusCode.UNAVAILABLE, "injected: broken off")
        return reply

    def future(self, request: Any, timeout: float) -> _Call:
        self._client.check_open()
        return _Call(self._client, self._name, request, timeout)


class _Lookups(_Method):
    """Instead of the stream of lookups, whose requests another thread makes: calls, made at once."""

    def __call__(self, make: Callable[[], Any], timeout: float) -> Any:
        return super().__call__(make(), timeout)

    def future(self, make: Callable[[], Any], timeout: float) -> _Call:
        return super().future(make(), timeout)

    def release(self, lease_ids: Sequence[int]) -> None:
        super().future(pb.LookupRequest(release=lease_ids), self._client.config.timeout_ms / 1000)


class _Stub:
    def __init__(self, client: SimClient):
        for name in METHODS:
            setattr(self, name, _Method(client, name))


class SimClient(Client):
    """`Client` with another connection."""

    def __init__(self, server: SimServer, config: ClientConfig):
        self.server = server
        self.closed = False
        rpc = PoolRpc(config, _Stub(self), _Lookups(self, "Lookup"), channel=None)
        super().__init__(config, rpc, lambda *_: Choice(SimTransport(server), "simulated"))

    def close(self) -> None:
        self.closed = True
        self.attachment.detach()

    def check_open(self) -> None:
        if self.closed:
            raise ValueError("Cannot invoke RPC on closed channel!")


class SimTransport:
    """Bytes travel a region at a time, each when its turn comes."""

    name = "shm"
    one_sided = False
    extents = None
    memory = None

    def __init__(self, server: SimServer):
        self._server = server
        self._boot_token = server.boot_token
        self._arena: Bytes = server.memory

    def write(self, transfer: Transfer, source: Local) -> None:
        self._carry(transfer, source, is_write=True)

    def read(self, transfer: Transfer, sink: Local) -> None:
        self._carry(transfer, sink, is_write=False)

    def _carry(self, transfer: Transfer, local: Local, is_write: bool) -> None:
        server, runtime, region_bytes = self._server, self._server.runtime, transfer.region_bytes
        arena, act = self._arena, local.acting(is_write=is_write)
        if not len(arena):
            raise TransferError("the segment was closed")
        deadline = runtime.clock.now + transfer.timeout_s
        for start, stop in replace(transfer, batch_bytes=2 * region_bytes).batches():
            if server.shares_memory:
                runtime.yields()
            else:
                runtime.wait(server.reachable, deadline)
            if runtime.clock.now > deadline:
                raise PoolTimeoutError(f"the transfer took more than {transfer.timeout_s:.3f} s")
            offsets = transfer.starts(start, stop)
            if server.shares_memory:
                buffers = [arena[offset : offset + region_bytes] for offset in offsets]
                act(start, buffers)
                local.sum(start, [[buffer] for buffer in buffers])
            elif is_write:
                buffers = [np.empty(region_bytes, np.uint8) for _ in offsets]
                act(start, buffers)
                local.sum(start, [[buffer] for buffer in buffers])
                for offset, buffer in zip(offsets, buffers, strict=True):
                    runtime.yields()
                    self._ask(partial(server.pool.writable, transfer.holding_id, offset, region_bytes))
                    server.memory[offset : offset + region_bytes] = buffer
            else:
                for nth, offset in enumerate(offsets, start):
                    self._ask(partial(server.pool.readable, transfer.holding_id, offset, region_bytes))
                    received = server.memory[offset : offset + region_bytes].copy()
                    local.sum(nth, [[received]])
                    act(nth, [received])
        runtime.yields()

    def _ask(self, check: Callable[[], None]) -> None:
        """What the server checks before each piece."""
        if not self._server.up:
            raise UnavailableError("injected: away")
        if self._server.boot_token != self._boot_token:
            raise LeaseExpiredError("injected: of another boot")
        try:
            check()
        except KVPoolError:
            self._server.is_lossless = False
            raise

    def close(self) -> None:
        self._arena = np.empty(0, np.uint8)
