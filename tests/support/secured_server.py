"""A server with TLS, and the certificates and tokens of those who call it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.security.certificates import Authority
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool.security.tls import TlsFiles
from kvpool.security.tokens import TokenRecord, append_record, create_token
from tests.support.certificates import DAY, files_in, server_flags
from tests.support.processes import ServerProcess


def principal_of(role: Role, tenant: str = "acme") -> Principal:
    """A principal of a role: of the tenant, or of all where the role belongs to none."""
    return Principal(tenant if role.has_tenant else ALL_TENANTS, role)


class SecuredServer:
    """A server whose callers prove who they are. It has a deny list and an audit log.

    Args:
        start: makes a `ServerProcess` of flags, and of the `tls` and `token_file` of its first client.
        proof: what callers show: "certificates" or "tokens".
        days: until the end of the server's certificate.

    Attributes:
        token_list: the server's list of tokens.
        tokens: of each role; of tenant acme where the role has a tenant.
    """

    def __init__(
        self,
        directory: Path,
        start: Callable[..., ServerProcess],
        *flags: str,
        proof: str = "certificates",
        days: int = 365,
    ):
        self.directory, self._proof = directory, proof
        self.authority = Authority.create(directory / "pki")
        self.token_list, self.denied, self.audit = (directory / name for name in ("tokens", "denied", "audit.json"))
        self.denied.touch(0o600)
        own = server_flags(self.authority.issue_server([], days=days))
        self.ca = own[-1]
        if proof == "tokens":
            own = [*own[:4], "--tokens", str(self.token_list)]
            self.tokens = {role: self.token(principal_of(role))[0] for role in Role}
            for role in filter(lambda role: role.has_tenant, Role):
                self.token(principal_of(role, "umbra"))
        files = ("--deny", str(self.denied), "--audit-log", str(self.audit))
        self.server: ServerProcess = start(*own, *files, *flags, **self.identity(Role.OPERATOR))

    def files(self, role: Role, tenant: str = "acme") -> TlsFiles:
        """A new certificate, at the place of the one before."""
        return files_in(self.authority.issue_principal(principal_of(role, tenant)))

    def token(self, principal: Principal, lasts: dt.timedelta = DAY) -> tuple[str, TokenRecord]:
        """A new token, which the server knows. It is written to the principal's file."""
        token, record = create_token(principal, lasts)
        append_record(self.token_list, record)
        self.token_file(principal).touch(0o600)
        self.token_file(principal).write_text(token)
        return token, record

    def token_file(self, principal: Principal) -> Path:
        return self.directory / f"{principal.tenant}-{principal.role}"

    def identity(self, role: Role, tenant: str = "acme") -> dict[str, Any]:
        """What a `ClientConfig` has of a caller."""
        if self._proof == "certificates":
            return {"tls": self.files(role, tenant)}
        return {"tls": TlsFiles(self.ca), "token_file": str(self.token_file(principal_of(role, tenant)))}

    def config(self, endpoint: str = "", **fields: Any) -> ClientConfig:
        defaults = {"timeout_ms": 10_000, "stall_timeout_ms": 5_000}
        return ClientConfig(endpoint or self.server.endpoint, **{**defaults, **fields})

    def client(self, role: Role, tenant: str = "acme", **fields: Any) -> Client:
        return Client(self.config(**self.identity(role, tenant), **fields))
