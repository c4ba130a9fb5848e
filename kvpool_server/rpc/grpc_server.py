"""The gRPC server: the pool's service, health checks and reflection on one port."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import functools
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf.descriptor_pb2 import MethodOptions
from grpc_reflection.v1alpha import reflection

from kvpool.protocol import wire
from kvpool.protocol.errors import BusyError, KVPoolError, OutOfSpaceError, PermissionDeniedError, UnauthenticatedError
from kvpool.protocol.messages import MESSAGE_BYTES
from kvpool.protocol.wire import MAX_MESSAGE_BYTES, SERVICE_NAME
from kvpool.security.principal import Role
from kvpool.transport.unix_socket import SCHEME, grpc_target
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.audit import CHANGES, AuditLog, audited
from kvpool_server.access.authentication import Context, RefusedCredentialError
from kvpool_server.access.caller import CALLER, RunningCalls, check_call
from kvpool_server.process.addresses import bind_path, cannot_bind, held, listening
from kvpool_server.process.runtime import FLOW
from kvpool_server.rpc.blocks import BlockHandlers
from kvpool_server.rpc.buffers import MAX_STREAM_S, REQUEST, pace
from kvpool_server.rpc.chunks import ChunkHandlers
from kvpool_server.rpc.handlers import CHECK, HEALTH_NAME, add_service, owner_of
from kvpool_server.rpc.operators import OperatorHandlers
from kvpool_server.rpc.sessions import SessionHandlers
from kvpool_server.rpc.turns import call_with_its_work
from kvpool_server.sharing import Shares

log = structlog.get_logger()

MAX_CALLS = 4_096
"""Calls at once, streams of lookups included. A caller may have its share (`Shares`), so that one leaves more than
half to others; gRPC itself refuses all beyond, of one queue."""
RESERVED_CALLS = 64
"""Beside them, for operators and health checks."""
MAX_PENDING, MAX_CONNECTIONS = 4_096, 1_024
"""Of one queue. gRPC closes all connections beyond."""
HANDSHAKE_S = 8.0
"""How long the handshake of a TLS connection may take, which counts among them."""
QUEUES = 4
"""In which calls wait to be handed over, those of a connection in one of them; the Unix socket's have one more. gRPC
hands over one call after the other from each, with two changes of threads, so that one queue alone keeps a new call
waiting for as many as all connections may have."""
MAX_STREAMS = 18
"""Calls at once on one connection. A new call waits for as many as all connections of its queue may have, each with a
whole message. gRPC counts a call that has ended, or that its client resets, until the event loop has seen that: without
this bound one connection that begins and resets calls takes all of `MAX_CALLS`, before any credentials are read. A
client with nearly as many calls at once sees some refused."""
MAX_METADATA_BYTES = 16 << 10
MAX_TOLD, TOLD_EVERY_S = 64, 60.0
"""Callers beyond a limit that the log names, and how often each."""
REFUSED = "refused"
"""The flow of all calls that are not admitted."""
CONNECTION_S = 2_700.0
"""How old a connection becomes before its client has to make another, by which both sides of TLS prove anew who they
are. gRPC adds up to a tenth. Calls that run then go on for up to `MAX_STREAM_S`, which no stream exceeds; so those end
whose clients gave no deadline and do not read the reply."""

WITHOUT_EFFECTS = frozenset(
    method.name
    for method in pb.DESCRIPTOR.services_by_name["Pool"].methods
    if method.GetOptions().idempotency_level == MethodOptions.NO_SIDE_EFFECTS
)
"""Methods whose work is of no use once their caller has hung up."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class RpcInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # Not generic at run time.
    """Times the calls of all services, and ends a call that raises a KVPoolError with the error's status and message.

    Where callers are authenticated, a call that the caller's role may not make ends before its handler begins. Every
    role may check the server's health.

    A bidirectional stream is left to its handler from then on: it lasts as long as its client, so the handler answers,
    times and fails each of its requests by itself.

    Args:
        running: gets the calls of authenticated callers.
        audit: gets refused calls, and those that change something for all.
    """

    def __init__(self, service: BlockHandlers, running: RunningCalls | None, audit: AuditLog | None):
        self._service = service
        self._running = running
        self._audit = audit
        self._wrapped: dict[str, Handler] = {}
        # Whose work or reply is under way, by the caller or, where callers are not authenticated, peer.
        self._calls = Shares()
        self._told, self._told_until = set[str](), 0.0

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        wrapped = self._wrapped.get(details.method)
        if wrapped is not None:
            return wrapped
        handler = await continuation(details)
        if handler is None:
            return handler
        return self._wrapped.setdefault(details.method, self._wrap(details.method.rpartition("/")[2], handler))

    def _wrap(self, name: str, handler: Handler) -> Handler:
        serializers: Any = handler.request_deserializer, handler.response_serializer
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(self._one_reply(name, handler.stream_unary, serializers[1]))
        assert handler.stream_stream is not None, "the inbox reads the only message of a call"
        if inspect.isasyncgenfunction(handler.stream_stream):  # One request, which the handler reads.
            return grpc.stream_stream_rpc_method_handler(self._replies(name, handler.stream_stream), *serializers)
        return grpc.stream_stream_rpc_method_handler(self._stream(name, handler.stream_stream), *serializers)

    @contextlib.contextmanager
    def _admitted(self, name: str, context: Context) -> Iterator[str]:
        """Sets the caller of a method, and names it; surrounds its handler. The call counts until its reply is sent.

        Raises UnauthenticatedError, PermissionDeniedError, BusyError if the caller has too many calls under way, and
        OutOfSpaceError if the call changes something, and the audit log is behind.
        """
        FLOW.set(REFUSED)  # Until the call is admitted.
        running: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if (who := self._service.who) is not None:
            assert self._running is not None, "calls of authenticated callers can be ended"
            credential = who(context)
            CALLER.set(credential.principal)
            if name != CHECK:
                check_call(credential.principal, name)
            running = self._running.call(credential)
        caller, principal = owner_of(context).name, CALLER.get()
        if name in CHANGES and self._audit is not None and self._audit.is_behind(str(principal or "")):
            raise OutOfSpaceError(f"{name} changes something, and the audit log is behind with its lines; see its disk")
        has_reserve = name == CHECK or (principal is not None and principal.role is Role.OPERATOR)
        if not self._calls.has_room(caller, 1, MAX_CALLS + has_reserve * RESERVED_CALLS):
            raise BusyError(f"{self._calls.of(caller)} calls of this caller are under way; wait for some to end")
        self._calls.add(caller)
        with call_with_its_work(caller, has_effects=name not in WITHOUT_EFFECTS) as call, running:
            end = functools.partial(self._calls.add, caller, -1)
            _when_done(lambda: call.after_work(end))
            yield caller

    async def _refuse(self, name: str, context: Context, error: KVPoolError) -> None:
        """Ends a call, whose handler returns next, with an error.

        gRPC makes a call again by itself only after `abort`, which sends nothing but the status. What it raises lies in
        a cycle with all that the error's traceback holds, until the collector runs.
        """
        status = wire.status_of(error)
        if self._audit is not None and isinstance(error, UnauthenticatedError | PermissionDeniedError):
            caller = error.principal if isinstance(error, RefusedCredentialError) else CALLER.get()
            self._audit.write(name, status.name, caller=caller, peer=context.peer(), why=str(error))
        if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
            self._name(owner_of(context).name, name, error)
        if isinstance(error, BusyError):
            await context.abort(status, str(error), wire.metadata_of(error.with_traceback(None)))
        context.set_code(status)
        context.set_details(str(error))
        context.set_trailing_metadata(wire.metadata_of(error))

    def _name(self, caller: str, method: str, error: KVPoolError) -> None:
        """Logs who is beyond a limit, once in a while."""
        if (now := time.monotonic()) >= self._told_until:
            self._told, self._told_until = set(), now + TOLD_EVERY_S
        if caller not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(caller)
            log.warning("refused a call beyond a limit", caller=caller, method=method, reason=str(error))

    def _stream(self, name: str, behavior: Callable[..., Any]) -> Any:
        async def call(requests: Any, context: Context) -> Any:
            try:
                with self._admitted(name, context):
                    return await behavior(requests, context)
            except KVPoolError as error:
                await self._refuse(name, context, error)

        return call

    def _one_reply(self, name: str, behavior: Callable[..., Any], encode: Callable[[Any], bytes]) -> Any:
        async def call(request: Any, context: Context) -> Any:
            peer = context.peer()  # Not known any more once the caller has hung up.
            try:
                with self._service.metrics.timed(name) as timer, self._admitted(name, context) as caller:
                    try:
                        reply = await behavior(request, context)
                    finally:
                        # A lookup that waits for a tier is not to be mistaken for a slow one.
                        timer.method = "LookupWait" if getattr(REQUEST.get(), "wait_ms", 0) else name
                    message = encode(reply)
                    unsent = self._service.outbox.hold(
                        caller, message, lambda: self._service.forget(reply, owner_of(context))
                    )
                    if unsent.nbytes:
                        _when_done(unsent.end)
            except KVPoolError as error:  # What was to change may have changed in part.
                self._log(name, wire.status_of(error).name, peer, None)
                return await self._refuse(name, context, error)
            except BaseException as error:  # What has begun goes on, if it changes something for others.
                is_hang_up = isinstance(error, asyncio.CancelledError)
                self._log(name, "CANCELLED" if is_hang_up else "UNKNOWN", peer, None)
                raise
            self._log(name, "OK", peer, reply)
            return message

        return call

    def _log(self, name: str, outcome: str, peer: str, reply: Any) -> None:
        """Adds a line to the audit log, if the call is one that is logged and has got as far as its request."""
        request = REQUEST.get()
        if self._audit is None or request is None or (details := audited(name, request, reply)) is None:
            return
        self._audit.write(name, outcome, caller=CALLER.get(), peer=peer, is_change=True, **details)

    def _replies(self, name: str, behavior: Callable[..., Any]) -> Any:
        async def call(request: Any, context: Context) -> None:
            # A client may hang up before the handler has ended. A handler that has sent all that was asked for by then
            # has set the code to OK.
            context.set_code(grpc.StatusCode.CANCELLED)
            try:
                with self._service.metrics.timed(name, lambda: not context.cancelled()), self._admitted(name, context):
                    async with aclosing(behavior(request, context)) as replies:
                        # Not yielded: a call that is ended while gRPC sends would end without a status.
                        async for reply in replies:
                            nbytes = len(reply) if isinstance(reply, bytes) else reply.ByteSize()  # Of reflection.
                            try:
                                await pace().wait(context.write(reply))
                            except grpc.aio.InternalError:
                                raise asyncio.CancelledError from None  # The client has hung up.
                            pace().moved(nbytes)
                context.set_code(grpc.StatusCode.OK)
            except KVPoolError as error:
                await self._refuse(name, context, error)
            except Exception:
                context.set_code(grpc.StatusCode.UNKNOWN)
                raise

        return call


def _when_done(end: Callable[[], object]) -> None:
    """Calls `end` once gRPC is done with the running call, whose reply is sent then.

    That is when its task ends: a callback of gRPC's own would make a cycle of each call.
    """
    task = asyncio.current_task()
    assert task is not None, "gRPC runs each handler in a task"
    task.add_done_callback(lambda _: end(), context=contextvars.Context())


class PoolService(BlockHandlers, SessionHandlers, OperatorHandlers, ChunkHandlers):
    """Serves one pool: all RPCs of `proto/kvpool/v1/pool.proto`."""


class GrpcServer:
    """Listens on the bound `port` once made; serves from `start` to `stop`. Raises ConfigError if it cannot listen.

    Args:
        unix_path, unix_mode: of a Unix socket, where gRPC listens, too; empty: none.
        credentials: makes those of TLS for one port; None: plaintext.
        running, audit: as of `RpcInterceptor`.
    """

    def __init__(
        self,
        listen: str,
        service: PoolService,
        unix_path: str = "",
        unix_mode: int = 0o600,
        credentials: Callable[[], grpc.ServerCredentials] | None = None,
        running: RunningCalls | None = None,
        audit: AuditLog | None = None,
    ):
        self._service = service
        options = [
            ("grpc.so_reuseport", 1),  # For the queues.
            ("grpc.http2.bdp_probe", 0),
            # Else gRPC answers each surplus ping of a flood with a farewell of its own.
            ("grpc.http2.max_ping_strikes", 0),
            # A client may have sent so much on a call before the server asks for it. gRPC would widen the window for
            # fast senders, without a bound that could be told.
            ("grpc.http2.lookahead_bytes", MESSAGE_BYTES),
            # Else gRPC reads what a connection sends without a pause, frames of all kinds, into ever larger buffers.
            ("grpc.experimental.tcp_max_read_buffer_size", 2 * MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", MESSAGE_BYTES),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
            # gRPC drops some calls by chance while more than these have come and have not been handed over.
            ("grpc.server.max_pending_requests", MAX_PENDING),
            ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
            ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1_000)),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.max_connection_age_ms", int(CONNECTION_S * 1_000)),
            ("grpc.max_connection_age_grace_ms", int(MAX_STREAM_S * 1_000)),
        ]
        interceptors = [RpcInterceptor(service, running, audit)]
        most = MAX_CALLS + RESERVED_CALLS
        self._servers = []
        for _ in range(QUEUES + bool(unix_path)):
            server = grpc.aio.server(interceptors=interceptors, options=options, maximum_concurrent_rpcs=most)
            add_service(service, server)
            if service.who is None:  # Reflection is for those who look around, on a server that hides nothing.
                names = (SERVICE_NAME, HEALTH_NAME, reflection.SERVICE_NAME)
                reflection.enable_server_reflection(names, server)
            self._servers.append(server)
        # Held, since gRPC itself would share the port with another server of this user.
        with listening(listen, "gRPC", "--listen"), held(listen) as self.port:
            for server in self._servers[:QUEUES]:
                try:
                    _add_port(server, f"{listen.rpartition(':')[0]}:{self.port}", credentials)
                except RuntimeError:
                    raise OSError(errno.EADDRNOTAVAIL, "gRPC cannot bind it") from None
        if unix_path:
            target = grpc_target(SCHEME + unix_path)
            try:
                bind_path(unix_path, unix_mode, lambda: _add_port(self._servers[-1], target, credentials))
            except OSError as error:
                raise cannot_bind(unix_path, error) from None
            except RuntimeError:
                raise cannot_bind(unix_path, OSError(errno.EACCES, os.strerror(errno.EACCES))) from None

    async def start(self) -> None:
        self._service.is_serving = True
        for server in self._servers:
            await server.start()

    async def announce_end(self) -> None:
        """Health checks say NOT_SERVING from now on. Calls are answered as before. Idempotent."""
        self._service.is_serving = False

    async def stop(self, grace_s: float = 0.0) -> None:
        """Takes no more calls, and cancels those that have not ended after `grace_s`. Idempotent."""
        await self.announce_end()
        self._service.streams.stop()
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))


def _add_port(server: grpc.aio.Server, target: str, credentials: Callable[[], grpc.ServerCredentials] | None) -> int:
    if credentials is None:
        return server.add_insecure_port(target)
    return server.add_secure_port(target, credentials())
