"""What clients expect of blocks: that they are wanted soon, for long, or no more."""

from __future__ import annotations

from typing import Any

from kvpool import wire
from kvpool.types import HintKind
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.pins import MAX_PIN_S
from kvpool_server.services.served_pool import ServedPool


class HintService:
    """See the module."""

    def __init__(self, served: ServedPool):
        self._tiered = served.tiered
        self._pool = served.pool
        self._boot_token = served.boot_token
        self._drain = served.drain
        self._run = served.run
        self._reader = served.reader

    async def Hint(self, request: pb.HintRequest, context: Any) -> pb.HintResponse:
        fingerprint = self._reader.namespace(request.namespace)
        runs = self._reader.runs(request.runs, self._pool.limits.max_lookup_blocks)
        kind, hints = wire.decode_hint_kind(request.kind), self._pool.hints
        pin_seconds = min(request.pin_seconds, MAX_PIN_S) if kind is HintKind.PIN else 0
        if kind is HintKind.PREFETCH:
            self._drain.check()
            result = await self._tiered.prefetch(fingerprint, runs)
        elif kind is HintKind.EXPIRE:
            result = await self._run(hints.expire_in_steps(fingerprint, runs))
        elif pin_seconds:
            result = await self._run(hints.pin_in_steps(fingerprint, runs, pin_seconds))
        else:
            result = await self._run(hints.unpin_in_steps(fingerprint, runs))
        return wire.encode_hint_result(result, pin_seconds, self._boot_token)
