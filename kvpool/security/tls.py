"""The files of a process' TLS identity: an authority, a certificate with its chain, and the certificate's key."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from kvpool.protocol.errors import ConfigError, InvalidRequestError
from kvpool.security.certificates import CA_NAME, CERTIFICATE_NAME, KEY_NAME, load_certificates, load_key, uris_of
from kvpool.security.files import read_pem, read_private
from kvpool.security.principal import Principal


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files.

    Args:
        ca: the authorities that sign the other side's certificate.
        cert: this side's certificate, and those between it and the authority; empty: none, for clients with a token.
        key: the certificate's private key, which nobody else may read.
    """

    ca: str
    cert: str = ""
    key: str = ""

    @property
    def paths(self) -> list[str]:
        return [path for path in (self.ca, self.cert, self.key) if path]

    @classmethod
    def of(cls, value: object) -> TlsFiles:
        """Files, or a mapping with their paths by these names. Raises ConfigError for anything else."""
        paths = dataclasses.asdict(value) if isinstance(value, TlsFiles) else value
        if not isinstance(paths, Mapping) or not {"ca"} <= set(paths) <= {"ca", "cert", "key"}:
            raise ConfigError(
                f"tls = {value!r} does not have the paths ca, cert and key; give TlsFiles(ca, cert, key), or "
                "TlsFiles.in_directory(DIR)"
            )
        for name, path in paths.items():
            if not isinstance(path, str):
                raise ConfigError(f"tls: {name} = {path!r} is not a path as text; give str(path)")
        if not paths["ca"]:
            raise ConfigError(f"tls = {value!r} has no ca; give the authority of the server's certificate")
        return cls(**paths)

    @classmethod
    def in_directory(cls, directory: str | Path) -> TlsFiles:
        """The files of a directory as `kvpool certs` makes it; `ca.crt` may be alone there, for callers with a token.

        Raises ConfigError, which names the missing file.
        """
        directory = Path(directory)
        ca, cert, key = (directory / name for name in (CA_NAME, CERTIFICATE_NAME, KEY_NAME))
        if not ca.is_file():
            below = sorted(directory.glob(f"operator/{CA_NAME}"))
            hint = f"give {below[0].parent}" if below else "give a directory that `kvpool certs` has made"
            raise ConfigError(f"{directory} has no {CA_NAME}; {hint}")
        if cert.exists() != key.exists():
            missing, there = (cert, key) if key.exists() else (key, cert)
            raise ConfigError(
                f"{directory} has {there.name} and no {missing.name}; give both, or only {CA_NAME} for a caller with a "
                "token"
            )
        return cls(str(ca), str(cert), str(key)) if cert.exists() else cls(str(ca))


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """What `TlsFiles` held when they were read.

    Args:
        ca, cert, key: PEM; None: no such file was named.
        ends_at: the last second in which the certificate is valid, UTC.
        ca_ends_at: the same of the authority that ends first.
        principal: whom the certificate names, if it is a principal's.
    """

    ca: bytes | None
    cert: bytes | None = None
    key: bytes | None = None
    ends_at: dt.datetime | None = None
    ca_ends_at: dt.datetime | None = None
    principal: Principal | None = None


CLIENT_SETTINGS = TlsFiles("ca in tls (--tls DIR)", "cert in tls (--tls DIR)", "key in tls (--tls DIR)")
"""What gives a client the paths, for errors."""


def read_identity(files: TlsFiles, settings: TlsFiles = CLIENT_SETTINGS) -> TlsIdentity:
    """Reads and checks the files. Raises ConfigError, which names the file, the fault, and of `settings` the path's."""
    ca = read_pem(Path(files.ca), settings.ca) if files.ca else None
    ca_ends_at = None
    if ca is not None:
        ca_ends_at = min(each.not_valid_after_utc for each in load_certificates(ca, files.ca, settings.ca))
    if bool(files.cert) != bool(files.key):
        raise ConfigError(f"TLS files have cert {files.cert!r} and key {files.key!r}; give both, or none with a token")
    if not files.cert:
        return TlsIdentity(ca, ca_ends_at=ca_ends_at)
    cert = read_pem(Path(files.cert), settings.cert)
    certificate = load_certificates(cert, files.cert, settings.cert)[0]
    key = read_private(Path(files.key), settings.key)
    private = load_key(key, files.key, settings.key)
    if private.public_key() != certificate.public_key():
        raise ConfigError(f"{files.key} is not the key of {files.cert}; give the pair that was made together")
    return TlsIdentity(ca, cert, key, certificate.not_valid_after_utc, ca_ends_at, _principal(certificate))


def _principal(certificate: x509.Certificate) -> Principal | None:
    uris = uris_of(certificate)
    try:
        return Principal.parse(uris[0]) if len(uris) == 1 else None
    except InvalidRequestError:
        return None
