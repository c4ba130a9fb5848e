import multiprocessing
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import sums
from kvpool.hashing import checksum
from kvpool.sums import MIN_THREADED_BYTES, Summer, threads_of
from tests.support.processes import wait_for

SUMMERS = {count: Summer(count) for count in (0, 1, 3)}


def _buffers(count: int, nbytes: int) -> list[np.ndarray]:
    return list(np.random.default_rng(count).integers(0, 256, (count, nbytes), np.uint8))


@given(
    num_threads=st.sampled_from(sorted(SUMMERS)),
    num_buffers=st.integers(0, 9),
    chunks_a_buffer=st.integers(1, 3),
    chunk_bytes=st.sampled_from([1, 1000, MIN_THREADED_BYTES // 2, MIN_THREADED_BYTES]),
)
def test_threads_sum_what_the_caller_would(
    num_threads: int, num_buffers: int, chunks_a_buffer: int, chunk_bytes: int
) -> None:
    buffers = _buffers(num_buffers, chunks_a_buffer * chunk_bytes)
    expected = [checksum(chunk) for buffer in buffers for chunk in buffer.reshape(-1, chunk_bytes)]
    found = SUMMERS[num_threads].begin(buffers, chunk_bytes)
    assert list(found()) == expected == list(found())


def test_a_fork_has_threads_of_its_own() -> None:
    summer = Summer(2)
    buffers = _buffers(4, MIN_THREADED_BYTES)
    expected = summer.begin(buffers, MIN_THREADED_BYTES)()
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=lambda: theirs.send(list(summer.begin(buffers, MIN_THREADED_BYTES)())))
    child.start()
    assert ours.poll(10), "the fork waits for threads that it does not have"
    assert ours.recv() == list(expected)
    child.join(10)


def test_at_the_interpreters_end_the_caller_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(ThreadPoolExecutor):
        def submit(self, *_: object, **__: object) -> Future[Any]:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(sums, "ThreadPoolExecutor", Ended)
    buffers = _buffers(4, MIN_THREADED_BYTES)
    assert list(Summer(1).begin(buffers, MIN_THREADED_BYTES)()) == [checksum(buffer) for buffer in buffers]


def test_after_its_end_a_summer_has_no_threads_and_the_caller_sums() -> None:
    summer, buffers = Summer(1), _buffers(4, MIN_THREADED_BYTES)
    expected = [checksum(buffer) for buffer in buffers]
    before = set(threading.enumerate())
    assert list(summer.begin(buffers, MIN_THREADED_BYTES)()) == expected
    summer.close()
    wait_for(lambda: not set(threading.enumerate()) - before, "the threads to end")
    assert list(summer.begin(buffers, MIN_THREADED_BYTES)()) == expected


def test_a_summer_that_is_closed_while_a_call_begins_leaves_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    summer, buffers = Summer(1), _buffers(4, MIN_THREADED_BYTES)
    process_id, before = os.getpid(), set(threading.enumerate())

    def close_meanwhile() -> int:  # `begin` looks up the process after it has decided for threads.
        monkeypatch.undo()
        summer.close()
        return process_id

    monkeypatch.setattr(sums.os, "getpid", close_meanwhile)
    assert list(summer.begin(buffers, MIN_THREADED_BYTES)()) == [checksum(buffer) for buffer in buffers]
    assert not set(threading.enumerate()) - before


@pytest.mark.parametrize(("num_cores", "num_threads"), [(1, 0), (2, 0), (4, 1), (16, 4), (192, 4)])
def test_few_cores_have_no_threads_to_spare(num_cores: int, num_threads: int) -> None:
    assert threads_of(num_cores) == num_threads
