"""How much memory this host, or this container, can give to an arena."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pydantic import ByteSize

from kvpool.errors import ConfigError


def check_fits(memory: ByteSize) -> None:
    """Raises ConfigError if the host, or the cgroup that the server runs in, cannot hold an arena of this size."""
    bounds = {"the host's memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    if available:
        bounds["the host's free memory"] = int(available[1]) << 10
    cgroup = Path("/sys/fs/cgroup/memory.max")
    if cgroup.exists() and (text := cgroup.read_text().strip()).isdigit():
        bounds["the container's memory limit"] = int(text)
    for what, limit in bounds.items():
        if memory > limit:
            size, most = memory.human_readable(), ByteSize(limit).human_readable()
            raise ConfigError(f"memory = {size} is more than {what}, {most}; lower --memory")
