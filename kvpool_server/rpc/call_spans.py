"""A span for each call of the gRPC service, as children of the clients' spans. Used with `--otel` alone.

A lookup's span has what the lookup has found; the other spans have the method. None has names of blocks or tokens.

Where callers are authenticated, clients may ask for fewer spans, never for more: the operator's sampler
(OTEL_TRACES_SAMPLER) decides about each trace as if the trace began here, and a span is exported if the client has
sampled its trace, too. Clients choose trace ids, by which samplers of a ratio decide; so the server's decision is that
of a keyed digest of the id, which is the same for all spans of the trace and which no client foresees.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Any

from google.protobuf.descriptor import MethodDescriptor

from kvpool.client.tracing import TRACEPARENT, Tracing
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.caller import CALLER

LOOKUPS = frozenset({"Lookup", "LookupStream"})
"""Methods whose handler makes a span for each lookup: `lookup_span`."""
_ID_BYTES = 16
"""Of a trace."""


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


def own_sampling(sampler: Any, key: bytes = b"") -> Any:
    """A sampler that samples as the operator's `sampler` does, of traces that the client samples, too.

    Args:
        key: secret; by default a random one.
    """
    from opentelemetry.context import Context  # OpenTelemetry is installed where there is tracing alone.
    from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult

    key = key or secrets.token_bytes(_ID_BYTES)

    class OwnSampling(Sampler):
        def should_sample(
            self, parent_context: Context | None, trace_id: int, name: str, *rest: Any, **others: Any
        ) -> SamplingResult:
            packed = trace_id.to_bytes(_ID_BYTES, "big")
            drawn = int.from_bytes(hashlib.blake2b(packed, digest_size=_ID_BYTES, key=key).digest(), "big")
            own: SamplingResult = sampler.should_sample(Context(), drawn, name, *rest, **others)
            if own.decision is Decision.DROP:
                return own
            return sampler.should_sample(parent_context, drawn, name, *rest, **others)  # type: ignore[no-any-return]

        def get_description(self) -> str:
            return f"OwnSampling{{{sampler.get_description()}}}"

    return OwnSampling()
