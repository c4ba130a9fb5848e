"""The files of a process' TLS identity: read, checked, and read again when they change, so that nothing restarts.

An authority, a certificate (with its chain) and the certificate's key, all PEM.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from kvpool.certificates import read_pem
from kvpool.errors import ConfigError, InvalidRequestError
from kvpool.principal import Principal

LOOK_EVERY_S = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files.

    Args:
        ca: the authorities that sign the other side's certificate.
        cert: this side's certificate, and those between it and the authority.
        key: the certificate's private key, which nobody else may read.
    """

    ca: str
    cert: str
    key: str


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """What `TlsFiles` held when they were read.

    Args:
        ca, cert, key: PEM.
        ends_at: the last second in which the certificate is valid, UTC.
        principal: whom the certificate names, if it is a principal's.
    """

    ca: bytes
    cert: bytes
    key: bytes
    ends_at: dt.datetime
    principal: Principal | None


def read_identity(files: TlsFiles) -> TlsIdentity:
    """Reads and checks the files. Raises ConfigError, which names the file and the fault."""
    ca, cert = read_pem(Path(files.ca)), read_pem(Path(files.cert))
    _load_certificates(ca, files.ca)
    certificate = _load_certificates(cert, files.cert)[0]
    _require_private(files.key)
    key = read_pem(Path(files.key))
    try:
        private = serialization.load_pem_private_key(key, None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{files.key} holds no key that can be read: {error}; give an unencrypted PEM key") from None
    if private.public_key() != certificate.public_key():
        raise ConfigError(f"{files.key} is not the key of {files.cert}; give the pair that was made together")
    return TlsIdentity(ca, cert, key, certificate.not_valid_after_utc, _principal(certificate))


class WatchedIdentity:
    """The identity of files that may be replaced at any time. Thread-safe.

    While what they hold cannot be used (half of a pair is replaced, say), the last good identity stays in force, and
    one warning says why.

    Raises ConfigError, when it is made, for files that cannot be used.

    Attributes:
        value: the identity in force.
        version: how often it has changed.
    """

    def __init__(self, files: TlsFiles, clock: Callable[[], float] = time.monotonic):
        self.files = files
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = self._signature()
        self.value = read_identity(files)
        self.version = 0
        self._look_at = clock() + LOOK_EVERY_S

    def look(self, now: bool = False) -> int:
        """Reads the files again if they have changed, every `LOOK_EVERY_S` at most or `now`; returns the version."""
        if not now and self._clock() < self._look_at:
            return self.version
        with self._lock:
            self._look_at = self._clock() + LOOK_EVERY_S
            if (seen := self._signature()) == self._seen:
                return self.version
            try:
                value = read_identity(self.files)
            except ConfigError as error:
                log.warning("new TLS files cannot be used, and the old ones stay in force: %s", error)
            else:
                if value != self.value:
                    self.value = value
                    self.version += 1
                    log.info("TLS files read again; the certificate ends %s", value.ends_at.isoformat())
            self._seen = seen
            return self.version

    def _signature(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(map(_stamp, (self.files.ca, self.files.cert, self.files.key)))


def _stamp(path: str) -> tuple[int, ...] | None:
    """What changes when a file is replaced or written; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _require_private(path: str) -> None:
    """Raises ConfigError if others than a key's owner, or a group that root has chosen, can read it."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o037 or (mode & 0o040 and found.st_uid):
        raise ConfigError(
            f"others can read the private key {path} (mode {mode:04o}); give it mode 0600, or 0640 and owner root "
            "(Kubernetes: defaultMode: 0440 in the secret's volume)"
        )


def _load_certificates(text: bytes, path: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(text)
    except ValueError as error:
        raise ConfigError(f"{path} holds no certificate that can be read: {error}; give a PEM file") from None


def _principal(certificate: x509.Certificate) -> Principal | None:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    try:
        return Principal.parse(uris[0]) if len(uris) == 1 else None
    except InvalidRequestError:
        return None
