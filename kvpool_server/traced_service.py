"""A span for each call of the gRPC service, as children of the clients' spans. Used with `--otel` alone.

A lookup's span has what the lookup has found; the other spans have the method. None has names of blocks or tokens.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

from kvpool.tracing import TRACEPARENT, Tracing
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.caller import CALLER
from kvpool_server.cache.leases import Owner
from kvpool_server.method_handlers import METHODS, SERVICE_NAME
from kvpool_server.service import PoolService
from kvpool_server.services.leases import LeaseService

_STREAMED = {"Read", "GetChunks"}
"""Methods with a stream of replies."""


class TracedLeaseService(LeaseService):
    """With a span for each lookup, also for those of a stream."""

    def __init__(self, tracing: Tracing, *parts: Any):
        super().__init__(*parts)
        self._tracing = tracing

    async def _lookup(self, request: pb.LookupRequest, owner: Owner, wait_ms: int = 0) -> pb.LookupResponse:
        if not request.runs:
            return await super()._lookup(request, owner, wait_ms)
        attributes: dict[str, str | int] = {"rpc.method": "Lookup", "kvpool.runs": len(request.runs), **_caller()}
        with self._tracing.span("kvpool.lookup", request.traceparent, attributes, kind="SERVER") as span:
            found = await super()._lookup(request, owner, wait_ms)
            span.set_attribute("kvpool.leading_blocks", sum(hit.num_leading for hit in found.hits))
            span.set_attribute("kvpool.pending_blocks", sum(hit.num_pending for hit in found.hits))
            span.set_attribute("kvpool.leased", found.lease_id != 0)
            return found


def trace_calls(service: PoolService, tracing: Tracing) -> None:
    """Gives each call a span, but for those whose lookups have one: `TracedLeaseService`."""
    for name in METHODS - {"Lookup", "LookupStream"}:
        traced = _replies if name in _STREAMED else _one_reply
        setattr(service, name, traced(tracing, name, getattr(service, name)))


def _caller() -> dict[str, str]:
    caller = CALLER.get()
    return {} if caller is None else {"kvpool.tenant": caller.tenant, "kvpool.role": str(caller.role)}


def _parent(context: Any) -> str:
    """The traceparent of a call's metadata; empty without one."""
    return next((str(value) for name, value in context.invocation_metadata() or () if name == TRACEPARENT), "")


def _one_reply(tracing: Tracing, name: str, behavior: Callable[..., Any]) -> Any:
    @functools.wraps(behavior)
    async def traced(request: Any, context: Any) -> Any:
        attributes = {"rpc.system": "grpc", "rpc.service": SERVICE_NAME, "rpc.method": name, **_caller()}
        with tracing.span(f"{SERVICE_NAME}/{name}", _parent(context), attributes, kind="SERVER"):
            return await behavior(request, context)

    return traced


def _replies(tracing: Tracing, name: str, behavior: Callable[..., Any]) -> Any:
    @functools.wraps(behavior)
    async def traced(request: Any, context: Any) -> AsyncIterator[Any]:
        attributes = {"rpc.system": "grpc", "rpc.service": SERVICE_NAME, "rpc.method": name, **_caller()}
        # Not the current span: a generator may be closed in another task's context.
        span = tracing.start(f"{SERVICE_NAME}/{name}", _parent(context), attributes, kind="SERVER")
        try:
            async for reply in behavior(request, context):
                yield reply
        except BaseException as error:
            if not isinstance(error, GeneratorExit):
                tracing.fail(span, type(error).__name__)
            raise
        finally:
            span.end()

    return traced
