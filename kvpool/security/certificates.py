"""A certificate authority in a directory, for those who have none: it makes the certificates of servers and principals.

Files have the names of a Kubernetes Secret of type kubernetes.io/tls, so that each directory can be mounted as it is:

    ca/ca.crt, ca/ca.key                     the authority; its key signs every other certificate
    server/{ca.crt,tls.crt,tls.key}          the first server's
    servers/HOST                             another server's, likewise
    operator, metrics, tenants/TENANT/ROLE   a principal's, likewise

A server's certificate is good for servers only and a principal's for clients only: neither can pass as the other.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvpool.protocol.errors import ConfigError, InvalidRequestError
from kvpool.security.files import as_setting, read_pem, write_whole
from kvpool.security.principal import Principal

CA_DAYS = 3_650
LEAF_DAYS = 365
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
CA_NAME, CERTIFICATE_NAME, KEY_NAME = "ca.crt", "tls.crt", "tls.key"
_CERTIFICATE_MARK, _KEY_MARK = b"-----BEGIN CERTIFICATE-----", b"PRIVATE KEY-----"
_CLOCK_SKEW = dt.timedelta(minutes=5)

_PrivateKey = ec.EllipticCurvePrivateKey
_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """What a certificate in the files `paths` says.

    Args:
        use: "authority", "server", "client", or "server and client".
        names: DNS names, addresses and URIs, or the subject of a certificate without any.
        ends_at: the last second in which the certificate is valid, UTC.
    """

    paths: tuple[str, ...]
    use: str
    names: tuple[str, ...]
    ends_at: dt.datetime


@dataclass(frozen=True, eq=False)
class Authority:
    """A certificate authority whose files are in `directory`. Raises ConfigError for files that cannot be used."""

    directory: Path
    _certificate: x509.Certificate
    _key: _PrivateKey = field(repr=False)

    @classmethod
    def create(cls, directory: Path) -> Authority:
        """Makes an authority that is valid for `CA_DAYS`. Raises ConfigError if the directory has one."""
        ca = directory / "ca"
        if (ca / "ca.key").exists():
            raise ConfigError(f"{ca} has an authority; make further certificates with it: kvpool certs issue")
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"kvpool authority {secrets.token_hex(4)}")
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        certificate = (
            _builder(name, name, key, CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256())
        )
        write_whole(ca / CA_NAME, _pem(certificate))
        write_whole(ca / "ca.key", _key_pem(key), secret=True)
        return cls(directory, certificate, key)

    @classmethod
    def load(cls, directory: Path) -> Authority:
        ca = directory / "ca"
        certificate = load_certificates(read_pem(ca / CA_NAME), ca / CA_NAME)[0]
        key = load_key(read_pem(ca / "ca.key"), ca / "ca.key")
        if not isinstance(key, _PrivateKey) or key.public_key() != certificate.public_key():
            raise ConfigError(f"{ca}/ca.key is not the key of {ca / CA_NAME}; restore the pair from a backup")
        return cls(directory, certificate, key)

    def issue_server(self, hosts: Sequence[str], days: int = LEAF_DAYS, directory: Path = Path("server")) -> Path:
        """A certificate of a server, which clients reach by `hosts` (DNS names or addresses); returns its directory."""
        return self._issue(directory, "kvpool-server", host_names((*hosts, *LOCAL_HOSTS)), _SERVER, days)

    def issue_server_of(self, hosts: Sequence[str], days: int = LEAF_DAYS) -> Path:
        """A certificate of the server that the first host names; it keeps the names of the one that it replaces.

        The first server's is in `server`, another one's in `servers/HOST`. Returns the directory.
        """
        first = str(host_names(hosts)[0].value)
        directory = Path("server")
        names = self._names_in(directory)
        # Every server has the local names: they name the first server only if its first name is local, too.
        if names and first not in ({*names} if names[0] in LOCAL_HOSTS else {*names} - {*LOCAL_HOSTS}):
            directory = Path("servers", first)
            names = self._names_in(directory)
        return self.issue_server((*names, *hosts), days, directory)

    def _names_in(self, directory: Path) -> tuple[str, ...]:
        """The names of a directory's certificate; empty if the directory has none."""
        certificate = self.directory / directory / CERTIFICATE_NAME
        return read_certificates(certificate)[0].names if certificate.exists() else ()

    def issue_principal(self, principal: Principal, days: int = LEAF_DAYS) -> Path:
        """A client's certificate; returns its directory."""
        under = Path("tenants", principal.tenant) if principal.role.has_tenant else Path()
        names = [x509.UniformResourceIdentifier(str(principal))]
        return self._issue(under / principal.role, f"kvpool {principal.role}", names, _CLIENT, days)

    def _issue(
        self, directory: Path, name: str, names: Sequence[x509.GeneralName], use: x509.ObjectIdentifier, days: int
    ) -> Path:
        ends_at = self._certificate.not_valid_after_utc
        if dt.datetime.now(dt.UTC) + dt.timedelta(days=days) > ends_at:
            raise InvalidRequestError(
                f"{days} days are more than the authority has left, which ends on {ends_at:%Y-%m-%d}; give fewer, or "
                "make a new authority in another directory"
            )
        directory = self.directory / directory
        key = ec.generate_private_key(ec.SECP256R1())
        authority_key_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        certificate = (
            _builder(_name(name), self._certificate.subject, key, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(authority_key_id, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        write_whole(directory / CA_NAME, _pem(self._certificate))
        write_whole(directory / KEY_NAME, _key_pem(key), secret=True)
        write_whole(directory / CERTIFICATE_NAME, _pem(certificate))
        return directory


def read_certificates(path: Path) -> list[CertificateFacts]:
    """The certificates in a PEM file, or in the .crt and .pem files below a directory, by their ends.

    Raises ConfigError.
    """
    files = sorted(each for each in path.rglob("*") if each.suffix in (".crt", ".pem")) if path.is_dir() else [path]
    found: dict[bytes, CertificateFacts] = {}
    for file in files:
        text = read_pem(file)
        try:
            certificates = load_certificates(text, file)
        except ConfigError:
            if file == path:
                raise
            continue  # A key, for example.
        for certificate in certificates:
            before = found.get(name := certificate.fingerprint(hashes.SHA256()))
            found[name] = facts_of((*(before.paths if before else ()), str(file)), certificate)
    return sorted(found.values(), key=lambda facts: facts.ends_at)


def load_certificates(text: bytes, path: object, setting: str = "") -> list[x509.Certificate]:
    """The certificates in the PEM text of a file. Raises ConfigError if there is none; `setting` as of `unreadable`."""
    try:
        return x509.load_pem_x509_certificates(text)
    except ValueError:
        is_key = _KEY_MARK in text and _CERTIFICATE_MARK not in text
        held = "a private key, not certificates" if is_key else "no certificate that can be read"
        raise ConfigError(f"{path} holds {held}; give a PEM file with certificates{as_setting(setting)}") from None


def load_key(text: bytes, path: object, setting: str = "") -> PrivateKeyTypes:
    """The private key in the PEM text of a file. Raises ConfigError; `setting` as of `unreadable`."""
    try:
        return serialization.load_pem_private_key(text, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        is_certificate = _CERTIFICATE_MARK in text and _KEY_MARK not in text
        held = "certificates, not a private key" if is_certificate else f"no key that can be read: {error}"
        raise ConfigError(
            f"{path} holds {held}; give a PEM file with an unencrypted key{as_setting(setting)}"
        ) from None


def facts_of(paths: tuple[str, ...], certificate: x509.Certificate) -> CertificateFacts:
    """What a certificate says that is in the files `paths`."""
    allowed = extension_of(certificate, x509.ExtendedKeyUsage)
    use = " and ".join(
        word for word, oid in (("server", _SERVER), ("client", _CLIENT)) if allowed is None or oid in allowed
    )
    if (constraints := extension_of(certificate, x509.BasicConstraints)) is not None and constraints.ca:
        use = "authority"
    named = extension_of(certificate, x509.SubjectAlternativeName)
    names = (certificate.subject.rfc4514_string(),) if named is None else tuple(str(name.value) for name in named)
    return CertificateFacts(paths, use, names, certificate.not_valid_after_utc)


_Extension = TypeVar("_Extension", bound=x509.ExtensionType)


def extension_of(certificate: x509.Certificate, kind: type[_Extension]) -> _Extension | None:
    """What an extension of a certificate says; None: the certificate does not have the extension."""
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None


def uris_of(certificate: x509.Certificate) -> list[str]:
    """The URIs among a certificate's names."""
    names = extension_of(certificate, x509.SubjectAlternativeName)
    return names.get_values_for_type(x509.UniformResourceIdentifier) if names is not None else []


def _builder(subject: x509.Name, issuer: x509.Name, key: _PrivateKey, days: int) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def host_names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """Hosts as a certificate names them. Raises InvalidRequestError, which names the host that is none."""
    return list(dict.fromkeys(map(_host_name, hosts)))


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if not host or host.startswith(".") or not host.isascii() or any(char in host for char in " /:@,"):
        raise InvalidRequestError(f"host {host!r} is neither a DNS name nor an address; leave out scheme and port")
    return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: _PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
