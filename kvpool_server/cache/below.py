"""What lies under a pool and may bring blocks up into it."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.types import BlockRun, RunHits
from kvpool_server.cache.namespaces import Namespace


class Below:
    """Asked inside every lookup that leases: be quick, and wait for nobody. Below this one there is nothing."""

    def want(
        self, namespace: Namespace, runs: Sequence[BlockRun], hits: Sequence[RunHits], prefix_only: bool
    ) -> tuple[tuple[RunHits, ...], int]:
        """Has what a lookup missed brought up.

        Returns:
            The hits, with how much is on its way; and when to look up again, milliseconds, 0 if nothing is on its way.
        """
        return tuple(hits), 0
