"""The deny list: principals and credentials that are refused although they are valid.

A file with an entry a line: a SPIFFE ID, or the SHA-256 of a certificate (as `openssl x509 -fingerprint -sha256` prints
it) or of a token (as the file of tokens has it). `#` begins a comment.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from kvpool.certificates import read_pem
from kvpool.errors import ConfigError, InvalidRequestError
from kvpool.file_permissions import require_owner_writes
from kvpool.principal import Principal
from kvpool.watched_files import WatchedFiles
from kvpool_server.access.credential import Credential

_DIGEST = re.compile("[0-9a-f]{64}")


class DenyList(WatchedFiles[frozenset[str]]):
    """The entries of a file, read again when it changes. Raises ConfigError for a file that cannot be used."""

    def __init__(self, path: str, when_read: Callable[[ConfigError | None], None] = lambda _: None):
        super().__init__([path], lambda: _read(Path(path)), when_read=when_read)

    def denies(self, credential: Credential) -> bool:
        """Whether the list has a credential or its principal."""
        denied = self.value
        return bool(denied) and (credential.digest in denied or str(credential.principal) in denied)


def _read(path: Path) -> frozenset[str]:
    """The entries: SPIFFE IDs, and digests of 64 lower-case digits.

    Raises ConfigError, which names the line, also for a file that its group or others can write.
    """
    require_owner_writes(str(path), "let denied callers in again")
    found = set()
    for number, line in enumerate(read_pem(path).decode(errors="replace").splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        digest = entry.rpartition("=")[2].replace(":", "").lower()
        if _DIGEST.fullmatch(digest):
            found.add(digest)
        elif entry.startswith("spiffe://"):
            try:
                found.add(str(Principal.parse(entry)))
            except InvalidRequestError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None
        else:  # Not shown: it may be a token.
            raise ConfigError(
                f"{path}, line {number}: neither a SPIFFE ID nor the SHA-256 of a certificate or token; give 64 "
                "hexadecimal digits"
            )
    return frozenset(found)
