"""Bearer tokens: secrets that stand for a principal, for callers that have no certificate.

A server keeps a file with a JSON object a line for each token: its SHA-256, the principal, and when it ends. Who reads
the file cannot make a token from it.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from kvpool.certificates import read_pem
from kvpool.errors import ConfigError, InvalidRequestError
from kvpool.file_permissions import require_owner_writes, require_private
from kvpool.principal import Principal

PREFIX = "kvpool_"
"""What every token begins with, so that a scanner for leaked secrets can find it."""
_SECRET_BYTES = 32
_UNITS = {"h": 1, "d": 24, "w": 7 * 24}
_TOKEN = re.compile(PREFIX + r"[A-Za-z0-9_-]{43}")
_JWT = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """What a server knows of a token.

    Args:
        digest: SHA-256 of the token, hexadecimal.
        ends_at: UTC.
    """

    digest: str
    principal: Principal
    ends_at: dt.datetime

    def line(self) -> str:
        """The record in a file of tokens."""
        fields = {"sha256": self.digest, "principal": str(self.principal), "ends_at": self.ends_at.isoformat()}
        return json.dumps(fields) + "\n"

    @classmethod
    def parse(cls, line: str) -> TokenRecord:
        """The record of a line. Raises ValueError."""
        fields = json.loads(line)
        if not isinstance(fields, dict) or sorted(fields) != ["ends_at", "principal", "sha256"]:
            raise ValueError("a line is not an object with sha256, principal and ends_at")
        if not re.fullmatch("[0-9a-f]{64}", str(fields["sha256"])):
            raise ValueError(f"sha256 {fields['sha256']!r} is not 64 hexadecimal digits")
        ends_at = dt.datetime.fromisoformat(str(fields["ends_at"]))
        if ends_at.tzinfo is None:
            raise ValueError(f"ends_at {fields['ends_at']!r} has no time zone; give one, such as +00:00")
        try:
            principal = Principal.parse(str(fields["principal"]))
        except InvalidRequestError as error:
            raise ValueError(str(error)) from None
        return cls(str(fields["sha256"]), principal, ends_at)


def create_token(principal: Principal, lasts: dt.timedelta) -> tuple[str, TokenRecord]:
    """A new token, and what its server has to know of it."""
    token = PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(_SECRET_BYTES)).rstrip(b"=").decode()
    return token, TokenRecord(digest_of(token), principal, dt.datetime.now(dt.UTC) + lasts)


def digest_of(token: str) -> str:
    """SHA-256, hexadecimal. The token is as random as the digest is long, so a slow hash would add nothing."""
    return hashlib.sha256(token.encode()).hexdigest()


def append_record(path: Path, record: TokenRecord) -> None:
    """Adds a token to a server's file, which is made with mode 0600. Raises ConfigError."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with open(fd, "a") as file:
            file.write(record.line())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def read_records(path: Path) -> dict[str, TokenRecord]:
    """A server's tokens by digest, the ended ones included.

    Raises ConfigError, which names the line, also for a file that its group or others can write.
    """
    require_owner_writes(str(path), "add an operator's token")
    found = {}
    for number, line in enumerate(read_pem(path).decode(errors="replace").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            record = TokenRecord.parse(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}; see `kvpool token create`") from None
        found[record.digest] = record
    return found


def read_token(path: Path) -> str:
    """A client's token. Raises ConfigError unless the file holds one token alone, and others cannot read it."""
    require_private(str(path), "token")
    text = read_pem(path).decode(errors="replace").strip()
    if not (_TOKEN.fullmatch(text) or _JWT.fullmatch(text)):
        raise ConfigError(
            f"{path} holds no token; it has to hold what `kvpool token create` printed, or a JWT, and nothing else"
        )
    return text


def parse_lifetime(text: str) -> dt.timedelta:
    """A time such as 12h, 90d or 4w. Raises InvalidRequestError."""
    match = re.fullmatch(r"(\d{1,4})([hdw])", text)
    if match is None or not int(match[1]):
        raise InvalidRequestError(f"{text!r} is not a lifetime; give hours, days or weeks, such as 12h, 90d or 4w")
    return dt.timedelta(hours=int(match[1]) * _UNITS[match[2]])
