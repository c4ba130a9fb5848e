"""Why tokens are computed, and what the server is told; real engines: tests/e2e/test_causes.py."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from unittest.mock import Mock, patch

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from vllm.v1.request import Request

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.rpc import PoolRpc
from kvpool.protocol.errors import PoolTimeoutError
from kvpool.protocol.reports import Cause, ReportRequest
from kvpool.protocol.types import BlockRun, MissCause
from kvpool.v1 import pool_pb2 as pb
from kvpool.version import __version__
from kvpool_server.observability.usage import Pair
from kvpool_server.reports.engines import SILENT_S, EngineReports, Totals
from tests.conftest import StartServer
from tests.support.clock import FakeClock
from tests.support.effort import effort
from tests.support.faults import stopped
from tests.support.held import held_by
from tests.support.processes import wait_for
from tests.support.toy.fixtures import BLOCK_TOKENS
from tests.support.vllm_objects import full_attention, make_request, tokens
from tests.vllm_plugin.core import Core, MakeCore, blocks, fill, lose_pool
from tests.vllm_plugin.kinds import kv_cache, window
from vllm_plugin.scheduler import telemetry
from vllm_plugin.scheduler.lookups import StepBudget
from vllm_plugin.scheduler.telemetry import ReportLog, computed_tokens

LENGTH = 100
HIT = blocks(6)
LAST = LENGTH - HIT


def named(name: str = "r") -> Request:
    return make_request(name, tokens(LENGTH, name))


def admit(core: Core, request: Request, local: int = 0, taken: int = 0) -> None:
    """vLLM gives a request blocks, and takes `taken` tokens of the answer."""
    assert request.prefill_stats is not None
    request.prefill_stats.set(request.num_prompt_tokens, local, taken)
    core.allocate(request, taken)


def counted(core: Core) -> dict[Cause, int]:
    data = core.counted()
    return {cause: data[name] for cause in Cause if (name := f"computed_tokens:{cause.label}") in data}


def compute(core: Core, request: Request, local: int = 0, taken: int = 0) -> dict[Cause, int]:
    """Causes of what a request computes in one step, once it is admitted."""
    admit(core, request, local, taken)
    request.num_computed_tokens = local + taken
    core.step((request, request.num_prompt_tokens - local - taken))
    return counted(core)


def test_a_prompt_is_counted_once_with_the_step_that_ends_it(one: Core) -> None:
    request = named()
    one.ask(request, blocks(2))
    admit(one, request, local=blocks(2))
    request.num_computed_tokens = blocks(2)
    one.step((request, 30))
    assert counted(one) == {}
    one.step((request, LENGTH - blocks(2) - 30))
    assert counted(one) == {Cause.NEVER_STORED: HIT - blocks(2), Cause.LAST_BLOCK: LAST}
    one.free(request)
    request.num_preemptions = 1
    one.ask(request)
    one.allocate(request, 0)
    one.step((request, LENGTH))
    assert counted(one) == {} and held_by(one.side)["prompts that are counted"] == 0
    without_output = named("without output")
    one.ask(without_output)
    admit(one, without_output)
    one.step((without_output, 60))
    one.finish(without_output)
    one.step()
    assert counted(one) == {} and held_by(one.side)["prompts that are counted"] == 0


@pytest.mark.parametrize("failed", [False, True])
def test_a_load_is_counted_by_what_it_left(failed: bool, one: Core) -> None:
    request = named()
    fill(one, request.block_hashes)
    assert one.ask(request) == HIT
    admit(one, request, taken=HIT)
    one.step()
    one.report(finished_recving={"r"}, failed_recving={"r"} if failed else set())
    if failed:
        one.free(request)
        assert one.ask(request) == 0
        assert compute(one, request) == {Cause.LOAD_FAILED: HIT, Cause.LAST_BLOCK: LAST}
    else:
        request.num_computed_tokens = HIT
        one.allocate(request, 0)
        one.step((request, LAST))
        assert counted(one) == {Cause.LAST_BLOCK: LAST}


def loading_is_slow(one: Core, patch: pytest.MonkeyPatch) -> None:
    fill(one, named().block_hashes[:4])
    patch.setattr(one.side.loads, "verdict", lambda request_id, start, stop: 0)


def answers_are_late(one: Core, patch: pytest.MonkeyPatch) -> None:
    late = Mock(side_effect=PoolTimeoutError("no answer in time"))
    pending = Mock(done=lambda: True, result=late, on_done=lambda _: None)
    patch.setattr(one.side.stages.sessions[0].client.rpc, "lookup_async", lambda *_, **__: pending)


def too_many_others_wait(one: Core, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepBudget, "may_begin", property(lambda _: False))
    patch.setattr(StepBudget, "may_wait", lambda *_, **__: False)


@pytest.mark.parametrize(
    ("happens", "causes"),
    [
        (loading_is_slow, {Cause.DECLINED: blocks(4), Cause.NEVER_STORED: blocks(2)}),
        (answers_are_late, {Cause.LOOKUP_FAILED: HIT}),
        (lambda one, _: lose_pool(one), {Cause.POOL_AWAY: HIT}),
        (too_many_others_wait, {Cause.TOO_MANY_WAITING: HIT}),
        (lambda one, patch: patch.setattr(one.side.stages, "disagree", True), {Cause.SHARING_OFF: HIT}),
        (lambda one, patch: patch.setattr(one.side, "_reads", False), {Cause.NOT_ASKED: HIT}),
    ],
    ids=lambda value: "" if callable(value) else "-".join(cause.name for cause in value),
)
def test_what_keeps_a_hit_from_being_loaded_is_the_cause(
    happens: Callable[[Core, pytest.MonkeyPatch], None],
    causes: dict[Cause, int],
    one: Core,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = named()
    happens(one, monkeypatch)
    assert one.ask(request) == 0
    assert compute(one, request) == {**causes, Cause.LAST_BLOCK: LAST}


def test_a_window_that_is_missing(core: MakeCore) -> None:
    one, request = core(cache=kv_cache(full_attention(), window(64))).connected(), named()
    fill(one, request.block_hashes[:4], group=0)
    assert one.ask(request) == 0
    expected = {Cause.WINDOW_OR_STATE: blocks(4), Cause.NEVER_STORED: blocks(2), Cause.LAST_BLOCK: LAST}
    assert compute(one, request) == expected


def test_every_cause_of_the_server_is_one_of_the_engines() -> None:
    assert {cause.name for cause in MissCause} <= {cause.name for cause in Cause}


LONG = 131_072
STEP = 2_048
CHEAP_S = 0.001
"""CPU time of the scheduler's thread, for one request and for one step of many."""


@pytest.mark.parametrize("taken", [0, blocks(5), blocks(16)])
def test_a_prompt_of_131072_tokens_is_accounted_for_to_the_token_and_at_no_cost(core: MakeCore, taken: int) -> None:
    one = core(decline_slow_loads=False).connected()
    request = make_request("long", [nth % 251 for nth in range(LONG)])
    fill(one, request.block_hashes[:64])
    session = one.side.stages.sessions[0]
    assert session.namespace is not None
    session.client.admin.remove(session.namespace, [BlockRun(0, request.block_hashes[16:24])])
    assert one.ask(request) == blocks(16)
    lookup = one.side.admission.candidates["long"].lookup
    assert request.prefill_stats is not None
    request.prefill_stats.set(LONG, 0, taken)

    computed, costs = one.side.computed, []
    computed.admitted(request, lookup)
    for at in range(taken, LONG, STEP):
        assert counted(one) == {}, "the prompt has not ended"
        request.num_computed_tokens = at
        started = time.thread_time()
        computed.step({"long": min(STEP, LONG - at), **{f"other {nth}": 1 for nth in range(256)}})
        costs.append(time.thread_time() - started)
    assert sorted(costs)[len(costs) // 2] < CHEAP_S
    whole = (LONG - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert counted(one) == {
        **({Cause.WINDOW_OR_STATE: blocks(16) - taken} if taken < blocks(16) else {}),
        Cause.REMOVED: blocks(48),  # With what is stored behind the removed blocks, and cannot be loaded without them.
        Cause.NEVER_STORED: whole - blocks(64),
        Cause.LAST_BLOCK: LONG - whole,
    }


# Reports to the server: in the background, and never twice


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "REPORT_EVERY_S", 0.05)
    monkeypatch.setattr(telemetry, "FIRST_REPORT_EVERY_S", 0.05)


def compute_prompt(core: Core, name: str) -> None:
    """Of which the pool has nothing."""
    request = named(name)
    core.ask(request)
    compute(core, request)
    core.finish(request)


def told(core: Core) -> dict[str, int]:
    """Computed tokens by cause of the engine's namespace, as the server tells them."""
    session = core.side.stages.sessions[0]
    assert session.namespace is not None
    (info,) = [each for each in session.client.admin.namespaces() if each.fingerprint == session.namespace.fingerprint]
    return dict(info.computed_tokens)


def stats(core: Core) -> pb.StatsResponse:
    return core.side.stages.sessions[0].client.admin.stats()


def test_the_server_knows_what_an_engine_counts(one: Core) -> None:
    for nth in range(3):
        compute_prompt(one, f"r{nth}")
    wait_for(lambda: sum(told(one).values()) == 3 * LENGTH, "the report")
    (mine,) = [engine for engine in stats(one).engines if engine.engine.endswith(f":{os.getpid()}")]
    assert mine.version == __version__ and not mine.breaker_open and mine.transport == one.side.stages.transport
    assert mine.namespaces == [one.side.stages.sessions[0].namespace.fingerprint]  # type: ignore[union-attr]
    compute_prompt(one, "last")
    lose_pool(one)
    wait_for(
        lambda: [each for each in stats(one).engines if each.namespaces == mine.namespaces and each.breaker_open],
        "the breaker's state to be told",
    )
    other = Client(ClientConfig(one.side.stages.sessions[0].client.config.endpoint))
    fingerprint = mine.namespaces[0]
    one.side.shutdown()
    with other as client:
        (info,) = [each for each in client.admin.namespaces() if each.fingerprint == fingerprint]
        assert sum(info.computed_tokens.values()) == 4 * LENGTH, "with the last report"
        assert not [engine for engine in client.admin.stats().engines if engine.namespaces == mine.namespaces]


def test_a_lost_answer_counts_nothing_twice(one: Core) -> None:
    send, lost = PoolRpc.report, []

    def lossy(rpc: PoolRpc, report: object, timeout_ms: int) -> bool:
        taken = send(rpc, report, timeout_ms)  # type: ignore[arg-type]
        if len(lost) < 5:
            lost.append(report)
            raise rpc.error_of(grpc.FutureTimeoutError())
        return taken

    with patch.object(PoolRpc, "report", lossy):
        for nth in range(3):
            compute_prompt(one, f"r{nth}")
        wait_for(lambda: len(lost) == 5 and sum(told(one).values()) == 3 * LENGTH, "the report")
    assert len({report.sequence for report in lost}) == 1  # type: ignore[attr-defined]


def test_a_server_of_an_older_release_is_left_alone(core: MakeCore) -> None:
    asked: list[object] = []
    with patch.object(PoolRpc, "report", lambda *report: bool(asked.append(report))):
        one = core().connected()
        wait_for(lambda: asked, "a report")
        one.side.shutdown()
    assert len(asked) == 1, "a report is sent at the end"


def test_a_server_that_hangs_holds_up_the_end_for_a_moment(core: MakeCore, pool_server: StartServer) -> None:
    server = pool_server()
    one = core(endpoint=server.endpoint).connected()
    wait_for(lambda: stats(one).engines, "the first report")
    with stopped(server):
        began = time.monotonic()
        one.side._reporter.close()
        assert time.monotonic() - began < 2 * telemetry.LAST_REPORT_S


# Sums of deltas are totals, whatever is lost, repeated or reordered between an engine and its server

SPACE = b"n" * 32
EVICTED = Cause.EVICTED.label


class Engine:
    """What an engine counts, and what it had counted when it made each of its reports."""

    def __init__(self, nth: int) -> None:
        self.log, self.sums, self.made = ReportLog(), Counter[str](), dict[int, Counter[str]]()
        self.reporter = nth.to_bytes(16, "little")
        self.delivered = 0

    def next(self) -> ReportRequest:
        counts = self.log.next(self.sums)
        self.made.setdefault(self.log.sequence, self.sums.copy())
        return ReportRequest(
            reporter=self.reporter,
            sequence=self.log.sequence,
            namespaces=(SPACE,),
            computed_tokens=computed_tokens(counts),
            loaded_tokens=int(counts.get("loaded_tokens", 0)),
        )

    def told(self) -> Counter[str]:
        """What the server knows, once."""
        return self.made.get(self.delivered, Counter())


class TotalsMachine(RuleBasedStateMachine):
    """Engines that count and restart, a server that restarts, a network that loses reports and answers, and repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.engines = [Engine(0), Engine(1)]
        self.all = list(self.engines)
        self.server = EngineReports(self.clock)
        self.sent: list[ReportRequest] = []
        self.told_before = Counter[str]()  # The server's last start.

    @rule(
        nth=st.sampled_from([0, 1]),
        name=st.sampled_from([f"computed_tokens:{EVICTED}", "computed_tokens:declined", "loaded_tokens"]),
        count=st.integers(1, 1_000),
    )
    def count(self, nth: int, name: str, count: int) -> None:
        self.engines[nth].sums[name] += count

    @rule(nth=st.sampled_from([0, 1]), arrives=st.booleans(), is_answered=st.booleans())
    def send(self, nth: int, arrives: bool, is_answered: bool) -> None:
        engine = self.engines[nth]
        made = engine.next()
        if not arrives:
            return
        assert self.server.report(made, "acme", "model") == (made.sequence > engine.delivered)
        self.sent.append(made)
        engine.delivered = made.sequence
        if is_answered:
            engine.log.acknowledged()

    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        if self.sent:
            assert not self.server.report(data.draw(st.sampled_from(self.sent)), "acme", "model")

    @rule(nth=st.sampled_from([0, 1]))
    def restart_engine(self, nth: int) -> None:
        """What was not delivered is lost."""
        self.engines[nth] = Engine(len(self.all))
        self.all.append(self.engines[nth])

    @rule()
    def fall_silent(self) -> None:
        self.clock.advance(SILENT_S + 1)
        assert self.server.engines() == []

    @rule()
    def restart_server(self) -> None:
        """With a ledger, which knows each reporter's newest number."""
        self.server = EngineReports(self.clock)
        self.told_before = self._told()
        for engine in self.all:
            if engine.delivered:
                self.server.restore("acme", engine.reporter, engine.delivered)

    def _told(self) -> Counter[str]:
        return sum((engine.told() for engine in self.all), Counter[str]())

    @invariant()
    def what_was_delivered_counts_once(self) -> None:
        totals = self.server.totals.get(Pair("model", "acme"), Totals())
        counted = Counter({f"computed_tokens:{cause}": count for cause, count in totals.computed_tokens.items()})
        counted["loaded_tokens"] += totals.loaded_tokens
        assert +counted == self._told() - self.told_before

    def teardown(self) -> None:
        """Engines that go on have told all once they get through."""
        for nth, engine in enumerate(self.engines):
            for _ in range(2):  # The report that is under way, then the rest.
                self.send(nth, True, True)
            assert engine.told() == engine.sums
        self.what_was_delivered_counts_once()


TestTotalsMachine = TotalsMachine.TestCase
TestTotalsMachine.settings = settings(max_examples=effort(40), stateful_step_count=40, deadline=None)
