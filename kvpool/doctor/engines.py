"""Checks of the engines that report to a server."""

from __future__ import annotations

from kvpool.doctor.finding import Finding, ok, warning
from kvpool.types import PoolStats

MAX_FINDINGS = 8


def engines(stats: PoolStats) -> list[Finding]:
    """Whether the engines that report have the server's release, a fast transport and a closed breaker."""
    found = []
    server = stats.server
    for each in stats.engines:
        if each.breaker_open:
            text = f"{each.engine} does without the pool: its breaker is open"
            found.append(warning("engines", text, "its log names the error; check its endpoint"))
        if each.transport.startswith("grpc"):
            text = f"{each.engine} moves bytes through gRPC, which is slow"
            found.append(warning("engines", text, "its log says why the faster transports do not work"))
        if server is not None and each.version != server.version:
            text = f"{each.engine} has kvpool {each.version}, and the server {server.version}"
            found.append(warning("engines", text, "install the same release on both sides"))
    if found:
        return found[:MAX_FINDINGS]
    return [ok("engines", f"{len(stats.engines)} engines report, and none has a problem")] if stats.engines else []
