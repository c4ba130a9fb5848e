from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.client.client import Client
from kvpool.doctor import host
from kvpool.report.finding import Level
from tests.conftest import StartServer

RDMA_PAGES = "7f00 default file=/memfd:kvpool-12 dirty=8 N1=8 kernelpagesize_kB=4\n7e00 default heap N0=3\n"


def _node(sys: Path, count: int) -> None:
    for nth in range(count):
        (sys / f"devices/system/node/node{nth}").mkdir(parents=True)


def _gpu(sys: Path, name: str, node: int, vendor: str = "0x10de", kind: str = "0x030200") -> None:
    device = sys / "bus/pci/devices" / name
    device.mkdir(parents=True)
    for file, text in (("vendor", vendor), ("class", kind), ("numa_node", str(node))):
        (device / file).write_text(f"{text}\n")


def test_a_host_without_memory_left_is_named(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       100000 kB\nMemFree: 1 kB\nMemAvailable:   90000 kB\n")
    assert [each.level for each in host.memory(meminfo)] == [Level.OK]
    meminfo.write_text("MemTotal:       100000 kB\nMemFree: 1 kB\nMemAvailable:   1000 kB\n")
    (found,) = host.memory(meminfo)
    assert found.level is Level.WARNING and found.text == "1000 KiB of this host's 97.7 MiB are available"


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("always within_size advise [never] deny force", Level.WARNING),
        ("always within_size [advise] never deny force", Level.OK),
        ("[always] within_size advise never deny force", Level.OK),
    ],
)
def test_huge_pages_of_shared_memory_are_looked_up(tmp_path: Path, text: str, level: Level) -> None:
    setting = tmp_path / "shmem_enabled"
    setting.write_text(text)
    (found,) = host.huge_pages(setting)
    assert found.level is level and bool(found.fix) == (level is not Level.OK)
    assert [each.level for each in host.huge_pages(tmp_path / "none")] == [Level.OK]


@pytest.mark.parametrize(
    ("limit", "level"), [(1_024, Level.WARNING), (65_536, Level.OK), (resource.RLIM_INFINITY, Level.OK)]
)
def test_few_open_files_are_warned_of(limit: int, level: Level) -> None:
    assert [each.level for each in host.open_files(limit)] == [level]


@pytest.mark.parametrize(
    ("limit", "uses_rdma", "level"),
    [
        (8 << 20, False, Level.OK),
        (8 << 20, True, Level.WARNING),
        (resource.RLIM_INFINITY, True, Level.OK),
    ],
)
def test_locked_memory_matters_for_rdma(limit: int, uses_rdma: bool, level: Level) -> None:
    assert [each.level for each in host.memlock(limit, uses_rdma=uses_rdma)] == [level]


def test_gpus_are_found_by_their_nodes(tmp_path: Path) -> None:
    _gpu(tmp_path, "0000:01:00.0", 1)
    _gpu(tmp_path, "0000:02:00.0", -1)
    _gpu(tmp_path, "0000:03:00.0", 0, vendor="0x8086")
    _gpu(tmp_path, "0000:04:00.0", 0, kind="0x020000")
    assert host.gpu_nodes(tmp_path) == {1}


def test_the_nodes_of_an_arena_are_those_of_its_pages() -> None:
    assert host.nodes_in(RDMA_PAGES) == {1}
    assert host.nodes_in("7e00 default heap N0=3") == set()


def test_an_arena_on_another_node_than_the_gpus_is_warned_of(
    tmp_path: Path, pool_server: StartServer, connect: Callable[..., Client]
) -> None:
    client = connect(pool_server())
    maps = tmp_path / "numa_maps"
    maps.write_text(RDMA_PAGES)
    assert [each.text for each in host.numa(client, tmp_path, maps)] == ["this host has one node"]
    _node(tmp_path, 2)
    (found,) = host.numa(client, tmp_path, maps)
    assert found.level is Level.OK and "no NVIDIA GPU is visible; the arena on node 1" in found.text
    _gpu(tmp_path, "0000:01:00.0", 0)
    (found,) = host.numa(client, tmp_path, maps)
    assert found.level is Level.WARNING and found.text == "GPUs on node 0; the arena on node 1"
    _gpu(tmp_path, "0000:02:00.0", 1)
    (found,) = host.numa(client, tmp_path, maps)
    assert found.level is Level.OK and "nodes 0, 1" in found.text


def test_the_kernel_tells_the_nodes_of_a_real_arena(
    tmp_path: Path, pool_server: StartServer, connect: Callable[..., Client]
) -> None:
    maps = Path("/proc/self/numa_maps")
    if not maps.exists():
        pytest.skip("this kernel has no NUMA")
    _node(tmp_path, 2)
    (found,) = host.numa(connect(pool_server()), tmp_path, maps)
    assert "the arena on node" in found.text
