"""The server's side of TLS: its certificate, and the authorities of its clients, read again when the files change."""

from __future__ import annotations

import datetime as dt
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import grpc
import structlog
from cryptography import x509

from kvpool.protocol.errors import ConfigError
from kvpool.security.certificates import CertificateFacts, facts_of
from kvpool.security.file_permissions import require_owner_writes
from kvpool.security.tls import TlsFiles, TlsIdentity, read_identity
from kvpool.security.watched_files import WatchedFiles

log = structlog.get_logger()

SOON = dt.timedelta(days=30)
"""How long before its end a certificate is warned of."""

_SETTINGS = TlsFiles("--tls-client-ca", "--tls-cert", "--tls-key")
"""What gives a server the paths, for errors."""


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """What a server's files held when they were read.

    Args:
        names: of the certificate.
        context: of HTTP's connections.
    """

    tls: TlsIdentity
    names: tuple[str, ...]
    context: ssl.SSLContext = field(compare=False)


class ServerCredentials(WatchedFiles[ServerIdentity]):
    """What gRPC and HTTP prove to clients, and ask of them.

    Raises ConfigError for files that cannot be used, for authorities that others can write, and for a certificate that
    no client would take: one that has ended, is not valid yet, or is for clients only. While the server runs, such
    files leave those before them in force.

    Each successful reading logs the certificate's names and end, and warns of certificates that end soon.

    Connections that exist keep what they were made with; those made after a change get the new files.

    Args:
        files: `ca` are the authorities of clients' certificates; empty: clients have tokens.
        when_read: as of `WatchedFiles`.
    """

    def __init__(self, files: TlsFiles, when_read: Callable[[ConfigError | None], None] = lambda _: None):
        self._asks_certificate = bool(files.ca)

        def tell(error: ConfigError | None) -> None:
            if error is None:
                log.info("the server's certificate", names=self.value.names, ends_at=str(self.value.tls.ends_at))
                warn_of_ends(self.value.tls, dt.datetime.now(dt.UTC))
            when_read(error)

        super().__init__(files.paths, lambda: _read_server(files), when_read=tell)

    def for_grpc(self) -> grpc.ServerCredentials:
        """Credentials that require a client's certificate where the files name authorities of clients.

        For one port: gRPC asks for new files once for each port, and a second port with the same credentials gets none.
        """
        served = self.version

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Called by gRPC's threads at each handshake: new files, or None."""
            nonlocal served
            version = self.look()
            if version == served:
                return None
            served = version
            return _configuration(self.value.tls)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(self.value.tls),
            changed,  # type: ignore[arg-type]  # May return None: nothing has changed.
            require_client_authentication=self._asks_certificate,
        )

    def for_http(self) -> ssl.SSLContext:
        """The context of new connections. A client's certificate is verified if there is one."""
        self.look()
        return self.value.context


def ends_of(identity: TlsIdentity) -> Mapping[str, dt.datetime]:
    """When a server's certificates end: its own (`server`), and its clients' first authority (`client_ca`)."""
    ends = {"server": identity.ends_at, "client_ca": identity.ca_ends_at}
    return {name: ends_at for name, ends_at in ends.items() if ends_at is not None}


def warn_of_ends(identity: TlsIdentity, now: dt.datetime) -> None:
    """Logs a warning for each certificate that ends within `SOON`."""
    for name, ends_at in ends_of(identity).items():
        if ends_at - now <= SOON:
            log.warning(
                "a certificate ends soon: replace its file, which needs no restart",
                certificate=name,
                ends_at=ends_at.isoformat(),
                days_left=max(0, (ends_at - now).days),
            )


def _read_server(files: TlsFiles) -> ServerIdentity:
    if files.ca:
        require_owner_writes(files.ca, "add an authority that signs callers' certificates", _SETTINGS.ca)
    tls = read_identity(files, _SETTINGS)
    assert tls.cert is not None, "`exposure.tls_files` has asked for a certificate"
    facts = _check_certificate(files.cert, x509.load_pem_x509_certificates(tls.cert)[0])
    return ServerIdentity(tls, facts.names, _context(files, tls.ca))


def _check_certificate(path: str, certificate: x509.Certificate) -> CertificateFacts:
    """What a server's certificate says. Raises ConfigError if clients would refuse it."""
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


def _configuration(tls: TlsIdentity) -> grpc.ServerCertificateConfiguration:
    assert tls.cert is not None and tls.key is not None
    return grpc.ssl_server_certificate_configuration([(tls.key, tls.cert)], tls.ca)


def _context(files: TlsFiles, authorities: bytes | None) -> ssl.SSLContext:
    """Raises ConfigError for a pair that is none, because it is being replaced."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # A resumed session would show a certificate that was verified long ago.
    try:
        context.load_cert_chain(files.cert, files.key)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{files.cert} and {files.key} cannot be used: {error}") from None
    if authorities is not None:
        context.load_verify_locations(cadata=authorities.decode("ascii", "replace"))
        context.verify_mode = ssl.CERT_OPTIONAL
    return context
