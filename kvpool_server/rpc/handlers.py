"""What the handlers of all RPCs share: the parts of the server, the caller, and the reading of requests.

gRPC's handlers of the methods are made here: bytes in, the method of a service, bytes out. With `--otel` each call but
a health check has a span, a child of the client's: a lookup's span has what the lookup has found, the others have the
method, and none has names of blocks or tokens.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from kvpool.client.tracing import TRACEPARENT, Tracing
from kvpool.protocol import wire
from kvpool.protocol.errors import InvalidRequestError, OutOfSpaceError
from kvpool.protocol.messages import MESSAGE_BYTES
from kvpool.protocol.types import BlockRun, PutGrant, check_hash
from kvpool.protocol.wire import SERVICE_NAME
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.authentication import Context, Who
from kvpool_server.access.caller import CALLER, is_visible
from kvpool_server.cache.leases import Owner
from kvpool_server.cache.namespaces import unknown_namespace
from kvpool_server.cache.steps import Steps, finish
from kvpool_server.data_plane.permits import PermitTable
from kvpool_server.observability.metrics import RpcMetrics
from kvpool_server.reports.engines import EngineReports
from kvpool_server.reports.usage_ledger import UsageLedger
from kvpool_server.rpc.buffers import MAX_REQUEST_BYTES, REQUEST, Inbox, Outbox
from kvpool_server.rpc.drain import Drain
from kvpool_server.rpc.turns import Turns
from kvpool_server.tiering.tiered_pool import TieredPool

_SERVICE = pb.DESCRIPTOR.services_by_name["Pool"]
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
HEALTH_NAME: str = _HEALTH.full_name
METHODS = frozenset(method.name for method in _SERVICE.methods)
CHECK = "Check"
assert CHECK not in METHODS, "every role may call it"
MAX_FIELDS = 9_216
"""Of a message, without those of its parts: more than any request needs. Each may become an object of a hundred bytes
that was sent as two, and none has been counted when the message is decoded."""
WITHOUT_OWN_SPAN = frozenset({"Lookup", "LookupStream", CHECK})
"""Methods without a span for each call: handlers of lookups make one for each lookup, also for those of a stream."""
_TRACE_ID_BYTES = 16
COUNTED_PER_STEP = 256
AT_ONCE_BYTES = 24 << 10
"""A message of so many bytes is decoded, and its work begun, in half a millisecond. A larger one waits for a turn."""

_Message = TypeVar("_Message", bound=Message)


@dataclass(kw_only=True, eq=False)
class Handlers:
    """The parts of one server that its RPCs use. Each RPC is the method of its name in a subclass.

    Args:
        memory: the arena, uint8 [arena_bytes].
        boot_token: in each reply; it names this start of the server.
        metrics: counts bytes, and the lookups of streams.
        offer: the transports to and from the arena.
        value: what other arena sizes would hit, of a tenant or of all.
        permits: None: the server has no data port.
        who: None: callers are not authenticated.

    Attributes:
        leases_of_servers: the connection of each lease of another server, by the lease's id.
    """

    tiered: TieredPool
    memory: npt.NDArray[np.uint8]
    boot_token: int
    drain: Drain
    turns: Turns
    metrics: RpcMetrics
    offer: pb.PingResponse
    stats: Callable[[], pb.StatsResponse]
    reports: EngineReports
    value: Callable[[str | None], pb.ValueResponse]
    ledger: UsageLedger | None = None
    permits: PermitTable | None = None
    who: Who | None = None
    tracing: Tracing | None = None

    def __post_init__(self) -> None:
        self.pool = self.tiered.pool
        self.run = self.turns.run
        self.inbox, self.outbox = Inbox(), Outbox()
        self.leases_of_servers: dict[int, str] = {}

    def fingerprint(self, name: bytes) -> bytes:
        """The fingerprint of a request's namespace. Raises as `check_visible`."""
        check_hash(name, "namespace")
        self.check_visible(name)
        return name

    def check_visible(self, fingerprint: bytes) -> None:
        """Raises UnknownNamespaceError for a namespace of another tenant, with the message of one that is not open."""
        namespace = self.pool.namespace(fingerprint)
        if not is_visible(namespace.spec.tenant if namespace is not None else None):
            raise unknown_namespace(fingerprint)

    def put_start(self, fingerprint: bytes, *put: Any) -> Steps[PutGrant]:
        """As `Pool.put_start_in_steps`; other servers' leases on the tenant's blocks end if the put lacks room."""
        try:
            return (yield from self.pool.put_start_in_steps(fingerprint, *put))
        except OutOfSpaceError:
            tenant = self.pool.namespaces.get(fingerprint).tenant
            held = filter(None, map(self.pool.leases.get, self.leases_of_servers))
            # Where callers are not authenticated, a client may read in shared memory under a lease that has ended.
            theirs = [each for each in held if each.owner.tenant and each.entries[0].group.tenant == tenant]
            if not sum(self.pool.release([each.id], each.owner) for each in theirs):
                raise
        return (yield from self.pool.put_start_in_steps(fingerprint, *put))

    def runs(self, runs: Sequence[pb.BlockRun], max_blocks: int = 0) -> list[BlockRun]:
        """The runs of a request, of `max_batch_blocks` blocks at most by default. Raises InvalidRequestError."""
        self.check_count(len(runs), "runs", self.pool.limits.max_runs)
        return wire.decode_runs(runs, max_blocks or self.pool.limits.max_batch_blocks)

    def check_count(self, count: int, what: str, most: int = 0) -> None:
        """Raises InvalidRequestError if a request names more things than `most`, by default `max_batch_blocks`."""
        most = most or self.pool.limits.max_batch_blocks
        if count > most:
            raise InvalidRequestError(f"{count} {what} in one message; give at most {most}, and split larger ones")


def owner_of(context: Context) -> Owner:
    """The owner of a call's leases and tickets: its caller or, where callers are not authenticated, its connection."""
    caller = CALLER.get()
    return Owner(context.peer()) if caller is None else Owner(str(caller), caller.tenant)


def add_service(service: Handlers, server: grpc.aio.Server) -> None:
    """Registers a handler for each method of the service in the proto, and for health checks.

    Health's Watch, whose calls last as long as their clients, is not served.
    """
    for name, methods in ((SERVICE_NAME, _SERVICE.methods), (HEALTH_NAME, [_HEALTH.methods_by_name[CHECK]])):
        handlers = {method.name: _handler(service, method) for method in methods}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


def decode_in_steps(message_type: type[_Message], message: bytes) -> Steps[_Message]:
    """Raises InvalidRequestError if the bytes are no such message, or have too many fields."""
    try:
        if len(message) >= MESSAGE_BYTES and (yield from _num_fields(message)) > MAX_FIELDS:
            raise InvalidRequestError(f"the request has more than {MAX_FIELDS} fields; split it")
        return message_type.FromString(message)
    except DecodeError:
        name = message_type.DESCRIPTOR.name
        raise InvalidRequestError(f"the request is no {name}; see kvpool/v1/pool.proto") from None


async def decoded(turns: Turns, message_type: type[_Message], message: bytes) -> _Message:
    """As `decode_in_steps`; a larger message when it is its caller's turn."""
    if len(message) <= AT_ONCE_BYTES:
        return finish(decode_in_steps(message_type, message))
    await turns.wait()
    return await turns.run(decode_in_steps(message_type, message))


def _num_fields(message: bytes) -> Steps[int]:
    """How many fields a message has, as far as `MAX_FIELDS` + 1. Raises DecodeError if it is none."""
    at, count = 0, 0
    while at < len(message) and count <= MAX_FIELDS:
        count += 1
        if count % COUNTED_PER_STEP == 0:
            yield
        tag, at = _varint(message, at)
        match tag & 7:
            case 0:
                at = _varint(message, at)[1]
            case 1:
                at += 8
            case 2:
                nbytes, at = _varint(message, at)
                at += nbytes
            case 5:
                at += 4
            case _:  # A group, which no message of the service has.
                raise DecodeError
    return count


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number of up to 64 bits at a place, and the place behind it."""
    if at < len(message) and (byte := message[at]) < 128:  # Nearly all.
        return byte, at + 1
    value = 0
    for nth, byte in enumerate(message[at : at + 10]):
        value |= (byte & 127) << 7 * nth
        if byte < 128:
            return value, at + nth + 1
    raise DecodeError


def _handler(service: Handlers, method: MethodDescriptor) -> grpc.RpcMethodHandler[Any, Any]:
    """Gets messages as bytes from gRPC, whether the method has one or many: the inbox bounds and awaits them.

    The replies of a method that may send many are bytes already.
    """
    behavior, inbox = getattr(service, method.name), service.inbox
    if service.tracing is not None and method.name not in WITHOUT_OWN_SPAN:
        behavior = _traced(service.tracing, method, behavior)
    message_type = GetMessageClass(method.input_type)
    encode = GetMessageClass(method.output_type).SerializeToString
    if method.client_streaming and method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(behavior, None, bytes)
    if method.client_streaming:

        async def requests_of(messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for message in messages:
                if inbox.has_many_streams:
                    await service.turns.wait()
                yield await service.turns.run(decode_in_steps(message_type, message))

        async def of_stream(_: object, context: Context) -> Any:
            async with aclosing(inbox.stream(context)) as messages:
                return await behavior(requests_of(messages), context)

        return grpc.stream_unary_rpc_method_handler(of_stream, None, encode)
    has_lists = any(field.is_repeated for field in method.input_type.fields)
    most = MAX_REQUEST_BYTES if has_lists else MESSAGE_BYTES
    if method.name in ("OpenNamespace", "SetQuotas", "Report"):  # What they send is kept.
        most = service.pool.limits.max_spec_bytes

    async def of_one(_: object, context: Context) -> Any:
        request = await decoded(service.turns, message_type, await inbox.receive(context, most))
        REQUEST.set(request)
        return await behavior(request, context)

    async def replies(_: object, context: Context) -> AsyncIterator[bytes]:
        message = await inbox.receive(context, most)
        async with inbox.slot(context):
            request = await decoded(service.turns, message_type, message)
            async with aclosing(behavior(request, context)) as messages:
                async for message in messages:
                    yield message
                    if inbox.has_many_streams:
                        await service.turns.wait()

    if method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(replies, None, bytes)
    return grpc.stream_unary_rpc_method_handler(of_one, None, encode)


def _traced(tracing: Tracing, method: MethodDescriptor, behavior: Callable[..., Any]) -> Callable[..., Any]:
    """The same handler of a method, with a span around each call."""
    service = method.containing_service.full_name
    name = f"{service}/{method.name}"
    attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method.name}

    async def one_reply(request: Any, context: Any) -> Any:
        with tracing.span(name, _parent(context), {**attributes, **attributes_of_caller()}, kind="SERVER"):
            return await behavior(request, context)

    async def replies(request: Any, context: Any) -> AsyncIterator[Any]:
        # Not the current span: a generator may be closed in another task's context.
        span = tracing.start(name, _parent(context), {**attributes, **attributes_of_caller()}, kind="SERVER")
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


def attributes_of_caller() -> dict[str, str]:
    """What a span tells of the caller."""
    caller = CALLER.get()
    return {} if caller is None else {"kvpool.tenant": caller.tenant, "kvpool.role": str(caller.role)}


def _parent(context: Any) -> str:
    """The traceparent of a call's metadata; empty without one."""
    return next((str(value) for name, value in context.invocation_metadata() or () if name == TRACEPARENT), "")


def own_sampling(sampler: Any, key: bytes = b"") -> Any:
    """A sampler with which clients may ask for fewer spans, never for more.

    The operator's `sampler` (OTEL_TRACES_SAMPLER) decides about each trace as if the trace began here, and a span is
    exported if the client has sampled its trace, too. Clients choose trace ids, by which samplers of a ratio decide; so
    the decision is that of a keyed digest of the id, the same for all spans of the trace, which no client foresees.

    Args:
        key: secret; by default a random one.
    """
    from opentelemetry.context import Context  # OpenTelemetry is installed where there is tracing alone.
    from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult

    key = key or secrets.token_bytes(_TRACE_ID_BYTES)

    class OwnSampling(Sampler):
        def should_sample(
            self, parent_context: Context | None, trace_id: int, name: str, *rest: Any, **others: Any
        ) -> SamplingResult:
            packed = trace_id.to_bytes(_TRACE_ID_BYTES, "big")
            drawn = int.from_bytes(hashlib.blake2b(packed, digest_size=_TRACE_ID_BYTES, key=key).digest(), "big")
            own: SamplingResult = sampler.should_sample(Context(), drawn, name, *rest, **others)
            if own.decision is Decision.DROP:
                return own
            return sampler.should_sample(parent_context, drawn, name, *rest, **others)  # type: ignore[no-any-return]

        def get_description(self) -> str:
            return f"OwnSampling{{{sampler.get_description()}}}"

    return OwnSampling()
