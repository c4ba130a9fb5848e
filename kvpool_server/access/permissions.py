"""The table of what each role may call; what is not in it is denied to all."""

from __future__ import annotations

from kvpool.security.principal import Role

_READ = {
    "OpenNamespace", "Lookup", "LookupStream", "Get", "GetChunks", "Release", "Verify", "Report", "Exists",
}  # fmt: skip
_WRITE = {"PutStart", "PutEnd", "PutRevoke", "PutChunks", "Hint"}
_TENANT = {"ListNamespaces", "Remove", "Clear", "ListQuotas", "Ledger", "Explain", "Value", "Hint"}
_POOL = {"Stats", "SetQuotas", "Drain"}
_ANYBODY = {"Ping", "WhoAmI"}

CALLS: dict[Role, frozenset[str]] = {
    Role.ENGINE_READ: frozenset(_ANYBODY | _READ),
    Role.ENGINE_WRITE: frozenset(_ANYBODY | _READ | _WRITE),
    Role.TENANT_OPERATOR: frozenset(_ANYBODY | _TENANT),
    Role.OPERATOR: frozenset(_ANYBODY | _READ | _WRITE | _TENANT | _POOL),
    Role.ROUTER: frozenset(_ANYBODY | {"Exists", "ListNamespaces"}),
    Role.METRICS: frozenset(_ANYBODY | {"Stats", "Value"}),
}
"""By role: the methods of the Pool service."""

SCRAPERS = (Role.METRICS, Role.OPERATOR)
"""Roles that may read /metrics and the dashboard's numbers, which are those of all tenants."""


def may_call(role: Role, method: str) -> bool:
    """Whether a role may call a method of the Pool service."""
    return method in CALLS[role]
