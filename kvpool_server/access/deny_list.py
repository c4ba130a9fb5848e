"""The deny list: tenants, principals and credentials that are refused although they are valid.

A file with an entry a line: `tenant:NAME`, a SPIFFE ID, or the SHA-256 of a certificate (as `openssl x509 -fingerprint
-sha256` prints it) or of a token (as the file of tokens has it; of an issuer's token, of all before its last dot). `#`
begins a comment.

A line that can deny nobody is an error: an operator who has misspelt it must not believe that access was taken away.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from kvpool.protocol.errors import ConfigError, InvalidRequestError
from kvpool.security.certificates import read_pem
from kvpool.security.file_permissions import require_owner_writes
from kvpool.security.principal import Principal, Role
from kvpool.security.watched_files import WatchedFiles
from kvpool_server.access.credential import Credential, listed_principal

_TENANT, _SPIFFE = "tenant:", "spiffe://"
_DIGEST = re.compile("[0-9a-f]{64}")
_LIKE_A_SECRET = re.compile("[A-Za-z0-9_-]{20}")
"""What an entry contains that may be a token, or a part of one: an error does not show it."""


class DenyList(WatchedFiles[frozenset[str]]):
    """The entries of a file, read again when it changes. Raises ConfigError for a file that cannot be used.

    Args:
        domain: the trust domain of all callers; None: callers may be of any.
    """

    def __init__(
        self, path: str, when_read: Callable[[ConfigError | None], None] = lambda _: None, domain: str | None = None
    ):
        super().__init__([path], lambda: _read(Path(path), domain), when_read=when_read)

    def denies(self, credential: Credential) -> bool:
        """Whether the list has a credential, its principal, or the principal's tenant."""
        denied, principal = self.value, credential.principal
        return bool(denied) and (
            credential.digest in denied or str(principal) in denied or _TENANT + principal.tenant in denied
        )


def _read(path: Path, domain: str | None) -> frozenset[str]:
    """The entries, as `_parse` returns them.

    Raises ConfigError, which names the line, also for a file that its group or others can write.
    """
    require_owner_writes(str(path), "let denied callers in again", "--deny")
    found = set()
    for number, line in enumerate(read_pem(path).decode(errors="replace").splitlines(), 1):
        if entry := line.partition("#")[0].strip():
            try:
                found.add(_parse(entry, domain))
            except InvalidRequestError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None
    return frozenset(found)


def _parse(entry: str, domain: str | None) -> str:
    """`tenant:NAME`, a SPIFFE ID, or a digest of 64 lower-case digits. Raises InvalidRequestError for anything else."""
    if entry.startswith(_SPIFFE):
        return str(listed_principal(entry, domain))
    if entry.startswith(_TENANT):
        return _TENANT + Principal(entry.removeprefix(_TENANT), Role.ENGINE_READ).tenant
    digest = entry.rpartition("=")[2].replace(":", "").lower()
    if not _DIGEST.fullmatch(digest):
        shown = f"an entry of {len(entry)} characters" if _LIKE_A_SECRET.search(entry) else repr(entry)
        raise InvalidRequestError(
            f"{shown} is neither a tenant nor a SPIFFE ID nor the SHA-256 of a certificate or token; give tenant:NAME, "
            "spiffe://DOMAIN/kvpool/TENANT/ROLE, or 64 hexadecimal digits"
        )
    return digest
