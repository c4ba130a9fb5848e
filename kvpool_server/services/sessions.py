"""What a client asks before anything else: a namespace, whether the server lives, and what the caller may do."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import structlog

from kvpool import wire
from kvpool.errors import UnknownNamespaceError
from kvpool.principal import Role
from kvpool.types import Offer, OpenedNamespace
from kvpool.v1 import pool_pb2 as pb
from kvpool.version import __version__
from kvpool_server.access.authentication import Who
from kvpool_server.access.caller import (
    CALLER,
    caller_may,
    check_measurement,
    check_tenant,
    own_tenant,
)
from kvpool_server.access.permissions import CALLS
from kvpool_server.method_handlers import METHODS
from kvpool_server.release_gate import ReleaseGate
from kvpool_server.services.served_pool import ServedPool

log = structlog.get_logger()


class SessionService:
    """See the module.

    Args:
        offer: the ways that bytes can travel to and from the arena.
        who: authenticates callers; None: callers are not authenticated.
    """

    def __init__(
        self,
        served: ServedPool,
        offer: Offer,
        who: Who | None,
    ):
        self._served = served
        self._pool = served.pool
        self._offer = offer
        self._who = who
        self._gate = ReleaseGate()
        self._started = time.monotonic()

    async def OpenNamespace(self, request: pb.OpenNamespaceRequest, context: Any) -> pb.OpenNamespaceResponse:
        self._served.drain.check()
        self._gate.check(wire.decode_release(request), wire.decode_opener(request.opener))
        spec = wire.decode_spec(request.spec)
        check_tenant(spec.tenant)
        check_measurement(spec)
        if request.expected_fingerprint not in (b"", spec.fingerprint()):
            # The error that follows says how the two differ.
            self._served.reader.visible(request.expected_fingerprint)
        if not caller_may("PutStart") and self._pool.namespace(spec.fingerprint()) is None:
            raise UnknownNamespaceError(
                f"namespace {spec.fingerprint().hex()[:12]} is not open on this server, and a caller that only reads "
                f"cannot create it; try again when an engine of role {Role.ENGINE_WRITE} has opened it"
            )
        namespace, created = self._pool.open_namespace(
            spec, request.expected_fingerprint, wire.decode_opener(request.opener)
        )
        if created:
            log.info(
                "namespace opened",
                model=namespace.spec.model,
                fingerprint=namespace.fingerprint.hex()[:12],
                block_bytes=[group.slot_bytes for group in namespace.spec.groups],
            )
        offered, most = self._offered(), self._pool.limits.max_batch_blocks
        opened = OpenedNamespace(namespace.fingerprint, offered, created, most)
        return wire.encode_opened(opened, self._served.boot_token)

    async def Ping(self, request: pb.PingRequest, context: Any) -> pb.PingResponse:
        uptime, num_opened = time.monotonic() - self._started, self._pool.num_opened(own_tenant())
        offered, draining = self._offered(), self._served.drain.is_draining
        return wire.encode_pong(__version__, uptime, offered, self._served.boot_token, num_opened, draining=draining)

    def _offered(self) -> Offer:
        """What the caller is offered: the Mooncake engine only if the caller may open namespaces."""
        return self._offer if caller_may("OpenNamespace") else dataclasses.replace(self._offer, mooncake=None)

    async def WhoAmI(self, request: pb.WhoAmIRequest, context: Any) -> pb.WhoAmIResponse:
        caller = CALLER.get()
        if caller is None or self._who is None:
            return pb.WhoAmIResponse(boot_token=self._served.boot_token, methods=sorted(METHODS))
        return pb.WhoAmIResponse(
            boot_token=self._served.boot_token,
            principal=str(caller),
            methods=sorted(CALLS[caller.role]),
            ends_at=int(self._who(context).ends_at.timestamp()),
        )
