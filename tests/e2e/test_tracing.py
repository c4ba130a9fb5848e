"""Spans of real engines: from the request through lookup, load and store of the ranks to the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.engine import EngineSpec, kvpool_transfer_config
from tests.e2e.conftest import FLOAT32, PATIENT, hit_tokens, prompt, running
from tests.support.otlp_collector import Span, collecting
from tests.support.processes import ServerProcess, wait_for
from tests.support.real_engines import drain, one_by_one

pytestmark = pytest.mark.vllm

LENGTH = 400
FULL = hit_tokens(LENGTH)
SERVER, CLIENT = "kvpool-server", "kvpool-client"


def test_a_request_of_a_real_engine_is_one_trace_down_to_the_server(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        server = ServerProcess(tmp_path, "--memory", "64MiB", "--otel")
        try:
            transfer = kvpool_transfer_config(server.endpoint, otel=True, **PATIENT)
            specs = [EngineSpec(model, transfer, FLOAT32, environment, in_process=True) for _ in range(2)]
            with running(tmp_path, *specs) as (writer, reader):
                (first,) = one_by_one(writer, [prompt(LENGTH, "traced")])
                drain(writer)
                (second,) = one_by_one(reader, [prompt(LENGTH, "traced")])
            assert (first.tokens, second.cached_tokens) == (second.tokens, FULL)

            def children(parent: Span, name: str) -> list[Span]:
                return [span for span in collector.named(name) if span.parent == parent.id]

            def requests(name: str) -> list[Span]:
                """Those of which a rank has made a span."""
                return [collector.of(span.parent) for span in collector.named(name)]

            wait_for(lambda: collector.named("kvpool.load.rank"), "the span of the rank's load")
            stored = {span.id: span for span in requests("kvpool.store.rank")}.values()
            assert {span.name for span in stored} == {"kvpool.request"}
            (load,) = requests("kvpool.load.rank")
            assert load.name == "kvpool.load" and load.attributes["kvpool.security.tokens"] == FULL
            request = collector.of(load.parent)
            assert (request.name, request.service, request.parent) == ("kvpool.request", CLIENT, "")
            assert request.attributes["kvpool.computed_tokens.last_block"] == LENGTH - FULL
            (lookup,) = children(request, "kvpool.lookup")
            assert lookup.attributes["kvpool.hit_tokens"] == FULL
            (answered,) = children(lookup, "kvpool.lookup")
            assert answered.service == SERVER and answered.attributes["kvpool.leading_blocks"] > 0
            (of_rank,) = children(load, "kvpool.load.rank")
            assert {span.trace for span in (load, lookup, answered, of_rank)} == {request.trace}
            assert {span.failed for span in collector.spans} == {""}
            ended = [span for span in stored if span.attributes["kvpool.computed_tokens.never_stored"] == FULL]
            assert len(ended) == 1 and ended[0].trace != request.trace
        finally:
            server.stop()
