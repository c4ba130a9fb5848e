from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from kvpool.transport import helpers
from kvpool.transport.helpers import Helpers, movers_of
from tests.support.processes import wait_for

MAX_HELPERS = 3


class Full(ThreadPoolExecutor):
    """As where the system allows no more threads: work stays queued for those that there are."""

    def submit(self, *args: Any, **_: object) -> Future[Any]:
        super().submit(*args)
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("num_threads", [0, MAX_HELPERS])
def test_an_error_leaves_out_the_rest_and_reaches_the_caller(num_threads: int) -> None:
    seen: list[int] = []

    def act(item: int) -> None:
        seen.append(item)
        if item == 7:
            raise KeyError(item)

    with pytest.raises(KeyError):
        Helpers(num_threads).share(range(100_000), act)
    count = len(seen)
    assert 8 <= count < 100_000
    assert len(seen) == count, "somebody goes on"


def test_what_no_helper_has_begun_is_done_by_the_caller_or_by_nobody() -> None:
    team, free, begun = Helpers(1), threading.Event(), threading.Event()
    done: list[str] = []

    def occupy() -> None:
        begun.set()
        assert free.wait(10)
        done.append("helper")

    busy = team.submit(occupy)
    assert begun.wait(10)
    waiting, unwanted = team.submit(lambda: done.append("caller")), team.submit(lambda: done.append("nobody"))
    waiting.finish()
    unwanted.drop()
    free.set()
    busy.finish()
    team.submit(lambda: None).finish()
    assert done == ["caller", "helper"]


def test_a_fork_has_threads_of_its_own() -> None:
    team = Helpers(2)
    team.share(range(4), lambda _: None)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def in_fork() -> None:
        together = threading.Barrier(2, timeout=10)
        team.share(range(2), lambda _: together.wait())
        theirs.send("done")

    child = fork.Process(target=in_fork)
    child.start()
    assert ours.poll(15), "the fork waits for threads that it does not have"
    child.join(10)


def test_what_stays_queued_where_no_thread_can_start_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "ThreadPoolExecutor", Full)
    team, done = Helpers(1), []
    begun, free, drained = threading.Event(), threading.Event(), threading.Event()
    team.submit(lambda: begun.set() or free.wait(10))  # type: ignore[func-returns-value]
    assert begun.wait(10)
    team.submit(lambda: done.append("caller")).finish()
    team.submit(lambda: done.append("nobody")).drop()
    free.set()
    team.submit(drained.set)
    assert drained.wait(10)
    assert done == ["caller"]


def test_after_their_end_there_are_no_threads_and_the_caller_does_all() -> None:
    before = set(threading.enumerate())
    team = Helpers(2)
    team.share(range(9), lambda _: None)
    team.close()
    wait_for(lambda: not set(threading.enumerate()) - before, "the threads to end")
    seen: list[int] = []
    team.share(range(9), seen.append)
    assert seen == list(range(9)) and not set(threading.enumerate()) - before


@pytest.mark.parametrize(
    ("num_cores", "sharers", "cores_a_mover", "count"),
    [
        *((1, 1, 2, 1), (2, 1, 2, 1), (4, 1, 2, 2), (16, 1, 2, 8), (16, 2, 2, 4), (16, 64, 2, 1), (192, 1, 2, 8)),
        *((1, 1, 1, 1), (2, 1, 1, 2), (2, 2, 1, 1), (4, 1, 1, 4), (16, 4, 1, 4)),
    ],
)
def test_few_cores_have_no_threads_to_spare(num_cores: int, sharers: int, cores_a_mover: int, count: int) -> None:
    assert movers_of(num_cores, sharers, cores_a_mover) == count


def test_what_a_helper_raises_reaches_who_waits_and_not_who_drops() -> None:
    team = Helpers(1)
    begun = threading.Event()

    def fail() -> None:
        begun.set()
        raise KeyError("of the work")

    works = [team.submit(fail), team.submit(fail)]
    assert begun.wait(10)
    with pytest.raises(KeyError):
        works[0].finish()
    works[1].drop()
