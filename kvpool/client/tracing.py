"""Spans for OpenTelemetry, off by default: nothing of OpenTelemetry is imported before somebody makes a `Tracing`.

A span's context travels as a W3C `traceparent`, in the metadata of gRPC calls and in the messages of the lookup stream.
Exporter, sampler and queue are the SDK's, as the standard OTEL_* variables of the environment set them up. Spans are
exported by a thread of the SDK from a bounded queue: an exporter that fails or hangs loses spans, and nothing waits.

Source: W3C Trace Context; OpenTelemetry specification.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc

from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import ConfigError

TRACEPARENT = "traceparent"
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
CLOSE_S = 2.0
"""How long the end of a process waits for the last spans to be exported."""
CLIENT_SERVICE, SERVER_SERVICE = "kvpool-client", "kvpool-server"
"""Names of services, unless OTEL_SERVICE_NAME is set."""

Attributes = Mapping[str, str | int | float | bool]


def valid_traceparent(text: str) -> str:
    """The same text; empty if it is no W3C traceparent."""
    return text if _TRACEPARENT.fullmatch(text) else ""


class Tracing:
    """Makes the spans of one service. Thread-safe.

    Args:
        service: the service's name, unless OTEL_SERVICE_NAME is set.
        sampling: makes the sampler from that of the environment; None: it is that one.

    Raises ConfigError without the packages of the extra `otel`, or with an environment that they cannot use.
    """

    def __init__(self, service: str, sampling: Callable[[Any], Any] | None = None):
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"otel needs OpenTelemetry, and {error.name} is not installed; install it with "
                "`pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc`, or turn otel off"
            ) from None
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
        try:
            sampler = sampling and sampling(TracerProvider(shutdown_on_exit=False).sampler)
            self._provider = TracerProvider(sampler, Resource.create(named), id_generator=_own_ids())
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"otel: OpenTelemetry refuses the OTEL_* variables of the environment: {error}") from None
        self._trace = trace
        self._last: tuple[Any, str] = None, ""  # The span of which `current` was asked last, and its context.
        self._propagator = TraceContextTextMapPropagator()
        self._tracer = self._provider.get_tracer("kvpool")
        atexit.register(self.close)

    def start(
        self, name: str, parent: str = "", attributes: Attributes | None = None, *, kind: str = "INTERNAL"
    ) -> Any:
        """Starts a span of a kind, "INTERNAL", "CLIENT" or "SERVER"; `end` it.

        Args:
            parent: traceparent; empty: the span that is current on this thread or task, or none.
        """
        context = self._propagator.extract({TRACEPARENT: parent}) if valid_traceparent(parent) else None
        return self._tracer.start_span(
            name, context=context, kind=self._trace.SpanKind[kind], attributes=dict(attributes or {})
        )

    @contextlib.contextmanager
    def span(
        self, name: str, parent: str = "", attributes: Attributes | None = None, *, kind: str = "INTERNAL"
    ) -> Iterator[Any]:
        """A span around a block, which is current in it. An exception marks it as failed, by its class alone."""
        span = self.start(name, parent, attributes, kind=kind)
        with self._trace.use_span(span, True, record_exception=False, set_status_on_exception=False):
            try:
                yield span
            except BaseException as error:
                self.fail(span, type(error).__name__)
                raise

    def fail(self, span: Any, why: str) -> None:
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, why))

    def traceparent(self, span: Any) -> str:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._trace.set_span_in_context(span))
        return valid_traceparent(carrier.get(TRACEPARENT, ""))

    def current(self) -> str:
        """The context of the span that is current on this thread or task; empty if none is."""
        span = self._trace.get_current_span()
        if span is not self._last[0]:  # A tier's blocks are stored one by one, under one span.
            self._last = span, self.traceparent(span)
        return self._last[1]

    def close(self) -> None:
        """Exports the last spans, for `CLOSE_S` at most. Idempotent."""
        atexit.unregister(self.close)
        thread = threading.Thread(target=self._provider.shutdown, name="kvpool-otel-end", daemon=True)
        thread.start()
        thread.join(CLOSE_S)


@functools.cache
def shared_tracing(service: str) -> Tracing:
    """The `Tracing` of this process for a service: one exporter, however many clients. Raises as `Tracing`."""
    return Tracing(service)


def tracing_of(config: ClientConfig) -> Tracing | None:
    """That of a client; None unless its settings ask for spans. Raises as `Tracing`."""
    return shared_tracing(CLIENT_SERVICE) if config.otel else None


def _own_ids() -> Any:
    """A generator of spans' ids. The SDK's own asks Python's `random`, which vLLM seeds alike in each engine."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class OwnIds(RandomIdGenerator):
        def generate_span_id(self) -> int:
            return secrets.randbelow((1 << 64) - 1) + 1

        def generate_trace_id(self) -> int:
            return secrets.randbelow((1 << 128) - 1) + 1

    return OwnIds()


class ClientInterceptor(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[type-arg]  # Not generic at run time.
    grpc.UnaryStreamClientInterceptor,  # type: ignore[type-arg]
    grpc.StreamUnaryClientInterceptor,  # type: ignore[type-arg]
):
    """Gives each call of a client a span, and the server the span's context. The lookup stream is left alone."""

    def __init__(self, tracing: Tracing):
        self._tracing = tracing

    def _call(self, continuation: Any, details: Any, request: Any) -> Any:
        method = details.method.rpartition("/")[2]
        attributes = {"rpc.system": "grpc", "rpc.service": "kvpool.v1.Pool", "rpc.method": method}
        span = self._tracing.start(f"kvpool.v1.Pool/{method}", attributes=attributes, kind="CLIENT")
        metadata = [*(details.metadata or ()), (TRACEPARENT, self._tracing.traceparent(span))]
        call = continuation(_Details(metadata), request)
        call.add_done_callback(lambda ended: self._ended(span, ended))
        return call

    intercept_unary_unary = intercept_unary_stream = intercept_stream_unary = _call  # type: ignore[assignment]

    def _ended(self, span: Any, call: Any) -> None:
        code = call.code()
        if code is not grpc.StatusCode.OK:
            self._tracing.fail(span, getattr(code, "name", "UNKNOWN"))
        span.end()


class _Details(grpc.ClientCallDetails):
    """Other metadata of a call; gRPC takes everything else from the call's own details."""

    def __init__(self, metadata: Any):
        self.metadata = metadata
