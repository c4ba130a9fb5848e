"""Tiers from what a server is told."""

from __future__ import annotations

import socket
from collections.abc import Callable

from kvpool_server.storage.eviction import Policy
from kvpool_server.tiers.file.disk import Disk
from kvpool_server.tiers.file.tier import FileTier
from kvpool_server.tiers.file.usrbio import UsrbioDisk
from kvpool_server.tiers.spec import FileSpec, Spec
from kvpool_server.tiers.tier import Tier


def make_tier(spec: Spec, listen: tuple[str, int], policy: Callable[[], Policy]) -> Tier:
    """One tier, not opened yet.

    Args:
        listen: host and port of the server.
        policy: for tiers that have to make room themselves.

    Raises:
        ConfigError: what it needs is not here.
    """
    if isinstance(spec, FileSpec):
        owner = spec.name or f"{socket.gethostname()}-{listen[1]}"
        disk = UsrbioDisk(spec.path) if spec.io == "usrbio" else Disk()
        direct = spec.io == "direct"
        return FileTier(spec.path, owner, spec.size, policy, threads=spec.threads, direct=direct, disk=disk)
    raise NotImplementedError
