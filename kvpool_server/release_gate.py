"""Refuses clients of releases that this server does not work with, and says so in the log."""

from __future__ import annotations

import structlog

from kvpool.errors import IncompatibleReleaseError
from kvpool.skew import OWN, Release, check_skew

log = structlog.get_logger()

MAX_LOGGED = 64
"""Refused clients that are logged: a client that is refused asks again every few seconds."""


class ReleaseGate:
    """See the module. Belongs to the event loop."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, Release]] = set()

    def check(self, client: Release, opener: str) -> None:
        """Raises IncompatibleReleaseError for a client of an incompatible release, and logs the first of each host.

        Args:
            opener: the client's host, as it says.
        """
        try:
            check_skew(client, OWN)
        except IncompatibleReleaseError as error:
            if (opener, client) not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add((opener, client))
                log.warning("refused a client of another release", client=opener, reason=str(error))
            raise
