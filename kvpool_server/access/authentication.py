"""Authenticates callers: by the certificate of their connection, or by a token of the server's own file.

The deny list names tenants, principals and credentials that are refused although they are valid: a file with an entry a
line, `tenant:NAME`, a SPIFFE ID, or the SHA-256 of a certificate (as `openssl x509 -fingerprint -sha256` prints it) or
of a token (as the file of tokens has it; of an issuer's token, of all before its last dot). `#` begins a comment. A
line that can deny nobody is an error: an operator who has misspelt it must not believe that access was taken away.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from kvpool.protocol.errors import ConfigError, InvalidRequestError, UnauthenticatedError
from kvpool.security.certificates import uris_of
from kvpool.security.files import WatchedFiles, read_lines
from kvpool.security.principal import DEFAULT_DOMAIN, Principal, Role
from kvpool.security.tokens import TokenRecord, digest_of

Context = grpc.aio.ServicerContext[Any, Any]

MAX_PARSED = 1_024
"""Certificates whose contents are kept, because every call on a connection shows the same one."""
_PEM = b"-----BEGIN"
_TENANT, _SPIFFE = "tenant:", "spiffe://"
_DIGEST = re.compile("[0-9a-f]{64}")
_LIKE_A_SECRET = re.compile("[A-Za-z0-9_-]{20}")
"""What an entry contains that may be a token, or a part of one: an error does not show it."""


@dataclass(frozen=True, slots=True)
class Credential:
    """A certificate or token that a caller has shown.

    Args:
        digest: SHA-256, hexadecimal, of the certificate's DER form or of the token.
        ends_at: UTC.
    """

    principal: Principal
    digest: str
    ends_at: dt.datetime

    @property
    def has_ended(self) -> bool:
        return self.ends_at <= dt.datetime.now(dt.UTC)


class RefusedCredentialError(UnauthenticatedError):
    """A credential proves whose it is, and is not in force: denied, ended, or of another trust domain.

    Attributes:
        principal: whose it is, for the audit log.
    """

    def __init__(self, message: str, credential: Credential):
        super().__init__(message)
        self.principal = credential.principal


@functools.lru_cache(MAX_PARSED)
def of_certificate(certificate: bytes) -> Credential:
    """The credential that a verified certificate, PEM or DER, is.

    Raises UnauthenticatedError unless the certificate has one URI, a principal's.
    """
    try:
        load = x509.load_pem_x509_certificate if certificate.startswith(_PEM) else x509.load_der_x509_certificate
        parsed = load(certificate)
        uris = uris_of(parsed)
        if len(uris) == 1:
            digest = parsed.fingerprint(hashes.SHA256()).hex()
            return Credential(Principal.parse(uris[0]), digest, parsed.not_valid_after_utc)
    except (InvalidRequestError, ValueError) as error:
        raise UnauthenticatedError(f"the client's certificate names no principal: {error}") from None
    raise UnauthenticatedError(
        f"the client's certificate names {len(uris)} URIs and has to name one, such as "
        "spiffe://kvpool.local/kvpool/TENANT/engine-write; `kvpool certs show` reads certificates"
    )


def listed_principal(spiffe_id: str, domain: str | None) -> Principal:
    """The principal that an operator has named, for callers of a trust domain; None: of any.

    Raises InvalidRequestError if no caller can be that principal: the entry would have no effect.
    """
    found = Principal.parse(spiffe_id)
    if domain is not None and found.domain != domain:
        raise InvalidRequestError(
            f"{spiffe_id!r} can be no caller: this server's callers are of trust domain {domain}; give "
            f"{dataclasses.replace(found, domain=domain)}"
        )
    return found


class DenyList(WatchedFiles[frozenset[str]]):
    """The entries of a file, read again when it changes. Raises ConfigError for a file that cannot be used.

    Args:
        domain: the trust domain of all callers; None: callers may be of any.
    """

    def __init__(
        self, path: str, when_read: Callable[[ConfigError | None], None] = lambda _: None, domain: str | None = None
    ):
        def read() -> frozenset[str]:
            lines = read_lines(Path(path), lambda line: _parse(line, domain), "let denied callers in again", "--deny")
            return frozenset(entry for _, entry in lines if entry is not None)

        super().__init__([path], read, when_read=when_read)

    def denies(self, credential: Credential) -> bool:
        """Whether the list has a credential, its principal, or the principal's tenant."""
        denied, principal = self.value, credential.principal
        return bool(denied) and (
            credential.digest in denied or str(principal) in denied or _TENANT + principal.tenant in denied
        )


def _parse(line: str, domain: str | None) -> str:
    """`tenant:NAME`, a SPIFFE ID, or a digest of 64 lower-case digits. Raises InvalidRequestError for anything else."""
    entry = line.partition("#")[0].strip()
    if entry.startswith(_SPIFFE):
        return str(listed_principal(entry, domain))
    if entry.startswith(_TENANT):
        return _TENANT + Principal(entry.removeprefix(_TENANT), Role.ENGINE_READ).tenant
    digest = entry.rpartition("=")[2].replace(":", "").lower()
    if not _DIGEST.fullmatch(digest):
        shown = f"an entry of {len(entry)} characters" if _LIKE_A_SECRET.search(entry) else repr(entry)
        raise InvalidRequestError(
            f"{shown} is neither a tenant nor a SPIFFE ID nor the SHA-256 of a certificate or token; give tenant:NAME, "
            "spiffe://DOMAIN/kvpool/TENANT/ROLE, or 64 hexadecimal digits"
        )
    return digest


class Who(ABC):
    """Authenticates callers. Each method raises UnauthenticatedError."""

    def __init__(self, denied: DenyList | None):
        self._denied = denied

    def __call__(self, context: Context) -> Credential:
        """The credential of the caller of an RPC. The connection has to be TLS 1.3: gRPC itself takes 1.2, too."""
        found = context.auth_context()
        version = b" ".join(found.get("ssl_tls_version", ()))
        if version != b"TLSv1.3":
            raise UnauthenticatedError(f"the connection is {version.decode() or 'not TLS'}; use TLS 1.3")
        metadata = context.invocation_metadata() or ()
        authorization = [str(value) for name, value in metadata if name == "authorization"]
        return self.of_request(next(iter(found.get("x509_pem_cert", ())), None), authorization)

    @abstractmethod
    def of_request(self, certificate: bytes | None, authorization: Sequence[str]) -> Credential:
        """The credential of the client of a request over TLS.

        Args:
            certificate: the client's, verified, PEM or DER.
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
