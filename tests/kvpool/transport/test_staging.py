from __future__ import annotations

import errno
import mmap
import threading
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.protocol.errors import PoolTimeoutError
from kvpool.transport import helpers
from kvpool.transport.helpers import UNIT_BYTES, Staging

MIB = 1 << 20
UNITS = 16


@given(
    is_given=st.booleans(),
    steps=st.lists(st.tuples(st.integers(1, 5 * UNIT_BYTES), st.integers(1, 6), st.integers(0, 3)), max_size=20),
)
def test_buffers_overlap_nobody_elses_and_all_come_back(is_given: bool, steps: list[tuple[int, int, int]]) -> None:
    all_bytes = UNITS * UNIT_BYTES
    staging = Staging(memory=np.empty(all_bytes, np.uint8)) if is_given else Staging(all_bytes)
    held: list[tuple[ExitStack, list[np.ndarray]]] = []
    for nth, (nbytes, count, ended) in enumerate(steps):
        stack = ExitStack()
        try:
            buffers = stack.enter_context(staging.borrowed(nbytes, count, 0.0))
        except PoolTimeoutError:
            assert held, "nobody has anything"
        else:
            assert 1 <= len(buffers) <= count and all(len(buffer) == nbytes for buffer in buffers)
            for buffer in buffers:
                buffer[:] = nth % 251
            held.append((stack, [*buffers, np.array([nth % 251], np.uint8)]))
        for _ in range(min(ended, len(held))):
            _end(held.pop(0))
    for each in held:
        _end(each)
    with staging.borrowed(all_bytes, 1, 0.0) as (whole,):
        assert len(whole) == len(staging.memory)


def _end(held: tuple[ExitStack, list[np.ndarray]]) -> None:
    stack, (*buffers, mark) = held
    assert all((buffer == mark[0]).all() for buffer in buffers), "somebody else wrote there"
    stack.close()


def test_who_finds_no_room_waits_for_it_until_the_deadline() -> None:
    staging = Staging(4 * MIB)
    with staging.borrowed(4 * MIB, 1, 0.0):
        with pytest.raises(PoolTimeoutError, match="let fewer threads put"), staging.borrowed(1, 1, 0.05):
            pass
        got = threading.Event()

        def wait() -> None:
            with staging.borrowed(MIB, 1, 10.0):
                got.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not got.wait(0.05)
    assert got.wait(10)
    waiting.join()


def test_memory_needs_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels without them refuse the advice: those that are configured for real time."""

    class Pages(mmap.mmap):
        def madvise(self, *_: object) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(helpers.mmap, "mmap", Pages)
    staging = Staging(UNIT_BYTES)
    with staging.borrowed(UNIT_BYTES, 1, 0.0) as (buffer,):
        assert len(buffer) == UNIT_BYTES
    with staging.borrowed(3 * UNIT_BYTES, 4, 0.0) as buffers:  # More than the memory has: one buffer of its own.
        assert [len(buffer) for buffer in buffers] == [3 * UNIT_BYTES]
        assert not np.shares_memory(buffers[0], staging.memory)
