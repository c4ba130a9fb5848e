"""CURVE keys of KV events: the server's pair, its subscribers' pairs, and the server's list of subscribers.

A pair is two files in pyzmq's format, NAME.key (public) and NAME.key_secret (both keys), which `zmq.auth` reads. The
list has a line `TENANT PUBLIC_KEY` for each subscriber; the tenant `_` stands for all tenants, for operators.

Source: CurveZMQ, https://rfc.zeromq.org/spec/26/; keys as text: Z85, https://rfc.zeromq.org/spec/32/.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

from kvpool.protocol.errors import ConfigError
from kvpool.security.files import append_line, read_lines, require_private, write_new
from kvpool.security.principal import ALL_TENANTS, Principal, Role

PUBLIC_SUFFIX, SECRET_SUFFIX = ".key", ".key_secret"
_KEY_BYTES = 32
_MAKE_ONE = "make a pair with `kvpool certs events-key`"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, each key as 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class SubscriberKeys:
    """A subscriber's own pair, and the server's public key, Z85."""

    own: KeyPair
    server: bytes

    @classmethod
    def read(cls, own: Path, server: Path) -> SubscriberKeys:
        """Reads NAME.key_secret of the subscriber and NAME.key of the server. Raises ConfigError."""
        return cls(read_pair(own), read_public(server))

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Has a socket authenticate and encrypt; to be called before `connect`."""
        socket.curve_publickey, socket.curve_secretkey = self.own.public, self.own.secret
        socket.curve_serverkey = self.server


def create_pair(name: Path) -> KeyPair:
    """Makes a pair in NAME.key and NAME.key_secret (mode 0600). Raises ConfigError if there is one already."""
    public, secret = zmq.curve_keypair()
    text = f'metadata\ncurve\n    public-key = "{public.decode()}"\n'
    # The secret first: a public key without its secret would be listed in vain.
    write_new(Path(f"{name}{SECRET_SUFFIX}"), f'{text}    secret-key = "{secret.decode()}"\n')
    write_new(Path(f"{name}{PUBLIC_SUFFIX}"), text, 0o644)
    return KeyPair(public, secret)


def read_pair(path: Path) -> KeyPair:
    """The pair in a .key_secret file, which nobody else may read. Raises ConfigError."""
    require_private(str(path), setting="--kv-events-key (--key of `kvpool events`)")
    public, secret = _load(path)
    if secret is None:
        raise ConfigError(f"{path} holds no secret key; give the file NAME{SECRET_SUFFIX}, or {_MAKE_ONE}")
    try:
        is_pair = zmq.curve_public(secret) == public
    except (ValueError, zmq.ZMQError):
        is_pair = False
    if not is_pair:
        raise ConfigError(f"{path} holds no CURVE key pair; {_MAKE_ONE}")
    return KeyPair(public, secret)


def read_public(path: Path) -> bytes:
    """The public key in a .key or .key_secret file. Raises ConfigError."""
    public, _ = _load(path)
    if not _is_key(public):
        raise ConfigError(f"{path} holds no CURVE public key; {_MAKE_ONE}")
    return public


def append_subscriber(path: Path, tenant: str, public: bytes) -> None:
    """Adds a line to a server's list of subscribers. Raises ConfigError."""
    _check_tenant(tenant)
    append_line(path, f"{tenant} {public.decode()}\n", 0o644)


def read_subscribers(path: Path) -> dict[bytes, str]:
    """A server's list: the tenant of each public key. Raises ConfigError as `read_lines`."""
    tenants: dict[bytes, str] = {}

    def add(line: str) -> None:
        tenant, _, text = line.partition(" ")
        key = text.strip().encode(errors="replace")
        _check_tenant(tenant)
        if not _is_key(key):
            raise ValueError("not TENANT PUBLIC_KEY with a key of 40 characters")
        if tenants.setdefault(key, tenant) != tenant:
            raise ValueError(f"a key of tenant {tenants[key]} is listed again; {_MAKE_ONE}")

    read_lines(path, add, "add a subscriber", "--kv-events-subscribers")
    return tenants


def _check_tenant(tenant: str) -> None:
    if tenant != ALL_TENANTS:
        Principal(tenant, Role.ENGINE_READ)  # Raises for a tenant that no caller can have.


def _is_key(key: bytes) -> bool:
    try:
        return len(z85.decode(key)) == _KEY_BYTES
    except (KeyError, ValueError, struct.error):
        return False


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return load_certificate(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or 'no such file'}") from None
    except ValueError:
        raise ConfigError(f"{path} holds no CURVE key; {_MAKE_ONE}") from None
