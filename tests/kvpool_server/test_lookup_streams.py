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
        self.is_waiting = self.is_cancelled = False
        self.num_sending = 0

    @property
    def is_idle(self) -> bool:
        return self.is_waiting and not self.num_sending

    def cancel(self) -> None:
        self.is_cancelled = True


class LookupStreamsMachine(RuleBasedStateMachine):
    """Owners begin calls; each waits and works in turns, and may wait while its reply is sent.

    It returns when it likes, or some time after its end.
    """

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
        if call.is_waiting:
            self.streams.work(call)
        else:
            self.streams.wait(call)
            self.calls.remove(call)
            self.calls.append(call)
        call.is_waiting = not call.is_waiting

    @precondition(lambda self: any(not call.is_waiting and not call.num_sending for call in self._live()))
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        call: Any = data.draw(st.sampled_from([c for c in self._live() if not c.is_waiting and not c.num_sending]))
        self.streams.work(call)
        call.num_sending = 1

    @precondition(lambda self: any(call.num_sending for call in self._live()))
    @rule(data=st.data())
    def sent(self, data: st.DataObject) -> None:
        call: Any = data.draw(st.sampled_from([call for call in self._live() if call.num_sending]))
        self.streams.wait(call)
        call.num_sending = 0
        self.calls.remove(call)
        self.calls.append(call)

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
            if call.is_waiting and call.num_sending:
                assert not call.is_cancelled
                self.streams.wait(checked)
                assert call.is_cancelled, "a call whose reply has gone waits for its client for ever"


TestLookupStreams = LookupStreamsMachine.TestCase
TestLookupStreams.settings = settings(max_examples=effort(50), stateful_step_count=40)
