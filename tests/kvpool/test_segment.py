from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvpool.protocol.errors import ConfigError
from kvpool.transport.segment import Segment
from tests.support.memory_files import descriptors, mapped_bytes
from tests.support.processes import wait_for

NBYTES = 1 << 20


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(4 * NBYTES)
    yield made
    made.close()


@pytest.fixture
def attached(segment: Segment) -> Iterator[Segment]:
    made = Segment.attach(os.dup(segment.fd), segment.nbytes, segment.nonce)
    yield made
    made.close()


def _backed_bytes(segment: Segment) -> int:
    return os.fstat(segment.fd).st_blocks * 512


def test_the_memory_has_no_path_and_its_descriptor_is_not_inherited(segment: Segment) -> None:
    assert os.fstat(segment.fd).st_nlink == 0
    assert not os.get_inheritable(segment.fd)


def test_close_is_idempotent_and_leaves_no_file_descriptor() -> None:
    before = descriptors()
    segment = Segment.create(NBYTES)
    attached = Segment.attach(os.dup(segment.fd), segment.nbytes, segment.nonce)
    for each in (attached, attached, segment, segment):
        each.close()
    assert len(segment.bytes) == 0 and segment.fd == -1
    with pytest.raises(ConfigError, match=rf"cannot make {1 << 60} bytes of shared memory: .*; lower --memory"):
        Segment.create(1 << 60)
    assert descriptors() <= before


def test_a_view_outlives_close_and_the_memory_ends_with_the_view() -> None:
    segment = Segment.create(NBYTES)
    inode = os.fstat(segment.fd).st_ino
    view = segment.bytes[10:20]
    view[:] = 3
    segment.close()
    assert view.tolist() == [3] * 10
    assert mapped_bytes(inode)
    del view
    assert not mapped_bytes(inode)


def test_populate_backs_the_part_with_memory(segment: Segment) -> None:
    assert _backed_bytes(segment) <= NBYTES
    segment.populate(0, 4 * NBYTES)
    assert _backed_bytes(segment) >= 4 * NBYTES


def test_map_ahead_maps_what_the_owner_has_backed_and_backs_nothing_itself(segment: Segment, attached: Segment) -> None:
    inode = os.fstat(segment.fd).st_ino
    attached.map_ahead()
    assert mapped_bytes(inode) <= NBYTES
    segment.populate(0, 4 * NBYTES)
    wait_for(lambda: mapped_bytes(inode) >= 8 * NBYTES, "both mappings in the page tables")
