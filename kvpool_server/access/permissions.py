"""The table of what each role may call; what is not in it is denied to all."""

from __future__ import annotations

from kvpool.principal import Role

_READ = {
    "OpenNamespace", "Lookup", "LookupStream", "Get", "Read", "GetChunks", "Release", "Verify", "Ping",
}  # fmt: skip
_WRITE = {"PutStart", "PutEnd", "PutRevoke", "Write", "PutChunks"}
_TENANT = {"ListNamespaces", "Stats", "Remove", "Clear", "ListQuotas", "Ping"}
_POOL = {"SetQuotas"}

CALLS: dict[Role, frozenset[str]] = {
    Role.ENGINE_READ: frozenset(_READ),
    Role.ENGINE_WRITE: frozenset(_READ | _WRITE),
    Role.TENANT_OPERATOR: frozenset(_TENANT),
    Role.OPERATOR: frozenset(_READ | _WRITE | _TENANT | _POOL),
    Role.METRICS: frozenset({"Stats", "Ping"}),
}
"""By role: the methods of the Pool service."""


def may_call(role: Role, method: str) -> bool:
    """Whether a role may call a method of the Pool service."""
    return method in CALLS[role]
