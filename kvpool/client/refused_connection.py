"""Why a connection was refused although something listens: what client and server tell of a TLS handshake that failed.

A server that refuses a client's certificate says nothing, so the client looks for faults in the certificate itself.
"""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import ConfigError
from kvpool.security.certificates import extension_of, read_pem
from kvpool.security.tls import TlsFiles
from kvpool.transport.unix_socket import socket_path

_VERIFY_FAILED = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([a-zA-Z -]+)")
_NEW_ONE = "make a new one with `kvpool certs issue`"


def explain(details: str, config: ClientConfig) -> str:
    """A sentence with the fault and the fix; empty if `details` of an UNAVAILABLE call tell of no such refusal."""
    where, tls = f"kvpool-server at {config.endpoint}", config.tls
    if "WRONG_VERSION_NUMBER" in details:
        return (
            f"what listens at {config.endpoint} does not speak TLS; give the port of --listen, start kvpool-server "
            "with --tls-cert, or leave out tls (--tls)"
        )
    if "missing selected ALPN property" in details:
        return f"what listens at {config.endpoint} speaks TLS, but not gRPC; give the port of --listen"
    if "Hostname Verification Check failed" in details:
        if socket_path(config.endpoint):
            return (
                f"the certificate of {where} does not name 'localhost', which it needs on a Unix socket; make one with "
                "`kvpool certs issue DIR --host localhost`"
            )
        host = config.endpoint.rpartition(":")[0].strip("[]")
        return (
            f"the certificate of {where} does not name {host!r}; give a name that it has as endpoint, or make one with "
            f"`kvpool certs issue DIR --host {host}`"
        )
    if tls is not None and (failed := _VERIFY_FAILED.search(details)) is not None:
        if "expired" in failed[1] or "not yet valid" in failed[1]:
            return f"the certificate of {where} is not valid now ({failed[1]}); {_NEW_ONE}, and check the clocks"
        return (
            f"the certificate of {where} is not signed by an authority in {tls.ca} ({failed[1]}); give the ca.crt of "
            "the server's authority"
        )
    if "failed to connect" not in details or "Socket closed" not in details:
        return ""
    if tls is None:
        return (
            f"{where} closed the connection at once; it may speak TLS: give tls (--tls DIR), or check that the port is "
            "that of --listen"
        )
    if not tls.cert:
        return (
            f"{where} closed the connection at once; it may ask for a certificate: give one (cert and key in tls, or a "
            "--tls DIR that has tls.crt and tls.key)"
        )
    return f"{where} refused the connection: {_fault(tls)}"


def _fault(tls: TlsFiles) -> str:
    """What a server may have against the client's certificate."""
    unknown = (
        f"it may not accept the authority that signed {tls.cert}; give a certificate of an authority in the server's "
        "--tls-client-ca"
    )
    try:
        certificate = x509.load_pem_x509_certificates(read_pem(Path(tls.cert)))[0]
    except (ConfigError, ValueError):  # It is being replaced.
        return unknown
    now = dt.datetime.now(dt.UTC)
    if (ended := certificate.not_valid_after_utc) < now:
        return f"{tls.cert} ended on {ended:%Y-%m-%d %H:%M} UTC; {_NEW_ONE}"
    if (begins := certificate.not_valid_before_utc) > now:
        return f"{tls.cert} is not valid before {begins:%Y-%m-%d %H:%M} UTC; check the clock of this host"
    uses = extension_of(certificate, x509.ExtendedKeyUsage)
    if uses is not None and ExtendedKeyUsageOID.CLIENT_AUTH not in uses:
        return f"{tls.cert} is a server's certificate; give a client's, such as that of `kvpool certs` in operator"
    return unknown
