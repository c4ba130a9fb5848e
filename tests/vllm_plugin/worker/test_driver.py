"""Buffers that lie evenly spaced are one copy, in whatever order the pool gives them out. Memory stays registered while
copies use it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.processes import wait_for
from vllm_plugin.worker.copy import driver
from vllm_plugin.worker.copy.driver import REGISTER_STEP_BYTES, PinnedMemory, StridedRun, strided_runs

NBYTES, BASE = 512, 7 << 20
NUM_PARTS, PART_BYTES = 4, 8 * NBYTES


@given(slots=st.lists(st.integers(0, 40), min_size=1, max_size=30), slot_bytes=st.sampled_from([512, 1024, 1 << 28]))
def test_they_name_every_buffer_in_order(slots: list[int], slot_bytes: int) -> None:
    offsets = [slot * slot_bytes for slot in slots]
    found = strided_runs(offsets, NBYTES, BASE)
    assert [run.start for run in found] == [sum(s.count for s in found[:nth]) for nth in range(len(found))]
    addresses = [each.address + row * each.step for each in found for row in range(each.count)]
    assert addresses == [BASE + offset for offset in offsets]
    for run in found:
        first = (run.address - BASE) // REGISTER_STEP_BYTES
        last = (run.address - BASE + (run.count - 1) * run.step) // REGISTER_STEP_BYTES
        assert first == last, "one copy, two registrations"
        assert run.count == 1 or run.step >= NBYTES


def test_neighbouring_slots_are_one_copy_and_a_gap_begins_another() -> None:
    for step in (NBYTES, 2 * NBYTES):  # A rank of one, and one of two.
        assert strided_runs(range(0, 16 * step, step), NBYTES, BASE) == [StridedRun(0, 16, BASE, step)]
    assert strided_runs([0, 512, 2048, 2560], NBYTES, 0) == [StridedRun(0, 2, 0, 512), StridedRun(2, 2, 2048, 512)]


class Registrations:
    """What a driver has registered: bytes by address. It refuses what overlaps, as CUDA does, and from `most` on."""

    def __init__(self, most: int = 100):
        self.nbytes_at: dict[int, int] = {}
        self.most = most

    def register(self, address: int, nbytes: int) -> int:
        assert all(address + nbytes <= start or start + size <= address for start, size in self.nbytes_at.items())
        if len(self.nbytes_at) >= self.most:
            return 2
        self.nbytes_at[address] = nbytes
        return 0

    def unregister(self, address: int) -> None:
        del self.nbytes_at[address]


class Parts:
    """Pinned memory of four parts."""

    def __init__(self, most: int = NUM_PARTS):
        self.memory = np.zeros(NUM_PARTS * PART_BYTES, np.uint8)
        self.host = Registrations(most)
        self.pinned = PinnedMemory(self.memory, self.host)
        wait_for(lambda: len(self.host.nbytes_at) == most, "the parts to be registered")

    def slot(self, part: int) -> np.ndarray:
        return self.memory[part * PART_BYTES :][:NBYTES]

    def borrowed(self, *parts: int) -> list[StridedRun]:
        return wait_for(lambda: self.pinned.borrow([self.slot(each) for each in parts]), f"parts {parts} to be lent")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Parts]]:
    monkeypatch.setattr(driver, "REGISTER_STEP_BYTES", PART_BYTES)
    made: list[Parts] = []

    def make(most: int = NUM_PARTS) -> Parts:
        made.append(Parts(most))
        return made[-1]

    yield make
    for each in made:
        each.pinned.close()
    wait_for(lambda: not any(thread.name == "kvpool-pin" for thread in threading.enumerate()), "the thread to end")


def test_lending_names_the_runs_and_needs_buffers_within_one_part(parts: Callable[..., Parts]) -> None:
    whole = parts()
    runs = whole.borrowed(0, 1)
    assert [(run.start, run.count) for run in runs] == [(0, 1), (1, 1)], "one copy, two registrations"
    whole.pinned.give_back()
    assert whole.pinned.borrow([np.zeros(NBYTES, np.uint8)]) == []
    straddling = whole.memory[PART_BYTES - NBYTES // 2 :][:NBYTES]
    assert whole.pinned.borrow([straddling]) == []


def test_memory_is_unregistered_with_its_last_use(parts: Callable[..., Parts]) -> None:
    whole = parts()
    assert sum(whole.host.nbytes_at.values()) == whole.memory.nbytes
    for part in (0, 1):
        whole.borrowed(part)
    whole.pinned.close()
    assert whole.pinned.borrow([whole.slot(0)]) == []
    for _ in range(2):
        assert len(whole.host.nbytes_at) == NUM_PARTS
        whole.pinned.give_back()
    wait_for(lambda: not whole.host.nbytes_at, "the memory to be unregistered")


def test_what_the_driver_refuses_is_not_lent(parts: Callable[..., Parts]) -> None:
    whole = parts(most=1)
    whole.borrowed(0)
    assert whole.pinned.borrow([whole.slot(1)]) == whole.pinned.borrow([whole.slot(0), whole.slot(1)]) == []
    whole.pinned.give_back()
    whole.pinned.close()
    wait_for(lambda: not whole.host.nbytes_at, "the memory to be unregistered")
