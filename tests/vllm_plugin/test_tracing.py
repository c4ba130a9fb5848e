"""Spans of an engine's requests: children of what vLLM was told, parents of what ranks and the server do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from kvpool.client.tracing import shared_tracing
from tests.support.otlp_collector import Collector, collecting
from tests.support.processes import wait_for
from tests.support.toy.fixtures import BLOCK_TOKENS
from tests.support.toy.fleet import Fleet
from tests.support.vllm_objects import make_request, tokens
from tests.vllm_plugin.core import MakeCore, fill
from vllm_plugin.worker.copy import CpuCopier

LENGTH = 100
TRACE, PARENT = "a" * 32, "b" * 16


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        shared_tracing.cache_clear()
        yield collector
        shared_tracing.cache_clear()


def test_a_request_its_lookup_and_its_load(collector: Collector, core: MakeCore) -> None:
    one = core(otel=True).connected()
    request: Any = make_request("r", tokens(LENGTH, "r"))
    request.trace_headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    fill(one, request.block_hashes)
    hit = one.ask(request)
    assert hit == (LENGTH - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    request.prefill_stats.set(LENGTH, 0, hit)
    one.allocate(request, hit)
    (job,) = one.side.loads.new
    one.report(finished_recving={"r"})
    one.finish(request)
    wait_for(lambda: collector.named("kvpool.request"), "the request's span")
    (span,) = collector.named("kvpool.request")
    assert (span.trace, span.parent) == (TRACE, PARENT)
    assert span.attributes["kvpool.request_id"] == "r" and span.attributes["kvpool.prompt_tokens"] == LENGTH
    (lookup,) = (each for each in collector.named("kvpool.lookup") if each.service == "kvpool-client")
    (load,) = collector.named("kvpool.load")
    assert lookup.parent == load.parent == span.id and lookup.trace == load.trace == TRACE
    assert lookup.attributes["kvpool.hit_tokens"] == hit and load.attributes["kvpool.tokens"] == hit
    assert job.traceparent == f"00-{TRACE}-{load.id}-01"
    assert not one.side._spans._open


def test_each_rank_makes_spans_of_its_stores_and_loads(collector: Collector, fleet: Fleet) -> None:
    prompt = tokens(LENGTH, "ranks")
    writer, reader = (fleet.start(extra={"otel": True}, tp_size=2) for _ in range(2))
    (expected,) = writer.generate(prompt)
    wait_for(lambda: len(collector.named("kvpool.store.rank")) >= 2, "both ranks' stores")
    assert reader.generate(prompt) == [expected]
    wait_for(lambda: len(collector.named("kvpool.load.rank")) == 2, "both ranks' loads")
    wait_for(lambda: len(collector.named("kvpool.request")) == 2, "both requests' spans")
    stores, loads = collector.named("kvpool.store.rank"), collector.named("kvpool.load.rank")
    assert {collector.of(store.parent).name for store in stores} == {"kvpool.request"}
    assert {store.trace for store in stores} != {load.trace for load in loads}
    (load,) = {span.parent for span in loads}
    assert collector.of(load).name == "kvpool.load" and {span.trace for span in loads} == {collector.of(load).trace}
    assert [span.attributes["kvpool.blocks"] for span in loads] == [LENGTH // BLOCK_TOKENS] * 2
    for parents in (stores, loads):
        assert len({span.attributes["kvpool.thread"] for span in parents}) == 2, "each rank has threads of its own"
    calls = [span for span in collector.named("kvpool.v1.Pool/PutStart") if span.service == "kvpool-client"]
    assert {call.parent for call in calls} <= {store.id for store in stores} and calls
    assert {span.failed for span in (*stores, *loads)} == {""}


def test_a_load_that_fails_is_a_failed_span(collector: Collector, fleet: Fleet) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a copy that fails")

    prompt = tokens(LENGTH, "lost")
    writer, reader = fleet.start(), fleet.start(extra={"otel": True})
    expected = writer.generate(prompt)
    with patch.object(CpuCopier, "scatter", fails):
        assert reader.generate(prompt) == expected
    wait_for(lambda: collector.named("kvpool.request"), "the request's span")
    (load,), (of_rank,) = collector.named("kvpool.load"), collector.named("kvpool.load.rank")
    assert (load.failed, of_rank.failed, of_rank.parent) == ("load failed", "RuntimeError", load.id)
