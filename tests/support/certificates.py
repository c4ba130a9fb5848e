"""Certificates for tests: those that kvpool makes, and those that it never would."""

from __future__ import annotations

import datetime as dt
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvpool.security.certificates import CA_NAME, CERTIFICATE_NAME, KEY_NAME
from kvpool.security.tls import TlsFiles

DAY = dt.timedelta(days=1)
USELESS = (
    (-2 * DAY, -DAY, "tls.crt ended at"),
    (DAY, 2 * DAY, "tls.crt is not valid before"),
    (-DAY, DAY, "tls.crt is for clients only; give the server's"),
)
"""When a certificate of `forge` begins and ends, from now on, and why it is none for a server."""


def files_in(directory: Path) -> TlsFiles:
    """The files of a directory that `Authority` made."""
    return TlsFiles(*(str(directory / name) for name in (CA_NAME, CERTIFICATE_NAME, KEY_NAME)))


def server_flags(directory: Path) -> list[str]:
    """The flags of a server whose files are in a directory."""
    files = files_in(directory)
    return ["--tls-cert", files.cert, "--tls-key", files.key, "--tls-client-ca", files.ca]


def forge(
    authority: Path, directory: Path, uris: Sequence[str], *, starts_in: dt.timedelta, ends_in: dt.timedelta
) -> TlsFiles:
    """A client's certificate with any names and times, signed by the authority in a directory."""
    ca = x509.load_pem_x509_certificate((authority / "ca" / CA_NAME).read_bytes())
    ca_key = serialization.load_pem_private_key((authority / "ca" / "ca.key").read_bytes(), None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    key, now = ec.generate_private_key(ec.SECP256R1()), dt.datetime.now(dt.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "forged")]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + starts_in)
        .not_valid_after(now + ends_in)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
    )
    if uris:
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
        builder = builder.add_extension(names, critical=False)
    directory.mkdir(parents=True)
    files = files_in(directory)
    Path(files.ca).write_bytes((authority / "ca" / CA_NAME).read_bytes())
    Path(files.cert).write_bytes(builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    Path(files.key).touch(0o600)
    Path(files.key).write_bytes(pem)
    return files


def shown_names(address: str | tuple[str, int], context: ssl.SSLContext) -> list[str]:
    """The names in the certificate that a server shows at an address of TCP, or at the path of a Unix socket."""
    with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as plain:
        plain.settimeout(10)
        plain.connect(address)
        with context.wrap_socket(plain, server_hostname="localhost") as secure:
            found = secure.getpeercert() or {}
    return [str(value) for _, value in found["subjectAltName"]]
