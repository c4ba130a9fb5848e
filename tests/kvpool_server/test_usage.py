"""What each model and tenant have used of a pool."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.namespace import MEASUREMENT_MODEL, GroupSpec
from kvpool.protocol.reports import ReportRequest
from kvpool.protocol.types import BlockRun, RunHits, ShardRange
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.lookups import MAX_PROMPT_TOKENS, count_tokens
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.cache.steps import finish
from kvpool_server.observability.metrics import usage_families
from kvpool_server.observability.usage import (
    MAX_LABEL_CHARS,
    MAX_PAIRS,
    MAX_PAIRS_OF_TENANT,
    OTHER,
    Pairs,
    Usage,
    label_of,
)
from kvpool_server.sharing import Limits
from testbed.pool_at_once import PoolAtOnce
from tests.conftest import StartServer
from tests.support.clock import FakeClock
from tests.support.values import group_spec, namespace_spec, run_of

CHUNK = 100
TOKENS = 16
FULL = group_spec(chunk_bytes=CHUNK, block_tokens=TOKENS)
WINDOW = group_spec(chunk_bytes=CHUNK, block_tokens=TOKENS, kind="sliding_window", window_tokens=2 * TOKENS)


class Bench:
    """A pool of 64 slots, its clock and its usage."""

    def __init__(self, *, has_tenants: bool = False, **limits: Any) -> None:
        ids = itertools.count(1)
        self.clock = FakeClock()
        arena = Arena(64 * CHUNK, CHUNK, zero=(lambda *_: None) if has_tenants else None)
        self.pool = PoolAtOnce(arena, self.clock, lambda: next(ids), Limits(**limits))
        self.usage = Usage(self.pool, Pairs(has_tenants))

    def open(self, *groups: GroupSpec, **fields: Any) -> PoolNamespace:
        return self.pool.open_namespace(namespace_spec(*(groups or (FULL,)), **fields))[0]

    def put(self, namespace: PoolNamespace, *names: object, group_idx: int = 0) -> None:
        run = run_of(*names, group_idx=group_idx)
        grant = self.pool.put_start(namespace.fingerprint, [run], ShardRange(0, 1))
        self.pool.put_end(grant.ticket_id, [0] * len(grant.offsets))

    def look_up(self, namespace: PoolNamespace, *runs: BlockRun, prefix_only: bool = True) -> int:
        return self.pool.lookup(namespace.fingerprint, runs, prefix_only=prefix_only, lease_ttl_ms=1_000).lease_id

    def of(self, model: str, tenant: str = "") -> pb.UsageStats:
        (usage,) = [each for each in self.usage.by_model_and_tenant() if (each.model, each.tenant) == (model, tenant)]
        return usage


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_namespaces_of_one_model_and_tenant_add_up_to_one_pair(bench: Bench) -> None:
    for salt in ("one", "two"):
        namespace = bench.open(model="m", tenant="t", salt=salt)
        bench.put(namespace, "a", "b")
        lease_id = bench.look_up(namespace, run_of("a", "b", "c"))
        bench.pool.get(lease_id, namespace.fingerprint, [run_of("a", "b")], ShardRange(0, 1))
    bench.put(bench.open(model="m", tenant="u"), "a")
    assert bench.of("m", "t") == pb.UsageStats(
        tenant="t",
        model="m",
        lookup_tokens=2 * 3 * TOKENS,
        hit_tokens=2 * 2 * TOKENS,
        stored_bytes=4 * CHUNK,
        loaded_bytes=4 * CHUNK,
        held_bytes=4 * CHUNK,
        held_blocks=4,
    )
    assert bench.of("m", "u") == pb.UsageStats(
        tenant="u", model="m", stored_bytes=CHUNK, held_bytes=CHUNK, held_blocks=1
    )


def test_a_token_counts_once_in_however_many_groups_probes_and_stages_it_is_asked_for(bench: Bench) -> None:
    def counted(model: str) -> tuple[int, ...]:
        usage = bench.of(model)
        return usage.lookup_tokens, usage.hit_tokens, usage.stored_bytes

    namespace = bench.open(FULL, WINDOW, model="window")
    bench.put(namespace, "a", "b", "c")
    bench.put(namespace, "x", "b", "c", group_idx=1)
    runs = run_of("a", "b", "c", "d"), run_of("a", "b", "c", "d", group_idx=1)
    probes = run_of("z"), run_of("z", group_idx=1)
    bench.look_up(namespace, *runs, *probes, prefix_only=False)
    assert counted("window") == (4 * TOKENS, 3 * TOKENS, 6 * CHUNK)

    namespace = bench.open(FULL, FULL, model="full")
    bench.put(namespace, "a", "b")
    bench.put(namespace, "a", group_idx=1)
    bench.look_up(namespace, run_of("a", "b"), run_of("a", "b", group_idx=1))
    assert counted("full") == (2 * TOKENS, TOKENS, 3 * CHUNK), "tokens that one group lacks are no hits"

    for stage in (0, 1):
        namespace = bench.open(model="stages", num_pipeline_stages=2, pipeline_stage=stage)
        bench.put(namespace, "a")
        bench.look_up(namespace, run_of("a"))
    assert counted("stages") == (TOKENS, TOKENS, 2 * CHUNK)


def test_tokens_of_one_lookup_have_a_bound_whatever_a_block_is_said_to_have() -> None:
    spec = namespace_spec(group_spec(block_tokens=(1 << 32) - 1))
    namespace = PoolNamespace(spec, spec.fingerprint())
    run = BlockRun(0, [bytes(32)] * 65_536)
    for count in (1, 2):
        counted = count_tokens(namespace, [run] * count, [RunHits(65_536)] * count)
        assert counted == (MAX_PROMPT_TOKENS, MAX_PROMPT_TOKENS)


def test_blocks_that_are_located_count_as_loaded_and_what_is_removed_is_held_no_more(bench: Bench) -> None:
    namespace = bench.open(model="m")
    bench.put(namespace, "a", "b")
    found = finish(bench.pool.lookups.find(namespace.fingerprint, [run_of("a", "b")], True, lease_ttl_ms=1_000))
    bench.pool.lookups.slots(found)
    assert bench.of("m").loaded_bytes == 2 * CHUNK
    exported = {family.name: family.samples for family in usage_families(bench.usage.by_model_and_tenant())}
    assert [sample.value for sample in exported["kvpool_located_bytes"]] == [2 * CHUNK]
    assert "kvpool_loaded_bytes" not in exported, "the server does not know what engines load"
    bench.pool.release([found.lease_id])
    bench.pool.remove(namespace.fingerprint, [run_of("b")])
    assert (bench.of("m").held_bytes, bench.of("m").held_blocks) == (CHUNK, 1)
    bench.pool.clear()
    assert (bench.of("m").held_bytes, bench.of("m").stored_bytes) == (0, 2 * CHUNK)


def test_pairs_with_most_use_are_told_apart_and_the_rest_is_other(bench: Bench) -> None:
    for nth in range(MAX_PAIRS + 5):
        bench.look_up(bench.open(model=f"m{nth}"), *[run_of(*range(nth + 1))])
    bench.open(model="unused")
    usage = bench.usage.by_model_and_tenant()
    assert [each.model for each in usage] == [*(f"m{nth}" for nth in range(MAX_PAIRS + 4, 4, -1)), OTHER]
    assert usage[-1] == pb.UsageStats(tenant=OTHER, model=OTHER, lookup_tokens=sum(range(1, 6)) * TOKENS)

    proving = Bench(has_tenants=True)  # No tenant can use up the labels of others.
    for nth in range(MAX_PAIRS):
        proving.look_up(proving.open(model=f"m{nth}", tenant="greedy"), run_of(*range(9)))
    proving.look_up(proving.open(model="m", tenant="modest"), run_of("a"))
    tenants = [each.tenant for each in proving.usage.by_model_and_tenant()]
    assert tenants == ["greedy"] * MAX_PAIRS_OF_TENANT + ["modest", OTHER]


def test_a_server_names_the_same_pairs_in_what_it_counts_and_in_what_engines_report(pool_server: StartServer) -> None:
    """Models are in use in one order, and report in the other."""
    with Client(ClientConfig(pool_server("--memory", "16MiB").endpoint)) as client:
        namespaces = [client.open_namespace(namespace_spec(model=f"m{nth}")) for nth in range(MAX_PAIRS + 8)]
        for namespace in namespaces:
            client.lookup(namespace, [run_of("a")])
        client.admin.stats()
        for nth, namespace in reversed([*enumerate(namespaces)]):
            report = ReportRequest(
                reporter=bytes([nth]) * 16, sequence=1, namespaces=[namespace.fingerprint], saved_seconds=1.0
            )
            assert client.rpc.report(report, 5_000)
        usage = client.admin.stats().server.usage
    assert len(usage) == MAX_PAIRS + 1
    assert all(each.lookup_tokens and each.saved_seconds for each in usage)


def test_no_count_goes_back_whatever_is_opened_used_and_closed() -> None:
    bench = Bench(max_namespaces=MAX_PAIRS + 2, namespace_idle_ms=1_000)
    before: dict[tuple[str, str], pb.UsageStats] = {}
    for nth in range(3 * MAX_PAIRS):
        bench.clock.advance(2.0)  # So that an empty namespace is closed for the next.
        for model in (f"m{nth % (MAX_PAIRS * 2)}", "always"):
            namespace = bench.open(model=model)
            bench.put(namespace, "a")
            bench.look_up(namespace, run_of("a", "b"))
            bench.pool.clear(namespace.fingerprint)
        now = {(each.model, each.tenant): each for each in bench.usage.by_model_and_tenant()}
        assert before.keys() <= now.keys()
        for pair, usage in before.items():
            for name in ("lookup_tokens", "hit_tokens", "stored_bytes", "loaded_bytes"):
                assert getattr(now[pair], name) >= getattr(usage, name), (pair, name)
        before = now
    assert len(before) == MAX_PAIRS + 1
    assert sum(each.lookup_tokens for each in before.values()) == 3 * MAX_PAIRS * 2 * 2 * TOKENS
    assert before["always", ""].lookup_tokens == 3 * MAX_PAIRS * 2 * TOKENS


def test_what_a_model_is_called_is_a_short_printable_label(bench: Bench) -> None:
    hostile = 'a\n"}\x00\u202e' + "x" * 10_000 + "end"
    bench.look_up(bench.open(model=hostile), run_of("a", "b"))
    bench.look_up(bench.open(model=OTHER, tenant=OTHER), run_of("a"))
    usage, other = bench.usage.by_model_and_tenant()
    assert len(usage.model) <= MAX_LABEL_CHARS
    assert usage.model.isprintable()
    assert usage.model.startswith("a") and usage.model.endswith("end")
    assert label_of("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"
    assert (other.tenant, other.model, other.lookup_tokens) == (OTHER, OTHER, TOKENS)


def test_measurements_are_no_use(bench: Bench) -> None:
    told: list[object] = []
    bench.pool.traffic.append(lambda *call: told.append(call))
    namespace = bench.open(model=MEASUREMENT_MODEL)
    bench.put(namespace, "a")
    bench.look_up(namespace, run_of("a"))
    assert not told and bench.usage.by_model_and_tenant() == []
    assert bench.pool.counters["lookup_blocks"] == 0 and bench.pool.counters["lookups"] == 1
