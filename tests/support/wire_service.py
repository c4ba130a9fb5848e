"""Calls the RPCs of a service as a network would, without one: bytes in, the interceptor, the handlers, bytes out."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from prometheus_client import CollectorRegistry

from kvpool.protocol.errors import UnauthenticatedError
from kvpool.protocol.messages import pieces
from kvpool.security.principal import Principal
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.authentication import Credential
from kvpool_server.access.caller import CALLER, RunningCalls
from kvpool_server.cache.arena import Arena
from kvpool_server.observability.metrics import RpcMetrics
from kvpool_server.rpc.chunks import WRITTEN_BYTES
from kvpool_server.rpc.grpc_server import PoolService, RpcInterceptor
from kvpool_server.rpc.handlers import SERVICE_NAME, add_service
from kvpool_server.sharing import Limits
from kvpool_server.tiering.tiered_pool import TieredPool
from testbed.pool_at_once import PoolAtOnce
from tests.support.clock import FakeClock
from tests.support.pool_service import pool_service
from tests.support.service_loop import CallContext, ServiceLoop

METHODS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["Pool"].methods}


@dataclass(frozen=True)
class Answer:
    """What a caller gets. `code`: of the status; `message`: of an error; `replies`: any number with a stream."""

    code: grpc.StatusCode
    message: str = ""
    replies: tuple[Message, ...] = ()


class _WireContext(CallContext):
    """What handlers ask of gRPC, for one call whose messages have all come."""

    def __init__(self, principal: Principal | None, messages: Sequence[bytes]):
        super().__init__()
        self.principal = principal
        self.written: list[bytes] = []
        self.answer = Answer(grpc.StatusCode.OK)
        self._messages = list(messages)

    async def read(self) -> Any:
        return self._messages.pop(0) if self._messages else grpc.aio.EOF  # type: ignore[attr-defined]

    async def write(self, message: bytes) -> None:
        self.written.append(message)

    def set_code(self, code: grpc.StatusCode) -> None:
        self.answer = replace(self.answer, code=code)

    def set_details(self, message: str) -> None:
        self.answer = replace(self.answer, message=message)

    def set_trailing_metadata(self, metadata: object) -> None:
        """It says the same as the code."""

    def cancelled(self) -> bool:
        return False


class _Who:
    """Callers prove what the test says; `None` proves nothing."""

    def __call__(self, context: Any) -> Credential:
        if context.principal is None:
            raise UnauthenticatedError("the call has no certificate")
        return Credential(context.principal, str(context.principal), _NEVER)


_WHO: Any = _Who()
_OFFER = pb.PingResponse(piece_bytes=WRITTEN_BYTES)
_NEVER = dt.datetime.max.replace(tzinfo=dt.UTC)


class WireService:
    """A service behind the real interceptor and the real handlers."""

    def __init__(self, service: PoolService):
        self._loop = ServiceLoop()
        running = RunningCalls(lambda credential: credential, 0.0)
        self._interceptor = RpcInterceptor(service, running, None)
        self._handlers: list[grpc.GenericRpcHandler] = []
        add_service(service, self)  # type: ignore[arg-type]

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """What `add_service` calls of a gRPC server."""
        self._handlers += handlers

    def call(self, principal: Principal | None, method: str, *requests: Message) -> Answer:
        """Makes one call, to its end."""
        return self.send(principal, method, *(each for one in requests for each in pieces(one.SerializeToString())))

    def send(self, principal: Principal | None, method: str, *messages: bytes) -> Answer:
        """Makes one call with messages that may be anything."""
        return self._loop.run(self._send(principal, method, messages))

    async def _send(self, principal: Principal | None, method: str, messages: Sequence[bytes]) -> Answer:
        details: Any = SimpleNamespace(method=f"/{SERVICE_NAME}/{method}", invocation_metadata=())

        async def handler_of(details: Any) -> Any:
            return self._handlers[0].service(details)

        handler: Any = await self._interceptor.intercept_service(handler_of, details)
        context = _WireContext(principal, messages)
        reply_type = GetMessageClass(METHODS[method].output_type)
        replies: list[bytes] = []
        CALLER.set(None)
        if handler.stream_unary is not None:
            reply = await handler.stream_unary(None, context)
            if context.answer.code is grpc.StatusCode.OK:  # gRPC sends no other.
                replies = [reply]
        else:
            await handler.stream_stream(None, context)
            replies = context.written
        answer = context.answer
        return Answer(answer.code, answer.message, tuple(reply_type.FromString(reply) for reply in replies))


class WireHouse:
    """A pool with its service, whose leases and tickets get ids from `first_id` on.

    Attributes:
        clock: leases and tickets end only when the test advances it.
        memory: the arena, uint8 [arena_bytes].
    """

    def __init__(
        self, arena_bytes: int, extent_bytes: int, limits: Limits, first_id: int = 1, offer: pb.PingResponse = _OFFER
    ):
        ids = itertools.count(first_id)
        self.clock = FakeClock()
        memory = self.memory = np.zeros(arena_bytes, np.uint8)

        def zero(start: int, nbytes: int) -> None:
            memory[start : start + nbytes] = 0

        arena = Arena(arena_bytes, extent_bytes, zero=zero)
        self.pool = PoolAtOnce(arena, self.clock, lambda: next(ids), limits)
        tiered, metrics = TieredPool(self.pool, memory), RpcMetrics(CollectorRegistry())
        service = pool_service(tiered, memory, metrics, offer=offer, who=_WHO)
        self.service = WireService(service)

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.pool.expire()
