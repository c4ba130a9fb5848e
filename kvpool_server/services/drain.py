"""An operator's wish to take the server out of service."""

from __future__ import annotations

from typing import Any

from kvpool import wire
from kvpool.errors import UnavailableError
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.services.served_pool import ServedPool


class DrainService:
    """See the module."""

    def __init__(self, served: ServedPool):
        self._boot_token = served.boot_token
        self._drain = served.drain

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        if request.boot_token not in (0, self._boot_token):
            raise UnavailableError("the server that was to drain has ended, and another one has taken its place")
        return wire.encode_drain(await self._drain.begin(request.deadline_ms), self._boot_token)
