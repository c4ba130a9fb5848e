"""Authenticates callers: by the certificate of their connection, or by a token of the server's own file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import grpc

from kvpool.protocol.errors import UnauthenticatedError
from kvpool.security.principal import DEFAULT_DOMAIN
from kvpool.security.tokens import TokenRecord, digest_of
from kvpool.security.watched_files import WatchedFiles
from kvpool_server.access.credential import Credential, RefusedCredentialError, of_certificate
from kvpool_server.access.deny_list import DenyList

Context = grpc.aio.ServicerContext[Any, Any]

_VERSION, _PEM = "ssl_tls_version", "x509_pem_cert"
_TLS_1_3 = b"TLSv1.3"


class Who(ABC):
    """Authenticates callers. Each method raises UnauthenticatedError.

    Args:
        denied: principals and credentials that are refused although they are valid; None: none.
    """

    def __init__(self, denied: DenyList | None):
        self._denied = denied

    def __call__(self, context: Context) -> Credential:
        """The credential of the caller of an RPC. The connection has to be TLS 1.3: gRPC itself takes 1.2, too."""
        found = context.auth_context()
        version = b" ".join(found.get(_VERSION, ()))
        if version != _TLS_1_3:
            raise UnauthenticatedError(f"the connection is {version.decode() or 'not TLS'}; use TLS 1.3")
        metadata = context.invocation_metadata() or ()
        authorization = [str(value) for name, value in metadata if name == "authorization"]
        return self.of_request(next(iter(found.get(_PEM, ())), None), authorization)

    @abstractmethod
    def of_request(self, certificate: bytes | None, authorization: Sequence[str]) -> Credential:
        """The credential of the client of a request over TLS.

        Args:
            certificate: the client's, verified, PEM or DER; None: it has none.
            authorization: the values of the headers of this name.
        """

    def checked(self, credential: Credential) -> Credential:
        """The credential, if it is still in force."""
        self._check(credential)
        if self._denied is not None and self._denied.denies(credential):
            raise RefusedCredentialError(
                f"{credential.principal}, its tenant or its credential is on the server's deny list", credential
            )
        return credential

    @abstractmethod
    def _check(self, credential: Credential) -> None:
        """Raises for a credential that has ended, or that the server does not take any more."""


class Certificates(Who):
    """Callers that are authenticated by their connection's certificate.

    Args:
        trust_domain: certificates of other domains are refused; an authority may sign for several.
    """

    def __init__(self, denied: DenyList | None = None, trust_domain: str = DEFAULT_DOMAIN):
        super().__init__(denied)
        self._trust_domain = trust_domain

    def of_request(self, certificate: bytes | None, authorization: Sequence[str]) -> Credential:
        if certificate is None:
            raise UnauthenticatedError("the connection has no client certificate; give one for the role metrics")
        return self.checked(of_certificate(certificate))

    def _check(self, credential: Credential) -> None:
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


class Tokens(Who):
    """Callers that are authenticated by a bearer token in the call's metadata.

    Args:
        records: by digest, in the server's file of tokens.
    """

    def __init__(self, records: WatchedFiles[dict[str, TokenRecord]], denied: DenyList | None = None):
        super().__init__(denied)
        self._records = records

    def of_request(self, certificate: bytes | None, authorization: Sequence[str]) -> Credential:
        digest = digest_of(bearer_token(authorization))
        record = self._records.value.get(digest)
        if record is None:
            raise _unknown_token()
        return self.checked(Credential(record.principal, digest, record.ends_at))

    def _check(self, credential: Credential) -> None:
        record = self._records.value.get(credential.digest)
        if record is None or record.principal != credential.principal:
            raise _unknown_token()
        if credential.has_ended:  # Told to those who have proved that they know the secret.
            raise RefusedCredentialError(
                f"the call's token ended at {credential.ends_at:%Y-%m-%d %H:%M} UTC; make another: kvpool token create",
                credential,
            )


def bearer_token(authorization: Sequence[str]) -> str:
    """The token of a call's Authorization headers. Raises UnauthenticatedError."""
    scheme, _, token = authorization[0].partition(" ") if len(authorization) == 1 else ("", "", "")
    if scheme != "Bearer":
        raise UnauthenticatedError(
            "the call has no bearer token; give token_file (--token-file), a file with the token that you were given"
        )
    return token


def _unknown_token() -> UnauthenticatedError:
    return UnauthenticatedError("the call's token is unknown; make another: kvpool token create")
