"""A caller's credential: a certificate or a token, whom it names, and when it ends; and principals in settings."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from kvpool.protocol.errors import InvalidRequestError, UnauthenticatedError
from kvpool.security.certificates import uris_of
from kvpool.security.principal import Principal

MAX_PARSED = 1_024
"""Certificates whose contents are kept, because every call on a connection shows the same one."""

_PEM = b"-----BEGIN"


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
    """The credential that a verified certificate is.

    Args:
        certificate: PEM or DER.

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
    """The principal that an operator has named.

    Args:
        domain: the trust domain of all callers; None: callers may be of any.

    Raises InvalidRequestError if no caller can be that principal: the entry would have no effect.
    """
    found = Principal.parse(spiffe_id)
    if domain is not None and found.domain != domain:
        raise InvalidRequestError(
            f"{spiffe_id!r} can be no caller: this server's callers are of trust domain {domain}; give "
            f"{dataclasses.replace(found, domain=domain)}"
        )
    return found
