"""Spans of a real server and a client arrive at a collector, as children of each other; off, nothing is imported."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

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

from kvpool.client import tracing as module
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.tracing import Tracing, shared_tracing, valid_traceparent
from kvpool.protocol.errors import ConfigError, KVPoolError
from kvpool.security.certificates import Authority
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool_server.rpc.handlers import own_sampling
from tests.support.certificates import files_in, server_flags
from tests.support.otlp_collector import Collector, collecting
from tests.support.processes import ServerProcess, run_command, wait_for
from tests.support.values import group_spec, namespace_spec, payload, run_of

SERVER, CLIENT = 2, 3
"""Kinds of spans."""
BLOCK_BYTES = 1 << 20

IDS = range(1, 1_001)
"""Of traces: samplers of a ratio sample the lowest ids, so a hostile client chooses such."""
RATIO = 0.25


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        patch.setenv("OTEL_EXPORTER_OTLP_INSECURE", "true")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        shared_tracing.cache_clear()
        yield collector
        shared_tracing.cache_clear()


@pytest.fixture(scope="module")
def traced(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """With room for 8 blocks, and a tier below."""
    directory = tmp_path_factory.mktemp("traced")
    tier = f"file:{directory}/tier,size=64MiB,create=yes"
    server = ServerProcess(directory, "--memory", "8MiB", "--policy", "lru", "--otel", "--tier", tier)
    yield server
    server.stop()


@pytest.fixture
def client(traced: ServerProcess) -> Iterator[Client]:
    with Client(ClientConfig(traced.endpoint, otel=True, transport="grpc")) as client:
        yield client


def test_spans_go_from_the_client_through_the_server_to_the_tier(collector: Collector, client: Client) -> None:
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=BLOCK_BYTES)))
    run = run_of(*"abcd")
    tracing = shared_tracing(module.CLIENT_SERVICE)
    with tracing.span("application") as root:
        client.put_blocks(namespace, run, [payload(name, BLOCK_BYTES) for name in "abcd"])
    parent = tracing.traceparent(root).split("-")[2]
    wait_for(lambda: collector.named("kvpool.tier.write"), "the tier's write")
    wait_for(lambda: len(collector.named("kvpool.v1.Pool/PutStart")) == 2, "both sides' spans")
    both = {span.kind: span for span in collector.named("kvpool.v1.Pool/PutStart", rpc_method="PutStart")}
    start, served = both[CLIENT], both[SERVER]
    assert (start.parent, served.parent) == (parent, start.id) and start.trace == served.trace
    assert (start.service, served.service) == ("kvpool-client", "kvpool-server")
    write = collector.named("kvpool.tier.write")[0]
    assert write.trace == start.trace and collector.of(write.parent).name == "kvpool.v1.Pool/PutEnd"
    assert write.attributes["kvpool.tier"].startswith("file:")

    for nth in range(8):  # The blocks leave the arena.
        client.put_blocks(namespace, run_of(f"more {nth}"), [payload(nth, BLOCK_BYTES)])
    wait_for(lambda: client.lookup(namespace, [run]).hits[0].num_leading == 4, "the blocks to come up")
    wait_for(lambda: collector.named("kvpool.tier.read"), "the tier's read")
    read = collector.named("kvpool.tier.read")[0]
    wait_for(lambda: any(span.id == read.parent for span in collector.spans), "the lookup's span")
    lookup = collector.of(read.parent)
    assert (lookup.name, lookup.kind, lookup.service) == ("kvpool.lookup", SERVER, "kvpool-server")
    assert lookup.attributes["kvpool.pending_blocks"] > 0
    wait_for(lambda: any(span.id == lookup.parent for span in collector.spans), "the client's span")
    asked = collector.of(lookup.parent)
    assert (asked.name, asked.kind, asked.attributes["kvpool.blocks"]) == ("kvpool.lookup", CLIENT, 4)
    assert asked.trace == lookup.trace == read.trace


def test_no_span_has_names_of_blocks_or_of_secrets_and_a_call_that_fails_says_so(
    collector: Collector, client: Client
) -> None:
    run = run_of("secret")
    client.lookup(client.open_namespace(namespace_spec(salt="pepper")), [run])
    with pytest.raises(KVPoolError):
        client.admin.clear(bytes(32))
    wait_for(lambda: len(collector.named("kvpool.v1.Pool/Clear")) == 2, "both spans")
    assert {span.failed for span in collector.named("kvpool.v1.Pool/Clear")} == {"NOT_FOUND", "UnknownNamespaceError"}
    texts = " ".join(str(value) for span in collector.spans for value in span.attributes.values())
    assert run.block_hashes[0].hex() not in texts and "pepper" not in texts
    trace_id, span_id = "1" * 32, "1" * 16
    for text in ("", "x", f"00-{'0' * 32}-{span_id}-01", f"ff-{trace_id}-{span_id}-01", "0" * 5_000):
        assert valid_traceparent(text) == ""


@pytest.mark.parametrize("is_authenticated", [False, True])
def test_callers_do_not_decide_what_a_server_that_knows_them_exports(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_authenticated: bool
) -> None:
    authority = Authority.create(tmp_path / "pki")
    flags = server_flags(authority.issue_server([])) if is_authenticated else []
    tls = files_in(authority.issue_principal(Principal("acme", Role.ENGINE_WRITE))) if is_authenticated else None
    monkeypatch.setenv("OTEL_SERVICE_NAME", name := f"sampled {is_authenticated}")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    admin = files_in(authority.issue_principal(Principal(ALL_TENANTS, Role.OPERATOR))) if is_authenticated else None
    server = ServerProcess(tmp_path, "--otel", *flags, tls=admin)
    monkeypatch.delenv("OTEL_TRACES_SAMPLER")  # The client records all.
    try:
        with Client(ClientConfig(server.endpoint, otel=True, transport="grpc", tls=tls)) as client:
            spec = namespace_spec(group_spec(chunk_bytes=BLOCK_BYTES), tenant="acme")
            client.lookup(client.open_namespace(spec), [run_of("a")])
    finally:
        server.stop()  # Exports its last spans.
    names = {span.name for span in collector.spans if span.service == name}
    assert names == set() if is_authenticated else {"kvpool.lookup", "kvpool.v1.Pool/OpenNamespace"} <= names


def test_a_collector_that_is_away_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setattr(module, "CLOSE_S", 0.5)
    away = Tracing("away")
    for _ in range(5_000):  # More than the queue holds.
        away.start("span").end()
    with away.span("current"):
        assert away.current()
    away.close()


SCRIPT = """
import sys
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
import kvpool_server.app.server
from tests.support.values import namespace_spec, run_of
with Client(ClientConfig(sys.argv[1])) as client:
    client.lookup(client.open_namespace(namespace_spec()), [run_of("a")])
print(sorted(name for name in sys.modules if name.startswith("opentelemetry")))
"""


def test_off_nothing_is_imported(shared_server: ServerProcess) -> None:
    done = run_command(sys.executable, "-c", SCRIPT, shared_server.endpoint)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"])
def test_without_the_extra_the_error_names_the_fix(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(missing)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match="pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc"):
        Tracing("none")


def test_engines_that_seed_alike_have_spans_of_their_own() -> None:
    state = random.getstate()
    contexts = []
    try:
        for _ in range(2):
            random.seed(0)
            tracing = Tracing("engine")
            contexts.append(tracing.start("request").get_span_context())
            tracing.close()
    finally:
        random.setstate(state)
    assert contexts[0].trace_id != contexts[1].trace_id and contexts[0].span_id != contexts[1].span_id


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
    sampling = own_sampling(operators, b"k" * 16)
    exported = {each for each in IDS if is_exported(sampling, each)}
    assert 0.2 < len(exported) / len(IDS) < 0.3
    assert exported == {each for each in IDS if is_exported(sampling, each)}, "a trace is exported whole"
    assert exported != {each for each in IDS if is_exported(own_sampling(operators), each)}, "nobody foresees which"
    rng = random.Random(0)
    found = [sampling.should_sample(Context(), rng.getrandbits(128), "name").decision for _ in IDS]
    assert 0.2 < found.count(Decision.RECORD_AND_SAMPLE) / len(IDS) < 0.3, "traces that begin at the server"


def test_a_client_may_ask_for_fewer_spans() -> None:
    sampling = own_sampling(ParentBasedTraceIdRatio(RATIO))
    assert not any(is_exported(sampling, each, is_sampled=False) for each in IDS)
    assert not is_exported(own_sampling(DEFAULT_ON), 1, is_sampled=False)
    assert is_exported(own_sampling(DEFAULT_ON), 1) and is_exported(own_sampling(ALWAYS_ON), 1)
