"""Checks of the engines that report to a server."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.protocol.text import escaped
from kvpool.report.finding import Finding, ok, warning
from kvpool.v1 import pool_pb2 as pb

MAX_NAME_CHARS = 60


def engines(stats: pb.StatsResponse) -> list[Finding]:
    """Whether the engines that report have the server's release, a fast transport and a closed breaker."""
    found = []
    if away := [each for each in stats.engines if each.breaker_open]:
        text = f"circuit breakers are open, and engines do without the pool because their calls failed: {_names(away)}"
        fix = "engines come back by themselves; if not, look at their logs, their endpoint and the network between"
        found.append(warning("engines", text, fix))
    if slow := [each for each in stats.engines if each.transport.startswith("grpc")]:
        text = f"engines move bytes through gRPC, which is slow: {_names(slow)}"
        found.append(warning("engines", text, "their logs say why the faster transports do not work"))
    if stats.HasField("server"):
        version = stats.server.version
        if others := [each for each in stats.engines if each.version != version]:
            theirs = escaped(others[0].version, MAX_NAME_CHARS)
            text = f"engines have kvpool {theirs}, and the server {escaped(version, MAX_NAME_CHARS)}: {_names(others)}"
            found.append(warning("engines", text, "install the same release on both sides"))
    if found or not stats.engines:
        return found
    return [ok("engines", f"{len(stats.engines)} engines report, and none has a problem")]


def _names(found: Sequence[pb.EngineState]) -> str:
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return escaped(found[0].engine, MAX_NAME_CHARS) + more
