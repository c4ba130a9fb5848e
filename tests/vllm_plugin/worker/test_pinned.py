"""Buffers that lie evenly spaced are one copy, whatever order a pool has given them out in. Memory is registered while
its pages are there, and while copies use it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.processes import wait_for
from vllm_plugin.worker.copy import pinned
from vllm_plugin.worker.copy.pinned import REGISTER_STEP_BYTES, Loan, PinnedMemory, StridedRun, strided_runs

NBYTES, BASE = 512, 7 << 20
EXTENTS, EXTENT_BYTES = 4, 8 * NBYTES


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


@pytest.mark.parametrize("step", [NBYTES, 2 * NBYTES])  # A rank of one, and one of two.
def test_neighbouring_slots_are_one_copy(step: int) -> None:
    assert strided_runs(range(0, 16 * step, step), NBYTES, BASE) == [StridedRun(0, 16, BASE, step)]


def test_a_gap_begins_another() -> None:
    assert strided_runs([0, 512, 2048, 2560], NBYTES, 0) == [StridedRun(0, 2, 0, 512), StridedRun(2, 2, 2048, 512)]


class Registrations:
    """What a driver has registered: bytes by address. It refuses what overlaps, as CUDA does, and from `most` on."""

    def __init__(self, most: int = 100):
        self.nbytes_at: dict[int, int] = {}
        self.most = most

    def enter(self) -> None:
        pass

    def register(self, address: int, nbytes: int) -> int:
        assert all(address + nbytes <= start or start + size <= address for start, size in self.nbytes_at.items())
        if len(self.nbytes_at) >= self.most:
            return 2
        self.nbytes_at[address] = nbytes
        return 0

    def unregister(self, address: int) -> None:
        del self.nbytes_at[address]


class States:
    """Extents whose states the test sets."""

    extent_bytes = EXTENT_BYTES

    def __init__(self) -> None:
        self.states = [0] * EXTENTS

    def state(self, idx: int) -> int:
        return self.states[idx]


class Extents:
    """Pinned memory of a tenant, whose extents come and go."""

    def __init__(self) -> None:
        self.memory = np.zeros(EXTENTS * EXTENT_BYTES, np.uint8)
        self.host, self.states = Registrations(), States()
        self.pinned = PinnedMemory(self.memory, self.host, self.states)

    def slot(self, extent: int, nth: int = 0) -> np.ndarray:
        at = extent * EXTENT_BYTES + nth * NBYTES
        return self.memory[at : at + NBYTES]

    def registered(self) -> list[int]:
        """The extents that the driver has."""
        base = self.memory.ctypes.data
        assert set(self.host.nbytes_at.values()) <= {EXTENT_BYTES}
        return sorted((address - base) // EXTENT_BYTES for address in list(self.host.nbytes_at))

    def wait_for(self, *extents: int) -> None:
        wait_for(lambda: self.registered() == list(extents), f"extents {extents} to be registered, alone")

    def borrowed(self, *extents: int) -> Loan:
        loans: list[Loan] = []

        def borrow() -> bool:
            loan = self.pinned.borrow([self.slot(each) for each in extents])
            loans.extend(() if loan is None else [loan])
            return loan is not None

        wait_for(borrow, f"extents {extents} to be lent")
        return loans[0]


@pytest.fixture
def extents(monkeypatch: pytest.MonkeyPatch) -> Iterator[Extents]:
    monkeypatch.setattr(pinned, "FOLLOW_S", 0.001)
    made = Extents()
    yield made
    made.pinned.close()
    wait_for(lambda: not any(thread.name == "kvpool-pin" for thread in threading.enumerate()), "the thread to end")


def test_extents_are_registered_while_their_pages_are_there(extents: Extents) -> None:
    assert extents.pinned.borrow([extents.slot(1)]) is None
    extents.states.states = [0, 1, 1, 0]
    extents.wait_for(1, 2)
    extents.states.states = [0, 0, 1, 3]
    extents.wait_for(2, 3)
    extents.pinned.close()
    extents.wait_for()


def test_an_extent_that_left_and_came_back_is_not_lent_with_its_old_pages(extents: Extents) -> None:
    extents.states.states[0] = 1
    loan = extents.borrowed(0)  # Keeps the thread from registering the new pages.
    extents.states.states[0] = 3
    assert extents.pinned.borrow([extents.slot(0)]) is None
    assert extents.registered() == [0], "a copy still uses the old pages"
    loan.give_back()
    extents.borrowed(0).give_back()


def test_a_loan_names_the_runs_and_needs_every_extent(extents: Extents) -> None:
    extents.states.states = [1, 1, 0, 0]
    loan = extents.borrowed(0, 1)
    assert [(run.start, run.count) for run in loan.runs] == [(0, 1), (1, 1)], "one copy, two registrations"
    assert extents.pinned.borrow([extents.slot(0), extents.slot(2)]) is None
    assert extents.pinned.borrow([np.zeros(NBYTES, np.uint8)]) is None
    straddling = extents.memory[EXTENT_BYTES - NBYTES // 2 :][:NBYTES]
    assert extents.pinned.borrow([straddling]) is None


def test_memory_is_unregistered_with_its_last_loan(extents: Extents) -> None:
    extents.states.states = [1, 1, 0, 0]
    loans = [extents.borrowed(0), extents.borrowed(1)]
    wait_for(lambda: len(extents.registered()) == 2, "both extents")
    extents.pinned.close()
    assert extents.pinned.borrow([extents.slot(0)]) is None
    for loan in loans:
        assert extents.registered() == [0, 1]
        loan.give_back()
    extents.wait_for()


def test_without_extents_all_of_the_memory_is_registered_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "REGISTER_STEP_BYTES", EXTENT_BYTES)
    memory, host = np.zeros(3 * EXTENT_BYTES + NBYTES, np.uint8), Registrations()
    whole = PinnedMemory(memory, host)
    wait_for(lambda: len(host.nbytes_at) == 4, "every part")
    assert sum(host.nbytes_at.values()) == memory.nbytes
    loan = whole.borrow([memory[-NBYTES:]])
    assert loan is not None
    whole.close()
    assert host.nbytes_at
    loan.give_back()
    wait_for(lambda: not host.nbytes_at, "the memory to be unregistered")


def test_what_the_driver_refuses_is_not_lent(extents: Extents) -> None:
    extents.host.most = 1
    extents.states.states = [1, 1, 0, 0]
    loan = extents.borrowed(0)
    assert extents.pinned.borrow([extents.slot(1)]) is None
    loan.give_back()
    extents.states.states = [0, 1, 0, 0]
    extents.wait_for()
