"""The RPCs of a client's session: OpenNamespace, Ping, WhoAmI, Report; and health checks."""

from __future__ import annotations

import time
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2

from kvpool.protocol import wire
from kvpool.protocol.errors import IncompatibleReleaseError, InvalidRequestError, UnknownNamespaceError
from kvpool.protocol.namespace import OWN, Release, check_skew
from kvpool.protocol.reports import MAX_STAGES
from kvpool.protocol.text import printable
from kvpool.security.principal import Role
from kvpool.v1 import pool_pb2 as pb
from kvpool.version import __version__
from kvpool_server.access.caller import CALLER, CALLS, caller_may, check_measurement, check_tenant, own_tenant
from kvpool_server.cache.namespaces import unknown_namespace
from kvpool_server.rpc.handlers import METHODS, Handlers

log = structlog.get_logger()

MAX_OPENER_CHARS = 64
"""Of a host's name, which stands in logs; longer ones are cut."""
MAX_LOGGED = 64
"""Refused clients that are logged: a client that is refused asks again every few seconds."""


class SessionHandlers(Handlers):
    """Namespaces that clients open, what the server offers them, and what engines report.

    Attributes:
        is_serving: what health checks are told.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_serving = False
        self._started = time.monotonic()
        self._refused: set[tuple[str, Release]] = set()

    async def OpenNamespace(self, request: pb.OpenNamespaceRequest, context: Any) -> pb.OpenNamespaceResponse:
        self.drain.check()
        opener = printable(request.opener[:MAX_OPENER_CHARS])
        self._check_release(wire.decode_release(request), opener)
        spec = wire.decode_spec(request.spec)
        check_tenant(spec.tenant)
        check_measurement(spec)
        if request.expected_fingerprint not in (b"", spec.fingerprint()):
            self.check_visible(request.expected_fingerprint)  # The error that follows says how the two differ.
        if not caller_may("PutStart") and self.pool.namespace(spec.fingerprint()) is None:
            raise UnknownNamespaceError(
                f"namespace {spec.fingerprint().hex()[:12]} is not open on this server, and a caller that only reads "
                f"cannot create it; try again when an engine of role {Role.ENGINE_WRITE} has opened it"
            )
        namespace, created = self.pool.open_namespace(spec, request.expected_fingerprint, opener)
        if created:
            log.info(
                "namespace opened",
                model=namespace.spec.model,
                fingerprint=namespace.fingerprint.hex()[:12],
                block_bytes=[group.slot_bytes for group in namespace.spec.groups],
            )
        return pb.OpenNamespaceResponse(
            boot_token=self.boot_token,
            fingerprint=namespace.fingerprint,
            created=created,
            max_batch_blocks=self.pool.limits.max_batch_blocks,
            protocol=OWN.protocol,
            release=OWN.version,
            **self._offered(),
        )

    def _check_release(self, client: Release, opener: str) -> None:
        """Raises IncompatibleReleaseError for a client of an incompatible release, and logs the first of each host."""
        try:
            check_skew(client, OWN)
        except IncompatibleReleaseError as error:
            if (opener, client) not in self._refused and len(self._refused) < MAX_LOGGED:
                self._refused.add((opener, client))
                log.warning("refused a client of another release", client=opener, reason=str(error))
            raise

    def _offered(self) -> dict[str, Any]:
        """The transports for the caller: the Mooncake engine only if the caller may open namespaces."""
        may_open = caller_may("OpenNamespace")
        return {field.name: value for field, value in self.offer.ListFields() if may_open or field.name != "mooncake"}

    async def Ping(self, request: pb.PingRequest, context: Any) -> pb.PingResponse:
        return pb.PingResponse(
            boot_token=self.boot_token,
            version=__version__,
            uptime_seconds=time.monotonic() - self._started,
            namespaces_opened=self.pool.namespaces.num_opened(own_tenant()),
            draining=self.drain.is_draining,
            protocol=OWN.protocol,
            **self._offered(),
        )

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        if request.service not in ("", wire.SERVICE_NAME):
            context.set_code(grpc.StatusCode.NOT_FOUND)
            context.set_details(f"no such service; the service is {wire.SERVICE_NAME}")
        answers = health_pb2.HealthCheckResponse
        return answers(status=answers.SERVING if self.is_serving else answers.NOT_SERVING)

    async def WhoAmI(self, request: pb.WhoAmIRequest, context: Any) -> pb.WhoAmIResponse:
        caller = CALLER.get()
        if caller is None or self.who is None:
            return pb.WhoAmIResponse(boot_token=self.boot_token, methods=sorted(METHODS))
        return pb.WhoAmIResponse(
            boot_token=self.boot_token,
            principal=str(caller),
            methods=sorted(CALLS[caller.role]),
            ends_at=int(self.who(context).ends_at.timestamp()),
        )

    async def Report(self, request: pb.ReportRequest, context: Any) -> pb.ReportResponse:
        if not 1 <= (count := len(request.namespaces)) <= MAX_STAGES:
            raise InvalidRequestError(f"{count} namespaces in one report; give 1 to {MAX_STAGES}")
        fingerprints = [self.fingerprint(name) for name in request.namespaces]
        first = self.pool.namespace(fingerprints[0])
        if first is None:
            raise unknown_namespace(fingerprints[0])
        counted = self.reports.report(request, first.spec.tenant, first.spec.model)
        return pb.ReportResponse(boot_token=self.boot_token, counted=counted)
