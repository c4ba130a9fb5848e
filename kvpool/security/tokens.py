"""Bearer tokens: secrets that stand for a principal, for callers that have no certificate.

A server's file has a JSON object per token with the SHA-256, from which nobody can make a token, and comments (`#`).
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from kvpool.protocol.errors import ConfigError, InvalidRequestError
from kvpool.security.files import append_line, open_locked, read_lines, read_private, write_whole
from kvpool.security.principal import Principal

PREFIX = "kvpool_"
"""Begins every token, so that a scanner for leaked secrets can find it."""
_UNITS = {"h": 1, "d": 24, "w": 7 * 24}
_TOKEN = re.compile(PREFIX + r"[A-Za-z0-9_-]{43}")
_JWT = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token as its server knows it: by the SHA-256, hexadecimal. Times are UTC; a time not known is None."""

    digest: str
    principal: Principal
    ends_at: dt.datetime
    created_at: dt.datetime | None = None

    @property
    def id(self) -> str:
        """The first digits of the digest, by which people name the token."""
        return self.digest[:12]

    def line(self) -> str:
        fields = {"sha256": self.digest, "principal": str(self.principal), "ends_at": self.ends_at.isoformat()}
        if self.created_at is not None:
            fields["created_at"] = self.created_at.isoformat()
        return json.dumps(fields) + "\n"

    @classmethod
    def parse(cls, line: str) -> TokenRecord:
        """The record of a line. Raises ValueError, whose text does not show the line: it may be a token."""
        try:
            told = msgspec.json.decode(line, type=_Line)
            return cls(told.sha256, Principal.parse(told.principal), told.ends_at, told.created_at)
        except (msgspec.MsgspecError, RecursionError, InvalidRequestError) as error:
            raise ValueError(f"not a token's sha256, principal and ends_at as JSON: {error}") from None


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a server's file. Times have a zone, as 2027-01-31T12:00:00+00:00."""

    sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    principal: str
    ends_at: Annotated[dt.datetime, msgspec.Meta(tz=True)]
    created_at: Annotated[dt.datetime, msgspec.Meta(tz=True)] | None = None


def create_token(principal: Principal, lasts: dt.timedelta) -> tuple[str, TokenRecord]:
    """A new token, and what its server has to know of it."""
    token = PREFIX + secrets.token_urlsafe(32)
    now = dt.datetime.now(dt.UTC)
    return token, TokenRecord(digest_of(token), principal, now + lasts, now)


def digest_of(token: str) -> str:
    """SHA-256, hexadecimal. The token is as random as the digest is long, so a slow hash would add nothing."""
    return hashlib.sha256(token.encode()).hexdigest()


def append_record(path: Path, record: TokenRecord) -> None:
    """Adds a token to a server's file, which is made with mode 0600. Raises ConfigError."""
    append_line(path, record.line())


def remove_record(path: Path, token_id: str) -> TokenRecord:
    """Takes the token whose digest begins with `token_id` out of a server's file, which is replaced as a whole.

    Raises ConfigError as `read_lines`, and InvalidRequestError unless the id is one token's; nothing has changed.
    """
    path = path.resolve()  # A link to the file stays.
    fd = open_locked(path, os.O_RDWR)
    with open(fd, "rb"):
        lines = _parse_lines(path)
        found = {each.digest: each for _, each in lines if each is not None and each.digest.startswith(token_id)}
        if len(found) != 1 or not token_id:
            raise InvalidRequestError(
                f"{len(found)} tokens of {path} have ids that begin with {token_id!r}; give the id of one, which "
                f"`kvpool token list {path}` shows"
            )
        (removed,) = found.values()
        kept = (line for line, each in lines if each is None or each.digest != removed.digest)
        write_whole(path, b"".join(kept), like=os.fstat(fd))
    return removed


def read_records(path: Path) -> dict[str, TokenRecord]:
    """A server's tokens by digest, the ended ones included. Raises ConfigError as `read_lines`."""
    return {record.digest: record for _, record in _parse_lines(path) if record is not None}


def _parse_lines(path: Path) -> list[tuple[bytes, TokenRecord | None]]:
    """Each line with its record; None: the line is empty or a comment. Raises ConfigError as `read_lines`."""
    fix = f"; take the line out, and make another token in its place: kvpool token create --file {path}"
    return read_lines(path, TokenRecord.parse, "add an operator's token", "--tokens", fix)


def read_token(path: Path) -> str:
    """A client's token. Raises ConfigError unless the file holds one token alone, and others cannot read it."""
    text = read_private(path, "token_file (--token-file)", "token").decode(errors="replace").strip()
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
