import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.hashing import checksum
from kvpool.sums import SUMMER, WORTH_BYTES, Summer, threads_of

SUMMERS = {count: Summer(count) for count in (0, 1, 3)}


def _buffers(count: int, nbytes: int) -> list[np.ndarray]:
    return list(np.random.default_rng(count).integers(0, 256, (count, nbytes), np.uint8))


@given(
    num_threads=st.sampled_from(sorted(SUMMERS)),
    num_buffers=st.integers(0, 9),
    chunks_a_buffer=st.integers(1, 3),
    chunk_bytes=st.sampled_from([1, 1000, WORTH_BYTES // 2, WORTH_BYTES]),
)
def test_threads_sum_what_the_caller_would(
    num_threads: int, num_buffers: int, chunks_a_buffer: int, chunk_bytes: int
) -> None:
    buffers = _buffers(num_buffers, chunks_a_buffer * chunk_bytes)
    expected = [checksum(chunk) for buffer in buffers for chunk in buffer.reshape(-1, chunk_bytes)]
    sums = SUMMERS[num_threads].begin(buffers, chunk_bytes)
    assert list(sums()) == expected == list(sums())


def test_a_fork_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SUMMER, "_num_threads", 2)
    buffers = _buffers(4, WORTH_BYTES)
    expected = SUMMER.begin(buffers, WORTH_BYTES)()
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=lambda: theirs.send(list(SUMMER.begin(buffers, WORTH_BYTES)())))
    child.start()
    assert ours.poll(10), "the fork waits for threads that it does not have"
    assert ours.recv() == list(expected)
    child.join(10)


def test_who_may_start_no_more_threads_sums_itself() -> None:
    buffers = _buffers(4, WORTH_BYTES)
    summer = Summer(1)
    summer._threads = ThreadPoolExecutor(1)
    summer._threads.shutdown()
    assert list(summer.begin(buffers, WORTH_BYTES)()) == [checksum(buffer) for buffer in buffers]


@pytest.mark.parametrize(("num_cores", "num_threads"), [(1, 0), (2, 0), (4, 1), (16, 4), (192, 4)])
def test_few_cores_have_no_threads_to_spare(num_cores: int, num_threads: int) -> None:
    assert threads_of(num_cores) == num_threads
