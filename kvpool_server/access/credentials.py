"""The server's side of TLS: its certificate, and the authorities of its clients, read again when the files change."""

from __future__ import annotations

import grpc

from kvpool.tls import TlsFiles, TlsIdentity, WatchedIdentity


class ServerCredentials:
    """What gRPC proves to clients, and asks of them. Raises ConfigError for files that cannot be used.

    Connections that exist keep what they were made with; those made after a change get the new files.

    Args:
        files: `ca` are the authorities of clients' certificates; empty: clients have tokens.
    """

    def __init__(self, files: TlsFiles):
        self.identity = WatchedIdentity(files)
        self._served = self.identity.version

    def for_grpc(self) -> grpc.ServerCredentials:
        """Credentials that require a client's certificate where the files name authorities of clients."""
        initial = _configuration(self.identity.value)
        return grpc.dynamic_ssl_server_credentials(
            initial,
            self._changed,  # type: ignore[arg-type]  # May return None: nothing has changed.
            require_client_authentication=bool(self.identity.files.ca),
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC's threads at each handshake: new files, or None."""
        version = self.identity.look()
        if version == self._served:
            return None
        self._served = version
        return _configuration(self.identity.value)


def _configuration(identity: TlsIdentity) -> grpc.ServerCertificateConfiguration:
    assert identity.cert is not None and identity.key is not None
    return grpc.ssl_server_certificate_configuration([(identity.key, identity.cert)], identity.ca)
