"""Authenticates callers: by the certificate of their connection, or by a token of the server's own file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import grpc

from kvpool.errors import UnauthenticatedError
from kvpool.principal import DEFAULT_DOMAIN
from kvpool.tokens import TokenRecord, digest_of
from kvpool.watched_files import WatchedFiles
from kvpool_server.access.credential import Credential, RefusedCredentialError, of_certificate
from kvpool_server.access.deny_list import DenyList

Context = grpc.aio.ServicerContext[Any, Any]

_VERSION, _PEM = "ssl_tls_version", "x509_pem_cert"
_TLS_1_3 = b"TLSv1.3"


class Who(Protocol):
    """Authenticates callers. Each method raises UnauthenticatedError."""

    def __call__(self, context: Context) -> Credential:
        """The credential of the caller of an RPC."""

    def of_request(self, certificate: bytes | None, authorization: Sequence[str]) -> Credential:
        """The credential of the client of an HTTP request over TLS.

        Args:
            certificate: the client's, verified, DER; None: it has none.
            authorization: the values of the headers of this name.
        """

    def checked(self, credential: Credential) -> Credential:
        """The credential, if it is still in force."""


class Certificates:
    """Callers that are authenticated by their connection's certificate.

    Args:
        denied: principals and credentials that are refused although they are valid; None: none.
        trust_domain: certificates of other domains are refused; an authority may sign for several.
    """

    def __init__(self, denied: DenyList | None = None, trust_domain: str = DEFAULT_DOMAIN):
        self._denied = denied
        self._trust_domain = trust_domain

    def __call__(self, context: Context) -> Credential:
        (pem,) = _tls_of(context)[_PEM]
        return self.checked(of_certificate(pem))

    def of_request(self, certificate: bytes | None, authorization: Sequence[str]) -> Credential:
        if certificate is None:
            raise UnauthenticatedError("the connection has no client certificate; give one for the role metrics")
        return self.checked(of_certificate(certificate))

    def checked(self, credential: Credential) -> Credential:
        if credential.has_ended:
            raise RefusedCredentialError(
                f"the client's certificate ended at {credential.ends_at}; renew it", credential
            )
        if credential.principal.domain != self._trust_domain:
            raise RefusedCredentialError(
                f"{credential.principal} is of trust domain {credential.principal.domain}, and this server takes "
                f"{self._trust_domain}; use a certificate of that domain, or see --trust-domain",
                credential,
            )
        return not_denied(credential, self._denied)


class Tokens:
    """Callers that are authenticated by a bearer token in the call's metadata.

    Args:
        records: by digest, in the server's file of tokens.
        denied: principals and credentials that are refused although they are valid; None: none.
    """

    def __init__(self, records: WatchedFiles[dict[str, TokenRecord]], denied: DenyList | None = None):
        self._records = records
        self._denied = denied

    def __call__(self, context: Context) -> Credential:
        return self.of_request(None, authorization_of(context))

    def of_request(self, certificate: bytes | None, authorization: Sequence[str]) -> Credential:
        digest = digest_of(bearer_token(authorization))
        record = self._records.value.get(digest)
        if record is None:
            raise _unknown_token()
        return self.checked(Credential(record.principal, digest, record.ends_at))

    def checked(self, credential: Credential) -> Credential:
        record = self._records.value.get(credential.digest)
        if record is None or record.principal != credential.principal:
            raise _unknown_token()
        if credential.has_ended:  # Told to those who have proved that they know the secret.
            raise RefusedCredentialError(
                f"the call's token ended at {credential.ends_at:%Y-%m-%d %H:%M} UTC; make another: kvpool token create",
                credential,
            )
        return not_denied(credential, self._denied)


def _tls_of(context: Context) -> Mapping[str, Sequence[bytes]]:
    """What gRPC knows of a connection. Raises UnauthenticatedError unless it is TLS 1.3: gRPC takes 1.2, too."""
    found = context.auth_context()
    version = b" ".join(found.get(_VERSION, ()))
    if version != _TLS_1_3:
        raise UnauthenticatedError(f"the connection is {version.decode() or 'not TLS'}; use TLS 1.3")
    return found


def authorization_of(context: Context) -> list[str]:
    """The Authorization headers of an RPC. Raises UnauthenticatedError without TLS 1.3."""
    _tls_of(context)
    return [str(value) for name, value in context.invocation_metadata() or () if name == "authorization"]


def bearer_token(authorization: Sequence[str]) -> str:
    """The token of a call's Authorization headers. Raises UnauthenticatedError."""
    scheme, _, token = authorization[0].partition(" ") if len(authorization) == 1 else ("", "", "")
    if scheme != "Bearer":
        raise UnauthenticatedError("the call has no bearer token; give token_file with the token that you were given")
    return token


def _unknown_token() -> UnauthenticatedError:
    return UnauthenticatedError("the call's token is unknown; make another: kvpool token create")


def not_denied(credential: Credential, denied: DenyList | None) -> Credential:
    """The credential. Raises RefusedCredentialError if it is denied."""
    if denied is not None and denied.denies(credential):
        raise RefusedCredentialError(
            f"{credential.principal}, its tenant or its credential is on the server's deny list", credential
        )
    return credential
