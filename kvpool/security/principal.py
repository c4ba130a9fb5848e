"""Who calls a server: a tenant and a role, named by a SPIFFE ID such as spiffe://kvpool.local/kvpool/acme/engine-write.

Source: SPIFFE-ID and X509-SVID, https://github.com/spiffe/spiffe/tree/main/standards.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from kvpool.protocol.errors import InvalidRequestError

DEFAULT_DOMAIN = "kvpool.local"
ABOUT_DOMAINS = (
    "Trust domain: name of the deployment that servers and callers belong to, the DOMAIN of their SPIFFE IDs "
    "(spiffe://DOMAIN/kvpool/TENANT/ROLE)."
)
ALL_TENANTS = "_"
"""In the place of the tenant, for roles that belong to no tenant."""
_SCHEME, _SERVICE = "spiffe://", "kvpool"
_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_DOMAIN = re.compile(r"[a-z0-9][a-z0-9._-]{0,253}")


class Role(enum.StrEnum):
    """What a principal may do; `engine-write` may all that `engine-read` may."""

    ENGINE_READ = "engine-read"
    ENGINE_WRITE = "engine-write"
    TENANT_OPERATOR = "tenant-operator"
    ROUTER = "router"
    OPERATOR = "operator"
    METRICS = "metrics"
    PEER = "peer"

    @property
    def has_tenant(self) -> bool:
        return self not in (Role.OPERATOR, Role.METRICS, Role.PEER)


TENANT_ROLES = tuple(role for role in Role if role.has_tenant)
GLOBAL_ROLES = tuple(role for role in Role if not role.has_tenant)


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller that has proved who it is. Raises InvalidRequestError for a tenant that its role cannot have.

    Args:
        tenant: letters, digits, `.`, `_` and `-`, at most 63; `ALL_TENANTS` for the roles of no tenant.
        domain: the trust domain, lower case.
    """

    tenant: str
    role: Role
    domain: str = DEFAULT_DOMAIN

    def __post_init__(self) -> None:
        if not _DOMAIN.fullmatch(self.domain):
            raise InvalidRequestError(
                f"trust domain {self.domain!r} is not a lower-case DNS name; give one such as {DEFAULT_DOMAIN}"
            )
        if not self.role.has_tenant:
            if self.tenant != ALL_TENANTS:
                raise InvalidRequestError(f"role {self.role} belongs to no tenant; give {ALL_TENANTS!r} in its place")
        elif not _SEGMENT.fullmatch(self.tenant):
            raise InvalidRequestError(
                f"tenant {self.tenant!r} cannot be in a SPIFFE ID; give at most 63 letters, digits, '.', '_' and '-', "
                "the first of them a letter or digit"
            )

    def __str__(self) -> str:
        """The SPIFFE ID."""
        return f"{_SCHEME}{self.domain}/{_SERVICE}/{self.tenant}/{self.role}"

    @classmethod
    def parse(cls, spiffe_id: str) -> Principal:
        """The principal that a SPIFFE ID names. Raises InvalidRequestError."""
        domain, *path = spiffe_id.removeprefix(_SCHEME).split("/")
        if not spiffe_id.startswith(_SCHEME) or len(path) != 3 or path[0] != _SERVICE:
            raise InvalidRequestError(f"{spiffe_id!r} is not {_SCHEME}DOMAIN/{_SERVICE}/TENANT/ROLE")
        if path[2] not in list(Role):
            raise InvalidRequestError(f"{spiffe_id!r}: no role {path[2]!r}; the roles are {', '.join(Role)}")
        return cls(path[1], Role(path[2]), domain)
