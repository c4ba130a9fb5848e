"""The server's side of TLS: its certificate, and the authorities of its clients, read again when the files change."""

from __future__ import annotations

import ssl

import grpc

from kvpool.tls import TlsFiles, TlsIdentity, WatchedIdentity


class ServerCredentials:
    """What gRPC and HTTP prove to clients, and ask of them. Raises ConfigError for files that cannot be used.

    Connections that exist keep what they were made with; those made after a change get the new files.

    Args:
        files: `ca` are the authorities of clients' certificates.
    """

    def __init__(self, files: TlsFiles):
        self.identity = WatchedIdentity(files)
        self._served = self.identity.version

    def for_grpc(self) -> grpc.ServerCredentials:
        """Credentials that require a client's certificate."""
        initial = _configuration(self.identity.value)
        return grpc.dynamic_ssl_server_credentials(
            initial,
            self._changed,  # type: ignore[arg-type]  # May return None: nothing has changed.
            require_client_authentication=True,
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC's threads at each handshake: new files, or None."""
        version = self.identity.look()
        if version == self._served:
            return None
        self._served = version
        return _configuration(self.identity.value)

    def for_http(self) -> ssl.SSLContext:
        """A context of the files in force; a client may come without a certificate, for a probe has none."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_OPTIONAL
        files = self.identity.files
        context.load_cert_chain(files.cert, files.key)
        context.load_verify_locations(files.ca)
        return context


def _configuration(identity: TlsIdentity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(identity.key, identity.cert)], identity.ca)
