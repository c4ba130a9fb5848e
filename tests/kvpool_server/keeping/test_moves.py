"""Moves of kept memory to another size: what they take meanwhile, and what is left if they end early."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kvpool.transport.segment import Segment
from kvpool_server.app import arena_memory
from kvpool_server.app.arena_memory import STEP_BYTES, ArenaMemory
from kvpool_server.keeping import store
from kvpool_server.keeping.adoption import ARENA
from kvpool_server.keeping.table import TABLE, Geometry, SlotTable
from kvpool_server.settings.config import ServerConfig
from tests.support.kept_server import Manager

EXTENT_BYTES, BEFORE, NOW = 32 << 20, 4, 5
"""Bytes of an extent, and how many there were and are."""


def _taken(*segments: Segment) -> int:
    return sum(os.fstat(each.fd).st_blocks * 512 for each in segments if each.fd >= 0)


class Moving:
    """Old memory whose last extent alone has blocks, and a server with new memory on a host that has `spare_bytes`."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack, spare_bytes: int):
        manager = stack.enter_context(closing(Manager(tmp_path)))
        for name, value in manager.environment.items():
            monkeypatch.setenv(name, value)
        nbytes = BEFORE * EXTENT_BYTES
        self.before = Segment.create(nbytes)
        self.before.populate(0, nbytes)
        self.before.bytes[-EXTENT_BYTES:] = 7
        geometry = Geometry(nbytes, EXTENT_BYTES, False, self.before.nonce, self.before.token)
        self.table = SlotTable.create(geometry)
        self.table.backed_bytes = nbytes
        self.table.put_extent(BEFORE - 1, 4_096)
        for name, fd in ((ARENA, self.before.fd), (TABLE, self.table.fd)):
            store.give(name, fd)
        self.most = 0
        monkeypatch.setattr(arena_memory, "free_bytes", lambda: 1 << 40)
        self.memory = ArenaMemory(ServerConfig(memory=NOW * EXTENT_BYTES), has_tenants=False)
        for owner in (self.before, self.table):
            stack.callback(owner.close)

        def free_bytes() -> int:
            self.most = max(self.most, taken := _taken(self.before, *self._new()))
            return nbytes + spare_bytes - taken

        monkeypatch.setattr(arena_memory, "free_bytes", free_bytes)

    def _new(self) -> list[Segment]:
        return [self.memory.segment] if hasattr(self.memory, "segment") else []

    def move(self) -> None:
        self.memory._move(self.before, self.table)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_move_takes_little_more_than_the_larger_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    moving = Moving(tmp_path, monkeypatch, stack, EXTENT_BYTES + STEP_BYTES)
    moving.move()
    assert moving.memory.backed_bytes == BEFORE * EXTENT_BYTES
    assert (moving.memory.segment.bytes[(BEFORE - 1) * EXTENT_BYTES : BEFORE * EXTENT_BYTES] == 7).all()
    moving.memory.segment.close()
    assert moving.most <= BEFORE * EXTENT_BYTES + STEP_BYTES


def test_a_move_without_room_ends_the_start_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    moving = Moving(tmp_path, monkeypatch, stack, EXTENT_BYTES // 2)
    with pytest.raises(arena_memory.ConfigError, match=r"memory = 160\.0MiB is more than the free memory and"):
        moving.move()
    assert _taken(moving.before) >= BEFORE * EXTENT_BYTES and moving.table.slot_bytes(BEFORE - 1)
