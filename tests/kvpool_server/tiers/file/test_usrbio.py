"""3FS's rings. There is no 3FS here: a stand-in with the same interface shows that ours is used as it is meant."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.protocol.errors import ConfigError
from kvpool_server.tiers.file import extents
from kvpool_server.tiers.file.extents import UsrbioDisk
from kvpool_server.tiers.tier import Tier
from tests.contracts.tier_contract import PersistentTierContract
from tests.support.file_tier import file_tier


class _Ring:
    """As `hf3fs_fuse.io.ioring`: one direction, registered descriptors only, results by request."""

    def __init__(self, registered: set[int], for_read: bool):
        self._registered = registered
        self._for_read = for_read
        self._prepared: list[tuple[memoryview, int, int]] = []

    def prepare(self, buffer: memoryview, is_read: bool, fd: int, offset: int) -> None:
        assert is_read == self._for_read and fd in self._registered
        self._prepared.append((buffer, fd, offset))

    def submit(self) -> _Ring:
        return self

    def wait(self, min_results: int) -> list[types.SimpleNamespace]:
        prepared, self._prepared = self._prepared, []
        assert len(prepared) >= min_results
        move = os.preadv if self._for_read else os.pwritev
        return [types.SimpleNamespace(result=move(fd, [buffer], offset)) for buffer, fd, offset in prepared]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[int]:
    """Puts the stand-in where the package would be; its registered descriptors."""
    fds: set[int] = set()
    io: Any = types.ModuleType("hf3fs_fuse.io")
    io.extract_mount_point = lambda path: str(tmp_path) if path.startswith(str(tmp_path)) else None
    io.register_fd, io.deregister_fd = fds.add, fds.remove
    io.make_iovec = lambda shared, mount, block_bytes, numa: shared.buf
    io.make_ioring = lambda mount, entries, for_read, io_depth: _Ring(fds, for_read)
    package: Any = types.ModuleType("hf3fs_fuse")
    package.io = io
    monkeypatch.setitem(sys.modules, "hf3fs_fuse", package)
    monkeypatch.setitem(sys.modules, "hf3fs_fuse.io", io)
    return fds


class TestUsrbio(PersistentTierContract):
    @pytest.fixture(params=[extents.RING_BUFFER_BYTES, 1000], ids=["large buffer", "small buffer"])
    def make_tier(
        self, registered: set[int], tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[[], Tier]:
        monkeypatch.setattr(extents, "RING_BUFFER_BYTES", request.param)
        return lambda: file_tier(tmp_path, io="usrbio", disk=UsrbioDisk(tmp_path))

    @pytest.fixture(autouse=True)
    def _nothing_stays_registered(self, registered: set[int]) -> Any:
        yield
        assert not registered


def test_a_path_that_is_not_on_3fs_is_an_error(registered: set[int]) -> None:
    with pytest.raises(ConfigError, match="io=usrbio: /elsewhere is not on a mount of 3FS"):
        UsrbioDisk(Path("/elsewhere"))


def test_without_the_package_the_error_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="io=usrbio needs the package hf3fs_fuse"):
        UsrbioDisk(tmp_path)
