"""Memory that the host, or the container, cannot give."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from pydantic import ByteSize

from kvpool.protocol.errors import ConfigError
from kvpool_server.app import arena_memory
from kvpool_server.app.arena_memory import STEP_BYTES, ArenaMemory, check_fits, check_free, free_bytes
from kvpool_server.settings.config import ServerConfig

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


def test_what_is_free_in_a_container_counts_its_page_cache_as_free(cgroup: Path) -> None:
    assert free_bytes() == 140 * MIB
    (cgroup / "memory.max").write_text("max\n")
    assert free_bytes() > 140 * MIB


def test_an_arena_larger_than_the_container_or_than_what_is_free_is_refused(cgroup: Path) -> None:
    check_fits(ByteSize(200 * MIB))
    check_free(ByteSize(140 * MIB))
    with pytest.raises(ConfigError, match=r"memory = 201\.0MiB is more than the container's memory limit, 200\.0MiB"):
        check_fits(ByteSize(201 * MIB))
    with pytest.raises(
        ConfigError, match=r"memory = 141\.0MiB is more than the free memory, 140\.0MiB; lower --memory"
    ):
        check_free(ByteSize(141 * MIB))


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
