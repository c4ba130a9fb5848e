"""An OTLP collector in the test's process: a gRPC server that keeps the spans that it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


@dataclass(frozen=True)
class Span:
    """One span.

    Args:
        trace, id, parent: hexadecimal; the parent of a root is empty.
        failed: why; empty if it did not.
    """

    service: str
    name: str
    trace: str
    id: str
    parent: str
    kind: int
    attributes: dict[str, Any]
    failed: str


class Collector(TraceServiceServicer):
    """See the module."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.endpoint = ""

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [
                    Span(
                        service,
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.kind,
                        _values(span.attributes),
                        span.status.message if span.status.code == 2 else "",
                    )
                    for span in scope.spans
                ]
        return pb.ExportTraceServiceResponse()

    def named(self, name: str, **attributes: object) -> list[Span]:
        """The spans of a name that have these attributes, given with _ for a dot."""
        wanted = {key.replace("_", "."): value for key, value in attributes.items()}
        return [
            span
            for span in list(self.spans)
            if span.name == name and all(span.attributes.get(key) == value for key, value in wanted.items())
        ]

    def of(self, span_id: str) -> Span:
        """The span of an id."""
        return next(span for span in self.spans if span.id == span_id)


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens on a free port."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0)
