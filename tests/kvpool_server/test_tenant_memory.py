"""Files of tenants: whatever the order in which extents change hands, no file has a byte of another tenant."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool.errors import OutOfSpaceError
from kvpool.segment import TRAILER_BYTES, Segment
from kvpool_server.data_plane.extent_files import ExtentFiles
from kvpool_server.tenant_memory import MAX_TENANTS, TenantMemory
from tests.support.effort import effort
from tests.support.processes import wait_for

PAGE = TRAILER_BYTES
EXTENT_BYTES, NUM_EXTENTS = 3 * PAGE, 4
TENANTS = ("acme", "umbra", "third")


class _ShortSegment(Segment):
    """A segment whose system has no memory while `is_short`: that cannot be had without another's OOM killer."""

    is_short = False
    gate: threading.Event | None = None

    def populate(self, start: int, nbytes: int, fd: int | None = None) -> None:
        if self.is_short:
            raise MemoryError("no memory for the arena")
        if self.gate is not None:
            assert self.gate.wait(20)
        super().populate(start, nbytes, fd)


class Rig:
    """A server's memory, a data worker's mapping of it, and each tenant's engine."""

    def __init__(self) -> None:
        made = Segment.create(EXTENT_BYTES * NUM_EXTENTS)
        self.segment = _ShortSegment(os.dup(made.fd), made.nbytes)
        made.close()
        self.segment.populate(0, self.segment.nbytes)
        self.memory = TenantMemory(self.segment, EXTENT_BYTES, lambda _: True)
        files = self.memory.files
        self.worker = Segment(os.dup(self.segment.fd), self.segment.nbytes, EXTENT_BYTES)
        self.followed = ExtentFiles(files.fds, files.table_fd, files.extent_bytes)
        self.engines = {tenant: self.engine(tenant) for tenant in TENANTS}

    def engine(self, tenant: str) -> Segment:
        info = self.memory.info(tenant)
        assert info is not None
        fd = self.memory.descriptor_of(info.token)
        assert fd is not None
        return Segment.attach(os.dup(fd), info)

    def hand_over(self, idx: int, tenant: str) -> None:
        for part in range(EXTENT_BYTES // PAGE):
            self.hand_over_part(idx, part, tenant)

    def hand_over_part(self, idx: int, part: int, tenant: str) -> None:
        while not self.memory.hand_over(idx * EXTENT_BYTES + part * PAGE, PAGE, tenant):
            pass

    def state(self, tenant: str, idx: int) -> int:
        """What the tenant's engines see of an extent."""
        extents = self.engines[tenant].extents
        assert extents is not None
        return extents.state(idx)

    def backed_bytes(self) -> int:
        """Of all files, without the pages that hold their nonces."""
        return sum(os.fstat(fd).st_blocks * 512 - TRAILER_BYTES for fd in self.memory.files.fds)

    def close(self) -> None:
        for each in (*self.engines.values(), self.worker):
            each.close()
        self.memory.close()
        self.segment.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def _extent(idx: int) -> slice:
    return slice(idx * EXTENT_BYTES, (idx + 1) * EXTENT_BYTES)


class TenantMemoryMachine(RuleBasedStateMachine):
    """A byte is the number of the tenant that wrote it, plus 1. The model says whose each extent is, "" of nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.owners = [""] * NUM_EXTENTS
        self.told: dict[int, tuple[str, int]] = {}  # By extent: the owner, and the state that its engines saw.
        self.given: set[int] = set()
        self.is_written = [False] * NUM_EXTENTS

    @rule(idx=st.integers(0, NUM_EXTENTS - 1), tenant=st.sampled_from(TENANTS), num_parts=st.integers(1, 3),
          is_short=st.booleans())  # fmt: skip
    def hand_over(self, idx: int, tenant: str, num_parts: int, is_short: bool) -> None:
        """All of an extent, or a part, because the put is given up or has no memory."""
        self.owners[idx], self.is_written[idx] = "", False
        self.told.pop(idx, None)
        for nth in range(num_parts):
            self.rig.segment.is_short = is_short and nth == num_parts - 1
            try:
                self.rig.hand_over_part(idx, nth, tenant)
            except OutOfSpaceError:
                assert self.rig.segment.is_short
                return
        if num_parts == EXTENT_BYTES // PAGE:
            self.owners[idx] = tenant
            assert not self.rig.segment.bytes[_extent(idx)].any()
            self.told[idx] = tenant, (state := self.rig.state(tenant, idx))
            assert state not in self.given, "an engine would take new pages for those that it has pinned"
            self.given.add(state)

    @rule(idx=st.integers(0, NUM_EXTENTS - 1), by=st.sampled_from(["server", "worker", "engine"]))
    def write(self, idx: int, by: str) -> None:
        """A tenant stores blocks in its extent, over some transport; all see them."""
        if tenant := self.owners[idx]:
            self.rig.followed.follow(self.rig.worker)
            views = {"server": self.rig.segment, "worker": self.rig.worker, "engine": self.rig.engines[tenant]}
            views[by].bytes[_extent(idx)] = TENANTS.index(tenant) + 1
            self.is_written[idx] = True
            for view in views.values():
                assert (view.bytes[_extent(idx)] == TENANTS.index(tenant) + 1).all()

    @rule(idx=st.integers(0, NUM_EXTENTS - 1), tenant=st.sampled_from(TENANTS))
    def stray(self, idx: int, tenant: str) -> None:
        """An engine writes where its tenant may have no extent."""
        self.rig.engines[tenant].bytes[_extent(idx)] = TENANTS.index(tenant) + 1

    @rule()
    def free_strays(self) -> None:
        self.rig.memory.free_strays()

    @invariant()
    def nobody_sees_anothers_bytes(self) -> None:
        for number, tenant in enumerate(TENANTS, 1):
            fd = self.rig.engines[tenant].fd
            seen = np.frombuffer(os.pread(fd, EXTENT_BYTES * NUM_EXTENTS, 0), np.uint8)
            assert set(seen.tolist()) <= {0, number}
        for idx, tenant in enumerate(self.owners):
            if tenant:
                seen = self.rig.segment.bytes[_extent(idx)]
                assert set(seen.tolist()) <= {0, TENANTS.index(tenant) + 1}
                assert seen.all() or not self.is_written[idx], "blocks were lost"

    @invariant()
    def engines_are_told_of_their_own_extents_alone(self) -> None:
        for idx in range(NUM_EXTENTS):
            told = {tenant: state for tenant in TENANTS if (state := self.rig.state(tenant, idx))}
            assert told == (dict([self.told[idx]]) if idx in self.told else {})

    def teardown(self) -> None:
        self.rig.segment.is_short = False
        for idx in range(NUM_EXTENTS):
            for tenant in TENANTS:  # Each in turn: its strays leave with the extent.
                self.rig.hand_over(idx, tenant)
        assert self.rig.backed_bytes() == EXTENT_BYTES * NUM_EXTENTS
        self.rig.close()


TestTenantMemory = TenantMemoryMachine.TestCase
TestTenantMemory.settings = settings(max_examples=effort(40), stateful_step_count=30)


def test_extents_take_the_memory_of_the_arena_and_no_more(rig: Rig) -> None:
    before = rig.backed_bytes()
    for turn in range(10):
        for idx in range(NUM_EXTENTS):
            rig.hand_over(idx, TENANTS[(turn + idx) % 3])
    assert rig.backed_bytes() == before == EXTENT_BYTES * NUM_EXTENTS


def test_an_extent_that_has_left_is_empty_for_its_last_owner_and_what_it_writes_there_reaches_nobody(rig: Rig) -> None:
    rig.hand_over(1, "acme")
    acme = rig.engines["acme"].bytes[_extent(1)]
    acme[:] = 1
    rig.hand_over(1, "umbra")
    assert not acme.any() and not rig.segment.bytes[_extent(1)].any()
    acme[:] = 1
    assert not rig.segment.bytes[_extent(1)].any() and not rig.engines["umbra"].bytes[_extent(1)].any()
    rig.hand_over(1, "acme")
    assert not acme.any(), "what an engine wrote in the meantime is gone"


def test_what_engines_touch_beside_their_tenants_extents_is_freed(rig: Rig) -> None:
    rig.hand_over(0, "acme")
    for engine in rig.engines.values():
        engine.bytes[:] = 1
    assert rig.backed_bytes() > EXTENT_BYTES * NUM_EXTENTS
    rig.memory.free_strays()
    rig.memory.free_strays()
    wait_for(lambda: rig.backed_bytes() == EXTENT_BYTES * NUM_EXTENTS, "the end of strays")
    assert rig.engines["acme"].bytes[_extent(0)].all() and rig.segment.bytes[_extent(0)].all()


def test_a_worker_follows_only_what_was_handed_over_in_full(rig: Rig) -> None:
    rig.followed.follow(rig.worker)
    rig.segment.bytes[0] = 7
    rig.hand_over(0, "acme")
    rig.segment.bytes[0] = 8
    assert rig.worker.bytes[0] == 0, "the hole that the extent left"
    rig.followed.follow(rig.worker)
    assert rig.worker.bytes[0] == 8
    rig.hand_over_part(0, 0, "umbra")
    rig.followed.follow(rig.worker)
    rig.engines["acme"].bytes[PAGE] = 9
    assert rig.worker.bytes[PAGE] == 9


def test_without_memory_the_put_is_refused_and_a_later_one_gets_all_of_the_extent(rig: Rig) -> None:
    rig.hand_over(2, "acme")
    rig.segment.bytes[_extent(2)] = 1
    rig.segment.is_short = True
    with pytest.raises(OutOfSpaceError, match=r"no free memory for these blocks now; try again later"):
        rig.hand_over(2, "umbra")
    rig.segment.is_short = False
    rig.hand_over(2, "umbra")
    assert not rig.segment.bytes[_extent(2)].any()
    rig.segment.bytes[_extent(2)] = 2
    assert (rig.engines["umbra"].bytes[_extent(2)] == 2).all()
    assert rig.backed_bytes() == EXTENT_BYTES * NUM_EXTENTS


def test_a_slow_hand_over_is_waited_for_elsewhere_and_one_that_was_given_up_disturbs_no_other(rig: Rig) -> None:
    rig.hand_over(0, "acme")
    rig.segment.bytes[_extent(0)] = 1
    may_go_on = threading.Event()
    rig.segment.gate = may_go_on
    began = time.thread_time()
    assert not rig.memory.hand_over(0, PAGE, "umbra") and not rig.memory.hand_over(0, PAGE, "umbra")
    assert not rig.memory.hand_over(0, PAGE, "third"), "the put of umbra was given up"
    assert time.thread_time() - began < 1, "it waits, and does not spin"
    may_go_on.set()
    rig.hand_over(0, "third")
    rig.segment.bytes[_extent(0)] = 3
    assert (rig.engines["third"].bytes[_extent(0)] == 3).all()
    assert not rig.engines["umbra"].bytes[_extent(0)].any() and not rig.engines["acme"].bytes[_extent(0)].any()
    rig.hand_over(0, "umbra")
    assert rig.backed_bytes() == EXTENT_BYTES * NUM_EXTENTS + EXTENT_BYTES, "and what acme has touched above"


def test_where_little_memory_is_free_nothing_is_taken_from_the_last_owner() -> None:
    segment = Segment.create(EXTENT_BYTES)
    memory = TenantMemory(segment, EXTENT_BYTES, lambda nbytes: False)
    segment.bytes[:] = 1
    with pytest.raises(OutOfSpaceError, match="no free memory"):
        any(memory.hand_over(0, PAGE, "acme") for _ in range(20_000))
    assert segment.bytes.all()
    memory.close()
    segment.close()


def test_more_tenants_than_files_have_their_extents_where_nobody_maps_them(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [f"tenant-{nth}" for nth in range(MAX_TENANTS - len(TENANTS))]
    tokens = {info.token for info in map(rig.memory.info, (*TENANTS, *others)) if info is not None}
    assert len(tokens) == MAX_TENANTS and all(rig.memory.descriptor_of(token) for token in tokens)
    rig.hand_over(0, "acme")
    rig.segment.bytes[_extent(0)] = 1
    for tenant in ("too many", "far too many"):
        assert rig.memory.info(tenant) is None
        rig.hand_over(0, tenant)
        assert not rig.segment.bytes[_extent(0)].any()
        rig.segment.bytes[_extent(0)] = 0xFF
    assert not rig.engines["acme"].bytes[_extent(0)].any()
    rig.hand_over(0, "acme")
    assert not rig.segment.bytes[_extent(0)].any()
    assert capsys.readouterr().out.count("further tenants get no memory to map") == 1


def test_a_token_stands_for_nothing_before_its_tenant_has_it(rig: Rig) -> None:
    unassigned = {info.token for info in rig.memory._infos} - {rig.memory.info(each).token for each in TENANTS}  # type: ignore[union-attr]
    assert len(unassigned) == MAX_TENANTS - len(TENANTS)
    assert not any(map(rig.memory.descriptor_of, unassigned))
    assert rig.memory.descriptor_of(rig.segment.token) is None
