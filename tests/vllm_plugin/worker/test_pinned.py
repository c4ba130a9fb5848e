"""Buffers that lie evenly spaced are one copy, whatever order a pool has given them out in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_plugin.worker.copy.pinned import REGISTER_STEP_BYTES, StridedRun, strided_runs

NBYTES, BASE = 512, 7 << 20


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
