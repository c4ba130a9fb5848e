"""What all groups of RPCs share: the pool that they serve."""

from __future__ import annotations

from kvpool_server.cache.steps import Run
from kvpool_server.drain import Drain
from kvpool_server.request_reader import RequestReader
from kvpool_server.tiering.tiered_pool import TieredPool


class ServedPool:
    """One server's pool.

    Args:
        tiered: the pool above its tiers.
        boot_token: in each reply; it names this start of the server.
        drain: refuses new leases and tickets once it has begun.
        run: does work in steps.

    Attributes:
        pool: without its tiers.
        reader: reads requests.
    """

    def __init__(self, tiered: TieredPool, boot_token: int, drain: Drain, run: Run):
        self.tiered = tiered
        self.pool = tiered.pool
        self.boot_token = boot_token
        self.drain = drain
        self.run = run
        self.reader = RequestReader(tiered.pool)
