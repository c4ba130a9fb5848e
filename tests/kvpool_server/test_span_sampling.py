"""Clients may ask a server for fewer spans, and never for more than its operator's sampler exports."""

from __future__ import annotations

import random

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_ON,
    DEFAULT_ON,
    Decision,
    ParentBasedTraceIdRatio,
    Sampler,
    TraceIdRatioBased,
)

from kvpool_server.rpc.span_sampling import OwnSampling

IDS = range(1, 1_001)
"""Of traces: samplers of a ratio sample the lowest ids, so a hostile client chooses such."""
RATIO = 0.25


def parent(trace_id: int, *, is_sampled: bool) -> Context:
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if is_sampled else trace.TraceFlags.DEFAULT)
    span = trace.NonRecordingSpan(trace.SpanContext(trace_id, 7, is_remote=True, trace_flags=flags))
    return trace.set_span_in_context(span)


def is_exported(sampler: Sampler, trace_id: int, *, is_sampled: bool = True) -> bool:
    found = sampler.should_sample(parent(trace_id, is_sampled=is_sampled), trace_id, "name")
    return found.decision is Decision.RECORD_AND_SAMPLE


@pytest.mark.parametrize("operators", [ParentBasedTraceIdRatio(RATIO), TraceIdRatioBased(RATIO)])
def test_sampled_parents_do_not_raise_the_ratio(operators: Sampler) -> None:
    assert all(is_exported(operators, each) for each in IDS), "without a sampling of its own a server exports all"
    sampling = OwnSampling(operators, b"k" * 16)
    exported = {each for each in IDS if is_exported(sampling, each)}
    assert 0.2 < len(exported) / len(IDS) < 0.3
    assert exported == {each for each in IDS if is_exported(sampling, each)}, "a trace is exported whole"
    assert exported != {each for each in IDS if is_exported(OwnSampling(operators), each)}, "nobody foresees which"


def test_a_client_may_ask_for_fewer_spans() -> None:
    sampling = OwnSampling(ParentBasedTraceIdRatio(RATIO))
    assert not any(is_exported(sampling, each, is_sampled=False) for each in IDS)
    assert not is_exported(OwnSampling(DEFAULT_ON), 1, is_sampled=False)
    assert is_exported(OwnSampling(DEFAULT_ON), 1) and is_exported(OwnSampling(ALWAYS_ON), 1)


def test_traces_that_begin_here_have_the_operators_ratio() -> None:
    sampling, rng = OwnSampling(ParentBasedTraceIdRatio(RATIO)), random.Random(0)
    found = [sampling.should_sample(Context(), rng.getrandbits(128), "name").decision for _ in IDS]
    assert 0.2 < found.count(Decision.RECORD_AND_SAMPLE) / len(IDS) < 0.3
