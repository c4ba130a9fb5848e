"""Memory of the server: what the collector looks at, and an arena that the host, or the container, has no room for."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing
from pathlib import Path

import pytest
from pydantic import ByteSize

from kvpool.protocol.errors import ConfigError
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.app import arena_memory
from kvpool_server.app.arena_memory import STEP_BYTES, ArenaMemory, check_fits, check_free, free_bytes
from kvpool_server.process.runtime import THRESHOLDS, freeze_survivors, keep_collections_short
from kvpool_server.settings.config import ServerConfig
from tests.support.in_process_server import InProcessServer
from tests.support.processes import wait_for


class Node:
    def __init__(self) -> None:
        self.itself: Node | None = self


@pytest.fixture
def short_collections() -> Iterator[None]:
    before = gc.get_threshold()
    keep_collections_short()
    yield
    gc.callbacks.remove(freeze_survivors)
    gc.set_threshold(*before)
    gc.unfreeze()


def test_what_came_through_a_full_collection_is_looked_at_by_no_other_and_new_cycles_are_found(
    short_collections: None,
) -> None:
    keep_collections_short()
    assert gc.get_threshold() == THRESHOLDS and gc.callbacks.count(freeze_survivors) == 1
    kept, held = [[] for _ in range(1_000)], [Node()]
    held[0].itself = None
    cycle, acyclic = weakref.ref(Node()), weakref.ref(held[0])
    before = gc.get_freeze_count()
    assert cycle() is not None
    gc.collect()
    assert cycle() is None
    assert gc.get_freeze_count() >= before + len(kept)
    assert not any(tracked is kept for tracked in gc.get_objects())
    held.clear()
    assert acyclic() is None, "what is frozen is freed by its reference count"


def test_calls_leave_no_cycles(short_collections: None) -> None:
    """A call that is in one, and under way during a full collection, would stay for ever."""

    def num_calls() -> int:
        return sum(type(each).__name__ == "_ServicerContext" for each in gc.get_objects())

    with closing(InProcessServer(1 << 20, 1 << 18)) as server:
        server.stub.Ping(pb.PingRequest(), timeout=10)
        gc.collect()
        gc.disable()
        try:
            for _ in range(50):
                server.stub.Ping(pb.PingRequest(), timeout=10)
            wait_for(lambda: server.on_loop(num_calls) <= 1, "the end of all calls", 10)
        finally:
            gc.enable()


MIB = 1 << 20


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A container with a limit of 200 MiB, of which 100 MiB are used, 40 MiB of these by the page cache."""
    files = {"memory.max": 200 * MIB, "memory.current": 100 * MIB}
    for name, nbytes in files.items():
        (tmp_path / name).write_text(f"{nbytes}\n")
    (tmp_path / "memory.stat").write_text(
        f"anon {50 * MIB}\nfile {45 * MIB}\nshmem {5 * MIB}\ninactive_file {30 * MIB}\nactive_file {10 * MIB}\n"
    )
    monkeypatch.setattr(arena_memory, "CGROUP", tmp_path)
    return tmp_path


def test_an_arena_larger_than_the_container_or_than_what_is_free_with_its_page_cache_is_refused(cgroup: Path) -> None:
    check_fits(ByteSize(200 * MIB))
    check_free(ByteSize(140 * MIB))
    with pytest.raises(ConfigError, match=r"memory = 201\.0MiB is more than the container's memory limit, 200\.0MiB"):
        check_fits(ByteSize(201 * MIB))
    with pytest.raises(
        ConfigError, match=r"memory = 141\.0MiB is more than the free memory, 140\.0MiB; lower --memory"
    ):
        check_free(ByteSize(141 * MIB))
    (cgroup / "memory.max").write_text("max\n")
    assert free_bytes() > 140 * MIB


def test_memory_that_others_have_taken_since_is_an_error_before_the_kernel_ends_a_process(cgroup: Path) -> None:
    async def back() -> None:
        memory = ArenaMemory(ServerConfig(memory=ByteSize(2 * STEP_BYTES)), has_tenants=False)
        async with AsyncExitStack() as stack:
            await memory.create(stack)
            await memory.back_step()
            (cgroup / "memory.current").write_text(str(180 * MIB))
            (cgroup / "memory.stat").write_text("inactive_file 0\nactive_file 0\n")
            says = rf"no memory for the arena at {STEP_BYTES}: {20 * MIB} bytes are free"
            with pytest.raises(MemoryError, match=says):
                await memory.back_all()
            assert memory.backed_bytes == STEP_BYTES

    asyncio.run(back())
