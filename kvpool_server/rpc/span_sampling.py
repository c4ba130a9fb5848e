"""Which spans a server exports where its callers are authenticated: clients may ask for fewer, never for more.

The operator's sampler (OTEL_TRACES_SAMPLER) decides about each trace as if the trace began here, and a span is exported
if the client has sampled its trace, too. Clients choose trace ids, by which samplers of a ratio decide; so the server's
decision is that of a keyed digest of the id, which is the same for all spans of the trace and which no client foresees.

Imported with `--otel` alone: without it OpenTelemetry need not be installed.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult

_ID_BYTES = 16


class OwnSampling(Sampler):
    """Samples as the operator's sampler does, of traces that the client samples, too. The key is secret."""

    def __init__(self, sampler: Sampler, key: bytes | None = None):
        self._sampler = sampler
        self._key = key or secrets.token_bytes(_ID_BYTES)

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: Any = None,
        attributes: Any = None,
        links: Sequence[Any] | None = None,
        trace_state: Any = None,
    ) -> SamplingResult:
        """The operator's decision about a span whose parent is the client's, unless that about a new trace is no."""
        packed = trace_id.to_bytes(_ID_BYTES, "big")
        drawn = int.from_bytes(hashlib.blake2b(packed, digest_size=_ID_BYTES, key=self._key).digest(), "big")
        rest = name, kind, attributes, links, trace_state
        own = self._sampler.should_sample(Context(), drawn, *rest)
        if own.decision is Decision.DROP:
            return own
        return self._sampler.should_sample(parent_context, drawn, *rest)

    def get_description(self) -> str:
        """Of the sampler, as OpenTelemetry asks for it."""
        return f"OwnSampling{{{self._sampler.get_description()}}}"
