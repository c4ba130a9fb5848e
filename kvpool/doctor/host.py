"""Checks of this host: memory, huge pages, limits, and NUMA nodes.

Every path is an argument: tests give files of their own.
"""

from __future__ import annotations

import mmap
import re
import resource
from pathlib import Path

from kvpool.client.client import Client
from kvpool.report.finding import Finding, ok, warning
from kvpool.report.quotas import size_text
from kvpool.transport.shm import ShmTransport

LEAST_AVAILABLE_SHARE = 0.05
LEAST_FILES = 4_096
LEAST_LOCKED_BYTES = 1 << 30
SAMPLED_PAGES = 64
"""Of the arena, whose NUMA nodes are looked up."""
_NVIDIA, _DISPLAY = "0x10de", "0x03"


def memory(meminfo: Path = Path("/proc/meminfo")) -> list[Finding]:
    """Whether the host has memory left."""
    sizes = {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)}
    total, available = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    text = f"{size_text(available)} of this host's {size_text(total)} are available"
    if available < LEAST_AVAILABLE_SHARE * total:
        return [warning("memory of the host", text, "end what takes it, or lower the server's --memory")]
    return [ok("memory of the host", text)]


def huge_pages(setting: Path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")) -> list[Finding]:
    """Whether the arena gets huge pages on this host."""
    try:
        chosen = re.findall(r"\[(\w+)\]", setting.read_text())
    except OSError:
        return [ok("huge pages", "this kernel has no transparent huge pages for shared memory")]
    if chosen and chosen[0] in ("always", "advise", "within_size", "force"):
        return [ok("huge pages", f"shared memory gets them ({chosen[0]})")]
    text = f"shared memory gets none on this host ({setting} says {chosen[0] if chosen else 'nothing'})"
    return [warning("huge pages", text, f"write advise to {setting} on the server's host, and restart the server")]


def open_files(limit: int | None = None) -> list[Finding]:
    """Whether a process may open enough files; `limit` is this process' own unless it is given."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if limit == resource.RLIM_INFINITY:
        return [ok("open files", "a process started from here may open any number of files")]
    text = f"a process started from here may open {limit:,} files"
    if limit < LEAST_FILES:
        return [warning("open files", text, f"raise the limit to {LEAST_FILES:,} or more (ulimit -n)")]
    return [ok("open files", text)]


def memlock(limit: int | None = None, *, uses_rdma: bool = False) -> list[Finding]:
    """Whether a process may lock enough memory.

    Args:
        limit: bytes; this process' own unless it is given.
        uses_rdma: the server offers RDMA, which locks the memory that it moves.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if limit == resource.RLIM_INFINITY:
        return [ok("memlock", "a process started from here may lock all memory")]
    text = f"a process started from here may lock {size_text(limit)}"
    if uses_rdma and limit < LEAST_LOCKED_BYTES:
        return [warning("memlock", text, "RDMA locks the memory that it moves: set the limit to unlimited")]
    return [ok("memlock", text)]


def numa(
    client: Client | None, sys: Path = Path("/sys"), numa_maps: Path = Path("/proc/self/numa_maps")
) -> list[Finding]:
    """On which NUMA nodes the GPUs and the arena are. Distances between them cost bandwidth."""
    if len(list(sys.glob("devices/system/node/node[0-9]*"))) <= 1:
        return [ok("NUMA", "this host has one node")]
    gpus = gpu_nodes(sys)
    arena = set() if client is None else _arena_nodes(client, numa_maps)
    told = [f"GPUs on {_nodes(gpus)}" if gpus else "no NVIDIA GPU is visible"]
    told.append(f"the arena on {_nodes(arena)}" if arena else "the arena cannot be seen from here")
    if gpus and arena and not arena & gpus:
        fix = "start the server with `numactl --membind` of the GPUs' node, or --interleave over all nodes"
        return [warning("NUMA", "; ".join(told), fix)]
    return [ok("NUMA", "; ".join(told))]


def gpu_nodes(sys: Path = Path("/sys")) -> set[int]:
    """The NUMA nodes of the NVIDIA GPUs of this host."""
    nodes = set()
    for device in sys.glob("bus/pci/devices/*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            if vendor == _NVIDIA and kind.startswith(_DISPLAY):
                nodes.add(int((device / "numa_node").read_text()))
        except (OSError, ValueError):
            continue
    return {node for node in nodes if node >= 0}


def _arena_nodes(client: Client, numa_maps: Path) -> set[int]:
    """Where the arena's pages lie, by a sample of them; empty if this process cannot map the arena."""
    choice = client.admin.try_transport()
    try:
        if not isinstance(choice.transport, ShmTransport):
            return set()
        arena = choice.transport.memory
        # The kernel tells the nodes of those pages alone that this process has touched.
        int(arena[:: max(mmap.PAGESIZE, arena.size // SAMPLED_PAGES)].sum())
        return nodes_in(numa_maps.read_text())
    finally:
        choice.transport.close()


def nodes_in(numa_maps: str) -> set[int]:
    """The nodes that have pages of a pool's memory, by the text of numa_maps."""
    lines = [line for line in numa_maps.splitlines() if "kvpool-" in line]
    return {int(node) for line in lines for node in re.findall(r" N(\d+)=\d+", line)}


def _nodes(nodes: set[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, sorted(nodes)))}"
