"""Why the pool has, or lacks, the blocks of a prompt."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from kvpool.explanation_messages import encode_explanation, encode_run
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.explainer import Explainer
from kvpool_server.services.served_pool import ServedPool


class ExplanationService:
    """The RPC Explain."""

    def __init__(self, served: ServedPool):
        self._pool = served.pool
        self._boot_token = served.boot_token
        self._reader = served.reader
        self._explainer = Explainer(served.tiered, served.run)

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        fingerprint = self._reader.namespace(request.namespace)
        runs = self._reader.runs(request.runs, self._pool.limits.max_lookup_blocks)
        found = await self._explainer.explain(fingerprint, runs)
        reply = encode_explanation(dataclasses.replace(found, runs=()), self._boot_token)
        for run in found.runs:
            reply.runs.append(encode_run(run))
            await asyncio.sleep(0)  # Other calls do not wait for all runs.
        return reply
