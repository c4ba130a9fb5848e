"""The caller of the running handler, and the table of what each role may call; all else is denied to all."""

from __future__ import annotations

from contextvars import ContextVar

from kvpool.protocol.errors import PermissionDeniedError
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.security.principal import Principal, Role

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
    Role.PEER: frozenset(_ANYBODY | {"Lookup", "LookupStream", "Get", "GetChunks", "Release", "Verify"}),
}
"""By role: the methods of the Pool service."""

SCRAPERS = (Role.METRICS, Role.OPERATOR)
"""Roles that may read /metrics and the dashboard's numbers, which are those of all tenants."""

CALLER: ContextVar[Principal | None] = ContextVar("kvpool caller", default=None)
"""Whose call the running handler serves; None where callers are not authenticated, and may do everything."""

_INSTEAD = {"Stats": "; a tenant-operator sees the numbers of its tenant with `kvpool namespaces`"}
"""What a caller may call in place of a method."""


def check_call(principal: Principal, method: str) -> None:
    """Raises PermissionDeniedError unless the principal's role may call a method of the Pool service."""
    if method not in CALLS[principal.role]:
        roles = [str(role) for role, methods in CALLS.items() if method in methods]
        raise PermissionDeniedError(
            f"{principal} may not call {method}: its role is {principal.role}, and the call needs "
            f"{' or '.join(roles) or 'a role that does not exist'}{_INSTEAD.get(method, '')}"
        )


def check_scrape(principal: Principal, path: str) -> None:
    """Raises PermissionDeniedError unless the principal may read a path of numbers, which are those of all tenants."""
    if principal.role not in SCRAPERS:
        raise PermissionDeniedError(f"{principal} may not read {path}; it needs role {' or '.join(SCRAPERS)}")


def own_tenant() -> str | None:
    """The caller's tenant; None for a caller that may know of all tenants."""
    caller = CALLER.get()
    return caller.tenant if caller is not None and caller.role.has_tenant else None


def check_tenant(tenant: str) -> None:
    """Raises PermissionDeniedError if the caller declares another tenant's namespace."""
    own = own_tenant()
    if own is not None and own != tenant:
        raise PermissionDeniedError(
            f"{CALLER.get()} may not open a namespace of tenant {tenant!r}; give tenant {own!r}"
        )


def check_measurement(spec: NamespaceSpec) -> None:
    """Raises PermissionDeniedError if a caller who cannot measure opens a measurement's namespace.

    The use of these namespaces is not accounted for, so engines must not have them.
    """
    if spec.is_measurement and not caller_may("Stats"):
        raise PermissionDeniedError(
            f"{CALLER.get()} may not open a namespace of model {spec.model!r}, which is for measurements of role "
            f"{Role.OPERATOR}; give the model another name"
        )


def check_all_tenants(what: str) -> None:
    """Raises PermissionDeniedError if the caller belongs to a tenant."""
    if own_tenant() is not None:
        raise PermissionDeniedError(f"{CALLER.get()} may not ask for {what}: it is for role {Role.OPERATOR}")


def is_visible(tenant: str | None) -> bool:
    """Whether the caller may know of a tenant's namespace; None: of one that is not open."""
    own = own_tenant()
    return own is None or own == tenant


def may_see_quota(subject: str) -> bool:
    """Whether the caller may know of a quota; a tenant knows of its own."""
    own = own_tenant()
    return own is None or subject == f"tenant:{own}"


def caller_may(method: str) -> bool:
    """Whether the caller's role may call a method, by which other things that a role may do are decided, too."""
    caller = CALLER.get()
    return caller is None or method in CALLS[caller.role]
