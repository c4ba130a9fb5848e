"""Checks of this host: memory, huge pages, limits, and NUMA nodes."""

from __future__ import annotations

import mmap
import re
import resource
from pathlib import Path

from kvpool.client.client import Client
from kvpool.report.finding import Finding, ok, warning
from kvpool.report.quotas import size_text
from kvpool.transport.shm import ShmTransport

MEMINFO, NUMA_MAPS, SYS = Path("/proc/meminfo"), Path("/proc/self/numa_maps"), Path("/sys")
HUGE_PAGES = SYS / "kernel/mm/transparent_hugepage/shmem_enabled"
LEAST_AVAILABLE_SHARE = 0.05
LEAST_FILES = 4_096
LEAST_LOCKED_BYTES = 1 << 30
SAMPLED_PAGES = 64
"""Of the arena, whose NUMA nodes are looked up."""
_NVIDIA, _DISPLAY = "0x10de", "0x03"


def memory() -> list[Finding]:
    """Whether the host has memory left."""
    sizes = {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", MEMINFO.read_text(), re.MULTILINE)}
    total, available = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    text = f"{size_text(available)} of this host's {size_text(total)} are available"
    if available < LEAST_AVAILABLE_SHARE * total:
        return [warning("memory of the host", text, "end what takes it, or lower the server's --memory")]
    return [ok("memory of the host", text)]


def huge_pages() -> list[Finding]:
    """Whether the arena gets huge pages on this host."""
    try:
        chosen = re.findall(r"\[(\w+)\]", HUGE_PAGES.read_text())
    except OSError:
        return [ok("huge pages", "this kernel has no transparent huge pages for shared memory")]
    if chosen and chosen[0] in ("always", "advise", "within_size", "force"):
        return [ok("huge pages", f"shared memory gets them ({chosen[0]})")]
    text = f"shared memory gets none on this host ({HUGE_PAGES} says {chosen[0] if chosen else 'nothing'})"
    return [warning("huge pages", text, f"write advise to {HUGE_PAGES} on the server's host, and restart the server")]


def open_files() -> list[Finding]:
    """Whether a process may open enough files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return [ok("open files", "a process started from here may open any number of files")]
    text = f"a process started from here may open {limit:,} files"
    if limit < LEAST_FILES:
        return [warning("open files", text, f"raise the limit to {LEAST_FILES:,} or more (ulimit -n)")]
    return [ok("open files", text)]


def memlock(*, uses_rdma: bool = False) -> list[Finding]:
    """Whether a process may lock enough memory; RDMA locks the memory that it moves."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return [ok("memlock", "a process started from here may lock all memory")]
    text = f"a process started from here may lock {size_text(limit)}"
    if uses_rdma and limit < LEAST_LOCKED_BYTES:
        return [warning("memlock", text, "RDMA locks the memory that it moves: set the limit to unlimited")]
    return [ok("memlock", text)]


def numa(client: Client | None) -> list[Finding]:
    """On which NUMA nodes the GPUs and the arena are. Distances between them cost bandwidth."""
    if len(list(SYS.glob("devices/system/node/node[0-9]*"))) <= 1:
        return [ok("NUMA", "this host has one node")]
    gpus = _gpu_nodes()
    arena = set() if client is None else _arena_nodes(client)
    told = [f"GPUs on {_nodes(gpus)}" if gpus else "no NVIDIA GPU is visible"]
    told.append(f"the arena on {_nodes(arena)}" if arena else "the arena cannot be seen from here")
    if gpus and arena and not arena & gpus:
        fix = "start the server with `numactl --membind` of the GPUs' node, or --interleave over all nodes"
        return [warning("NUMA", "; ".join(told), fix)]
    return [ok("NUMA", "; ".join(told))]


def _gpu_nodes() -> set[int]:
    """The NUMA nodes of the NVIDIA GPUs of this host."""
    nodes = set()
    for device in SYS.glob("bus/pci/devices/*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            if vendor == _NVIDIA and kind.startswith(_DISPLAY):
                nodes.add(int((device / "numa_node").read_text()))
        except (OSError, ValueError):
            continue
    return {node for node in nodes if node >= 0}


def _arena_nodes(client: Client) -> set[int]:
    """Where the arena's pages lie, by a sample of them; empty if this process cannot map the arena."""
    choice = client.admin.try_transport()
    try:
        if not isinstance(choice.transport, ShmTransport):
            return set()
        arena = choice.transport.memory
        # The kernel tells the nodes of those pages alone that this process has touched.
        int(arena[:: max(mmap.PAGESIZE, arena.size // SAMPLED_PAGES)].sum())
        lines = [line for line in NUMA_MAPS.read_text().splitlines() if "kvpool-" in line]
        return {int(node) for line in lines for node in re.findall(r" N(\d+)=\d+", line)}
    finally:
        choice.transport.close()


def _nodes(nodes: set[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, sorted(nodes)))}"
