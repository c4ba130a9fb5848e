"""The principal behind a call: from the certificate of its connection, or from its token."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509

from kvpool.errors import InvalidRequestError, PermissionDeniedError, UnauthenticatedError
from kvpool.principal import Principal, Role
from kvpool.tokens import TokenRecord, digest_of, read_records
from kvpool.watched_files import WatchedFiles
from kvpool_server.access.permissions import CALLS, may_call

Context = grpc.aio.ServicerContext[Any, Any]

CALLER: ContextVar[Principal | None] = ContextVar("kvpool caller", default=None)
"""Whose call the running handler serves; None where callers prove nothing, and all of them may everything."""

_URIS, _VERSION, _PEM = "peer_uri", "ssl_tls_version", "x509_pem_cert"
_TLS_1_3 = b"TLSv1.3"


def principal_of(auth_context: Mapping[str, Iterable[bytes]]) -> Principal:
    """The principal that a verified client certificate names.

    Args:
        auth_context: as gRPC gives it for a connection.

    Raises UnauthenticatedError unless the connection is TLS 1.3, and the certificate has one URI, a principal's.
    """
    version = b" ".join(auth_context.get(_VERSION, ()))
    if version != _TLS_1_3:
        raise UnauthenticatedError(f"the connection is {version.decode() or 'not TLS'}; use TLS 1.3")
    uris = list(auth_context.get(_URIS, ()))
    if len(uris) != 1:
        raise UnauthenticatedError(
            f"the client's certificate names {len(uris)} URIs and has to name one, such as "
            "spiffe://kvpool.local/kvpool/TENANT/engine-write; `kvpool certs show` reads certificates"
        )
    try:
        return Principal.parse(uris[0].decode())
    except (InvalidRequestError, UnicodeDecodeError) as error:
        raise UnauthenticatedError(f"the client's certificate names no principal: {error}") from None


class Certificates:
    """Callers that prove who they are by their connection's certificate."""

    def __call__(self, context: Context) -> Principal:
        """Who calls. Raises UnauthenticatedError."""
        return principal_of(context.auth_context())

    def ends_at(self, context: Context) -> dt.datetime:
        """When a caller's certificate ends, UTC."""
        (pem,) = context.auth_context()[_PEM]
        return x509.load_pem_x509_certificate(pem).not_valid_after_utc


class Tokens:
    """Callers that prove who they are by a bearer token in the call's metadata.

    Args:
        path: the file of tokens, read again when it changes. Raises ConfigError if it cannot be used.
    """

    def __init__(self, path: str, now: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC)):
        self._records = WatchedFiles([path], lambda: read_records(Path(path)))
        self._now = now

    def __call__(self, context: Context) -> Principal:
        """Who calls. Raises UnauthenticatedError."""
        return self._record(context).principal

    def ends_at(self, context: Context) -> dt.datetime:
        """When a caller's token ends, UTC. Raises UnauthenticatedError."""
        return self._record(context).ends_at

    def _record(self, context: Context) -> TokenRecord:
        self._records.look()
        sent = [str(value) for name, value in context.invocation_metadata() or () if name == "authorization"]
        scheme, _, token = sent[0].partition(" ") if len(sent) == 1 else ("", "", "")
        if scheme != "Bearer":
            raise UnauthenticatedError(
                "the call has no bearer token; give token_file with what `kvpool token create` printed"
            )
        record = self._records.value.get(digest_of(token))
        if record is None or record.ends_at <= self._now():
            raise UnauthenticatedError("the call's token is unknown or has ended; make another: kvpool token create")
        return record


Who = Certificates | Tokens
"""How callers prove who they are."""


def check_call(principal: Principal, method: str) -> None:
    """Raises PermissionDeniedError unless the principal's role may call a method of the Pool service."""
    if not may_call(principal.role, method):
        roles = [str(role) for role, methods in CALLS.items() if method in methods]
        raise PermissionDeniedError(
            f"{principal} may not call {method}: its role is {principal.role}, and the call needs "
            f"{' or '.join(roles) or 'a role that does not exist'}"
        )


def check_tenant(tenant: str) -> None:
    """Raises PermissionDeniedError if the caller declares another tenant's namespace."""
    caller = CALLER.get()
    if caller is not None and caller.role.has_tenant and caller.tenant != tenant:
        raise PermissionDeniedError(
            f"{caller} may not open a namespace of tenant {tenant!r}; give tenant {caller.tenant!r}"
        )


def check_all_tenants(what: str) -> None:
    """Raises PermissionDeniedError if the caller belongs to a tenant."""
    caller = CALLER.get()
    if caller is not None and caller.role.has_tenant:
        raise PermissionDeniedError(f"{caller} may not ask for {what}: it is for role {Role.OPERATOR}")


def is_visible(tenant: str | None) -> bool:
    """Whether the caller may know of a tenant's namespace; None: of one that is not open."""
    caller = CALLER.get()
    return caller is None or not caller.role.has_tenant or caller.tenant == tenant


def may_see_quota(subject: str) -> bool:
    """Whether the caller may know of a quota; a tenant knows of its own."""
    caller = CALLER.get()
    return caller is None or not caller.role.has_tenant or subject == f"tenant:{caller.tenant}"


def may_create_namespaces() -> bool:
    """Whether the caller may open a namespace that is not open yet: whoever may store blocks in it."""
    caller = CALLER.get()
    return caller is None or may_call(caller.role, "PutStart")


def may_use_memory() -> bool:
    """Whether the caller may be told how bytes travel: whoever may open namespaces, which says so as well."""
    caller = CALLER.get()
    return caller is None or may_call(caller.role, "OpenNamespace")
