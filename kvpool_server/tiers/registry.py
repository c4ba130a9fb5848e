"""Tiers from what a server is told."""

from __future__ import annotations

import socket
from collections.abc import Callable

from kvpool_server.cache.eviction import Policy
from kvpool_server.tiers.file.disk import Disk
from kvpool_server.tiers.file.tier import FileTier
from kvpool_server.tiers.file.usrbio import UsrbioDisk
from kvpool_server.tiers.mooncake.tier import MooncakeTier
from kvpool_server.tiers.mooncake.worker import Order
from kvpool_server.tiers.spec import FileSpec, MooncakeSpec, Spec
from kvpool_server.tiers.tier import Tier


def make_tier(spec: Spec, listen: tuple[str, int], policy: Callable[[], Policy], handover_s: float = 0.0) -> Tier:
    """One tier, not opened yet.

    Args:
        listen: host and port of the server.
        policy: for tiers that have to make room themselves.
        handover_s: how long a server of the same name, which this one replaces, may take to stop.

    Raises:
        ConfigError: what it needs is not here.
    """
    if isinstance(spec, FileSpec):
        owner = spec.name or f"{socket.gethostname()}-{listen[1]}"
        disk = UsrbioDisk(spec.path) if spec.io == "usrbio" else Disk()
        return FileTier(
            spec.path, owner, spec.size, policy,
            threads=spec.threads, direct=spec.io == "direct", create=spec.create, handover_s=handover_s, disk=disk,
        )  # fmt: skip
    return MooncakeTier(_order(spec, listen[0]), spec.threads)


def _order(spec: MooncakeSpec, listen_host: str) -> Order:
    host = spec.host or listen_host
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return Order(spec.master, spec.metadata, host, int(spec.segment), spec.protocol, spec.device)
