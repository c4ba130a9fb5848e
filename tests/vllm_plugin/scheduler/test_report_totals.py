"""Sums of deltas are totals, whatever is lost, repeated or reordered between an engine and its server."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool.protocol.causes import Cause
from kvpool.protocol.reports import ReportRequest
from kvpool_server.observability.pairs import Pair
from kvpool_server.reports.engines import SILENT_S, EngineReports, Totals
from tests.support.clock import FakeClock
from tests.support.effort import effort
from vllm_plugin.scheduler.telemetry import ReportLog, computed_tokens

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
