"""A span for each call of the gRPC service, as children of the clients' spans. Used with `--otel` alone.

A lookup's span has what the lookup has found; the other spans have the method. None has names of blocks or tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Any

from google.protobuf.descriptor import MethodDescriptor

from kvpool.client.tracing import TRACEPARENT, Tracing
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.caller import CALLER

LOOKUPS = frozenset({"Lookup", "LookupStream"})
"""Methods whose handler makes a span for each lookup: `lookup_span`."""


def lookup_span(tracing: Tracing, request: pb.LookupRequest) -> AbstractContextManager[Any]:
    """The span of one lookup, also of those of a stream; end it with `describe_lookup`."""
    attributes: dict[str, str | int] = {"rpc.method": "Lookup", "kvpool.runs": len(request.runs), **_caller()}
    return tracing.span("kvpool.lookup", request.traceparent, attributes, kind="SERVER")


def describe_lookup(span: Any, found: pb.LookupResponse) -> None:
    """Gives the span of a lookup what the lookup has found."""
    span.set_attribute("kvpool.leading_blocks", sum(hit.num_leading for hit in found.hits))
    span.set_attribute("kvpool.pending_blocks", sum(hit.num_pending for hit in found.hits))
    span.set_attribute("kvpool.leased", found.lease_id != 0)


def traced(tracing: Tracing, method: MethodDescriptor, behavior: Callable[..., Any]) -> Callable[..., Any]:
    """The same handler of a method, with a span around each call."""
    service = method.containing_service.full_name
    name = f"{service}/{method.name}"
    attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method.name}

    async def one_reply(request: Any, context: Any) -> Any:
        with tracing.span(name, _parent(context), {**attributes, **_caller()}, kind="SERVER"):
            return await behavior(request, context)

    async def replies(request: Any, context: Any) -> AsyncIterator[Any]:
        # Not the current span: a generator may be closed in another task's context.
        span = tracing.start(name, _parent(context), {**attributes, **_caller()}, kind="SERVER")
        try:
            async for reply in behavior(request, context):
                yield reply
        except BaseException as error:
            if not isinstance(error, GeneratorExit):
                tracing.fail(span, type(error).__name__)
            raise
        finally:
            span.end()

    return replies if method.server_streaming else one_reply


def _caller() -> dict[str, str]:
    caller = CALLER.get()
    return {} if caller is None else {"kvpool.tenant": caller.tenant, "kvpool.role": str(caller.role)}


def _parent(context: Any) -> str:
    """The traceparent of a call's metadata; empty without one."""
    return next((str(value) for name, value in context.invocation_metadata() or () if name == TRACEPARENT), "")
