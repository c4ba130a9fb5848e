"""The server's side of TLS: its certificate, and the authorities of its clients, read again when the files change."""

from __future__ import annotations

import datetime as dt
import ssl
from collections.abc import Callable
from pathlib import Path

import grpc
from cryptography import x509

from kvpool.certificates import CertificateFacts, facts_of, read_pem
from kvpool.errors import ConfigError
from kvpool.tls import TlsFiles, TlsIdentity, WatchedIdentity


class ServerCredentials:
    """What gRPC proves to clients, and asks of them.

    Raises ConfigError for files that cannot be used, and for a certificate that no client would take: one that has
    ended, is not valid yet, or is for clients only.

    Connections that exist keep what they were made with; those made after a change get the new files.

    Args:
        files: `ca` are the authorities of clients' certificates; empty: clients have tokens.
        when_read: as of `WatchedFiles`.

    Attributes:
        names: of the certificate that is used first.
    """

    def __init__(self, files: TlsFiles, when_read: Callable[[ConfigError | None], None] = lambda _: None):
        facts = _check_certificate(files.cert)
        self.names = facts.names
        self.identity = WatchedIdentity(files, when_read=when_read)
        self._context, self._context_version = _context(self.identity), self.identity.version

    def for_grpc(self) -> grpc.ServerCredentials:
        """Credentials that require a client's certificate where the files name authorities of clients.

        For one port: gRPC asks for new files once for each port, and a second port with the same credentials gets none.
        """
        served = self.identity.version

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Called by gRPC's threads at each handshake: new files, or None."""
            nonlocal served
            version = self.identity.look()
            if version == served:
                return None
            served = version
            return _configuration(self.identity.value)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(self.identity.value),
            changed,  # type: ignore[arg-type]  # May return None: nothing has changed.
            require_client_authentication=bool(self.identity.files.ca),
        )

    def for_http(self) -> ssl.SSLContext:
        """The context of new connections. A client's certificate is verified if there is one. One thread."""
        version = self.identity.look()
        if version != self._context_version:
            try:
                self._context = _context(self.identity)
            except ConfigError:
                return self._context  # The files have just changed again; the next look finds them.
            self._context_version = version
        return self._context


def _check_certificate(path: str) -> CertificateFacts:
    """What a server's certificate says. Raises ConfigError if clients would refuse it."""
    try:
        certificate = x509.load_pem_x509_certificates(read_pem(Path(path)))[0]
    except ValueError as error:
        raise ConfigError(f"{path} holds no certificate that can be read: {error}; give a PEM file") from None
    now = dt.datetime.now(dt.UTC)
    if (ended := certificate.not_valid_after_utc) <= now:
        raise ConfigError(f"the server's certificate {path} ended at {ended:%Y-%m-%d %H:%M} UTC; give a new one")
    if (begins := certificate.not_valid_before_utc) > now:
        raise ConfigError(
            f"the server's certificate {path} is not valid before {begins:%Y-%m-%d %H:%M} UTC; set this host's clock, "
            "or give another certificate"
        )
    facts = facts_of((path,), certificate)
    if facts.use == "client":
        raise ConfigError(
            f"the certificate {path} is for clients only; give the server's, such as that of `kvpool certs init --host`"
        )
    return facts


def _configuration(identity: TlsIdentity) -> grpc.ServerCertificateConfiguration:
    assert identity.cert is not None and identity.key is not None
    return grpc.ssl_server_certificate_configuration([(identity.key, identity.cert)], identity.ca)


def _context(identity: WatchedIdentity) -> ssl.SSLContext:
    """Raises ConfigError for a pair that is none, because it is being replaced."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # A resumed session would show a certificate that was verified long ago.
    files = identity.files
    try:
        context.load_cert_chain(files.cert, files.key)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{files.cert} and {files.key} cannot be used: {error}") from None
    if (authorities := identity.value.ca) is not None:
        context.load_verify_locations(cadata=authorities.decode("ascii", "replace"))
        context.verify_mode = ssl.CERT_OPTIONAL
    return context
