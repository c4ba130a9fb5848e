"""Calls that nobody waits for are made in order, are lost rather than waited for, and raise nothing into the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kvpool.protocol.errors import KVPoolError, UnavailableError
from tests.support.processes import wait_for
from vllm_plugin.guard import Guard
from vllm_plugin.scheduler import hints
from vllm_plugin.scheduler.hints import CallQueue

MAX_CALLS = 4


class Counting(Guard):
    """Counts unexpected errors, which the guard of other tests raises."""

    num_failed = 0

    def failed(self, what: str, error: BaseException) -> None:
        self.num_failed += 1


@dataclass
class Calls:
    """A queue, and what has come of its calls."""

    made: list[int] = field(default_factory=list)
    failures: list[KVPoolError] = field(default_factory=list)
    guard: Counting = field(default_factory=Counting)
    goes_on: threading.Event = field(default_factory=threading.Event)
    is_stuck: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.queue = CallQueue("kvpool-test", "a call", MAX_CALLS, self.guard, self.failures.append)

    def put(self, nth: int) -> bool:
        return self.queue.put(lambda: self.made.append(nth))

    def stick(self) -> None:
        """Has the thread wait in a call."""
        assert self.queue.put(lambda: self.is_stuck.set() or self.goes_on.wait(60))  # type: ignore[func-returns-value]
        assert self.is_stuck.wait(10)


@pytest.fixture
def calls() -> Iterator[Calls]:
    made = Calls()
    yield made
    made.goes_on.set()
    made.queue.close()


def test_calls_are_made_in_their_order_and_before_the_end(calls: Calls) -> None:
    calls.stick()
    assert all(calls.put(nth) for nth in range(3))
    calls.goes_on.set()
    calls.queue.close()
    assert calls.made == [0, 1, 2]
    assert not calls.put(3)
    calls.queue.close()


def test_errors_end_one_call_alone(calls: Calls) -> None:
    def fail(error: Exception) -> None:
        raise error

    away = UnavailableError("away")
    assert calls.queue.put(lambda: fail(away)) and calls.queue.put(lambda: fail(KeyError("a"))) and calls.put(1)
    wait_for(lambda: calls.made == [1], "the last call")
    assert calls.failures == [away] and calls.guard.num_failed == 1


def test_calls_that_pile_up_are_refused_and_do_not_keep_the_thread(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "END_S", 0.05)
    calls.stick()
    assert [calls.put(nth) for nth in range(MAX_CALLS + 2)] == [True] * MAX_CALLS + [False] * 2
    thread, began_at = calls.queue._thread, time.monotonic()
    calls.queue.close()
    assert thread is not None and time.monotonic() - began_at < 10
    calls.goes_on.set()
    thread.join(10)
    assert not thread.is_alive() and not calls.made


def test_a_queue_without_calls_has_no_thread(calls: Calls) -> None:
    assert calls.queue._thread is None
    calls.queue.close()
    assert not calls.put(0) and calls.queue._thread is None
