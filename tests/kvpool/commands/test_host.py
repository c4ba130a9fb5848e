from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.client.client import Client
from kvpool.commands import doctor_checks
from kvpool.report.judgements import Finding, Level
from tests.conftest import StartServer

RDMA_PAGES = "7f00 default file=/memfd:kvpool-12 dirty=8 N1=8 kernelpagesize_kB=4\n7e00 default heap N0=3\n"


def _node(count: int) -> None:
    for nth in range(count):
        (doctor_checks.SYS / f"devices/system/node/node{nth}").mkdir(parents=True)


def _gpu(name: str, node: int, vendor: str = "0x10de", kind: str = "0x030200") -> None:
    device = doctor_checks.SYS / "bus/pci/devices" / name
    device.mkdir(parents=True)
    for file, text in (("vendor", vendor), ("class", kind), ("numa_node", str(node))):
        (device / file).write_text(f"{text}\n")


def only(findings: list[Finding]) -> Finding:
    (found,) = findings
    assert bool(found.fix) == (found.level is not Level.OK)
    return found


def test_a_host_without_memory_left_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "MEMINFO", meminfo := tmp_path / "meminfo")
    meminfo.write_text("MemTotal:       100000 kB\nMemFree: 1 kB\nMemAvailable:   90000 kB\n")
    assert only(doctor_checks.memory()).level is Level.OK
    meminfo.write_text("MemTotal:       100000 kB\nMemFree: 1 kB\nMemAvailable:   1000 kB\n")
    found = only(doctor_checks.memory())
    assert found.level is Level.WARNING and found.text == "1000 KiB of this host's 97.7 MiB are available"


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("always within_size advise [never] deny force", Level.WARNING),
        ("always within_size [advise] never deny force", Level.OK),
        ("[always] within_size advise never deny force", Level.OK),
        (None, Level.OK),
    ],
)
def test_huge_pages_of_shared_memory_are_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, level: Level
) -> None:
    monkeypatch.setattr(doctor_checks, "HUGE_PAGES", setting := tmp_path / "shmem_enabled")
    if text is not None:
        setting.write_text(text)
    assert only(doctor_checks.huge_pages()).level is level


@pytest.mark.parametrize(
    ("check", "limit", "level"),
    [
        (doctor_checks.open_files, 1_024, Level.WARNING),
        (doctor_checks.open_files, 65_536, Level.OK),
        (doctor_checks.open_files, resource.RLIM_INFINITY, Level.OK),
        (doctor_checks.memlock, 8 << 20, Level.OK),
        (lambda: doctor_checks.memlock(uses_rdma=True), 8 << 20, Level.WARNING),
        (lambda: doctor_checks.memlock(uses_rdma=True), resource.RLIM_INFINITY, Level.OK),
    ],
)
def test_few_open_files_and_little_locked_memory_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[], list[Finding]], limit: int, level: Level
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert only(check()).level is level


def test_an_arena_on_another_node_than_the_gpus_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool_server: StartServer, connect: Callable[..., Client]
) -> None:
    client = connect(pool_server())
    monkeypatch.setattr(doctor_checks, "SYS", tmp_path)
    assert only(doctor_checks.numa(client)).text == "this host has one node"
    _node(2)
    if doctor_checks.NUMA_MAPS.exists():
        assert "the arena on node" in only(doctor_checks.numa(client)).text, (
            "the kernel tells the nodes of a real arena"
        )
    monkeypatch.setattr(doctor_checks, "NUMA_MAPS", maps := tmp_path / "numa_maps")
    maps.write_text(RDMA_PAGES)
    _gpu("0000:01:00.0", 0, vendor="0x8086")
    _gpu("0000:02:00.0", 0, kind="0x020000")
    _gpu("0000:03:00.0", -1)
    found = only(doctor_checks.numa(client))
    assert found.level is Level.OK and found.text == "no NVIDIA GPU is visible; the arena on node 1"
    _gpu("0000:04:00.0", 0)
    found = only(doctor_checks.numa(client))
    assert found.level is Level.WARNING and found.text == "GPUs on node 0; the arena on node 1"
    _gpu("0000:05:00.0", 1)
    found = only(doctor_checks.numa(client))
    assert found.level is Level.OK and "nodes 0, 1" in found.text
