"""Which releases work together: those whose protocols differ by one at most. All others are refused by name.

A client tells its release when it opens a namespace, and the server's answer tells the server's: each side checks the
other, since either may be the newer one.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.protocol.errors import IncompatibleReleaseError
from kvpool.version import PROTOCOL, __version__

MAX_SKEW = 1
MAX_RELEASE_CHARS = 64


@dataclass(frozen=True, slots=True)
class Release:
    """A release of kvpool as it speaks to others.

    Args:
        version: for people; empty: unknown.
        protocol: `kvpool.version.PROTOCOL`; 0: from before protocols were exchanged.
    """

    version: str
    protocol: int

    def __str__(self) -> str:
        return f"{self.version or 'of an unknown release'} (protocol {self.protocol})"

    def works_with(self, other: Release) -> bool:
        """Whether a client of one release and a server of the other understand each other."""
        return abs(self.protocol - other.protocol) <= MAX_SKEW


OWN = Release(__version__, PROTOCOL)


def check_skew(client: Release, server: Release, endpoint: str = "") -> None:
    """Raises IncompatibleReleaseError, which names the server's `endpoint`, unless client and server work together."""
    if client.works_with(server):
        return
    older, least = ("client", server.protocol) if client.protocol < server.protocol else ("server", client.protocol)
    where = f" at {endpoint}" if endpoint else ""
    raise IncompatibleReleaseError(
        f"the client is kvpool {client}, and kvpool-server{where} is kvpool {server}: they work together only if their "
        f"protocols differ by {MAX_SKEW} at most; upgrade the {older} to protocol {least - MAX_SKEW} or later"
    )
