"""Which streams of lookups make way for others."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool_server.rpc.blocks import LookupStreams
from tests.support.effort import effort

MAX_STREAMS, OWN = 5, 3
OWNERS = ["acme", "umbra", "third"]


class Call:
    """What a task is to `LookupStreams`."""

    def __init__(self, owner: str):
        self.owner = owner
        self.is_idle = self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class LookupStreamsMachine(RuleBasedStateMachine):
    """Owners begin calls; each call waits and works in turns, and returns when it likes, or some time after its end."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = LookupStreams(MAX_STREAMS)
        self.calls: list[Call] = []  # In the order in which they became idle, where they are.

    def _live(self, owner: str | None = None) -> list[Call]:
        return [call for call in self.calls if not call.is_cancelled and owner in (None, call.owner)]

    @rule(owner=st.sampled_from(OWNERS))
    def begin(self, owner: str) -> None:
        call: Any = Call(owner)
        mine, everyone = self._live(owner), self._live()
        rivals = mine if len(mine) == OWN else everyone if len(everyone) == MAX_STREAMS else None
        victim = next((each for each in rivals if each.is_idle), None) if rivals is not None else None
        has_begun = self.streams.begin(call, owner, OWN)
        assert has_begun == (rivals is None or victim is not None)
        assert [each for each in everyone if each.is_cancelled] == ([victim] if victim else [])
        if has_begun:
            self.calls.append(call)

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def turn(self, data: st.DataObject) -> None:
        call: Any = data.draw(st.sampled_from(self._live()))
        if call.is_idle:
            self.streams.work(call)
        else:
            self.streams.wait(call)
            self.calls.remove(call)
            self.calls.append(call)
        call.is_idle = not call.is_idle

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        call: Any = data.draw(st.sampled_from(self.calls))
        assert self.streams.is_ended(call) == call.is_cancelled
        self.streams.finish(call)
        self.calls.remove(call)

    @invariant()
    def nobody_has_more_than_allowed(self) -> None:
        assert len(self._live()) <= MAX_STREAMS
        assert all(len(self._live(owner)) <= OWN for owner in OWNERS)

    def teardown(self) -> None:
        """When the server stops, all that are idle are ended at once, and the others after their reply."""
        self.streams.stop()
        assert all(call.is_cancelled for call in self.calls if call.is_idle)
        for call in self.calls:
            checked: Any = call
            assert self.streams.is_ended(checked)


TestLookupStreams = LookupStreamsMachine.TestCase
TestLookupStreams.settings = settings(max_examples=effort(50), stateful_step_count=40)
