"""Buffers that lie evenly spaced are one copy, whatever order a pool has given them out in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_plugin.worker.copy.cuda import REGISTER_STEP_BYTES, Stretch, stretches_of

NBYTES, BASE = 512, 7 << 20


@given(slots=st.lists(st.integers(0, 40), min_size=1, max_size=30), slot_bytes=st.sampled_from([512, 1024, 1 << 28]))
def test_they_name_every_buffer_in_order(slots: list[int], slot_bytes: int) -> None:
    offsets = [slot * slot_bytes for slot in slots]
    found = stretches_of(offsets, NBYTES, BASE)
    assert [stretch.start for stretch in found] == [sum(s.count for s in found[:nth]) for nth in range(len(found))]
    addresses = [each.address + row * each.step for each in found for row in range(each.count)]
    assert addresses == [BASE + offset for offset in offsets]
    for stretch in found:
        first = (stretch.address - BASE) // REGISTER_STEP_BYTES
        last = (stretch.address - BASE + (stretch.count - 1) * stretch.step) // REGISTER_STEP_BYTES
        assert first == last, "one copy, two registrations"
        assert stretch.count == 1 or stretch.step >= NBYTES


@pytest.mark.parametrize("step", [NBYTES, 2 * NBYTES])  # A rank of one, and one of two.
def test_neighbouring_slots_are_one_copy(step: int) -> None:
    assert stretches_of(range(0, 16 * step, step), NBYTES, BASE) == [Stretch(0, 16, BASE, step)]


def test_a_gap_begins_another() -> None:
    assert stretches_of([0, 512, 2048, 2560], NBYTES, 0) == [Stretch(0, 2, 0, 512), Stretch(2, 2, 2048, 512)]
