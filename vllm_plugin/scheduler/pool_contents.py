"""Which blocks this engine takes the pool to hold: those that it has stored, until one is found missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_plugin.metadata import StoreJob
from vllm_plugin.scheduler.events import Events
from vllm_plugin.scheduler.recent_stores import RecentStores

if TYPE_CHECKING:
    from vllm.v1.request import Request


class PoolContents:
    """One engine's: `recent` keeps it from offering a block twice, `events` tells routers of the blocks."""

    def __init__(self, events: Events):
        self.events = events
        self.recent = RecentStores()

    def stored(self, request: Request, job: StoreJob) -> None:
        """Every rank has stored a job of a request."""
        self.events.stored(request, job)
        self.recent.stored(job)

    def missing(self, group_idx: int, block_hashes: Sequence[bytes]) -> None:
        """Blocks are not in the pool."""
        self.events.missing(group_idx, block_hashes)
        self.recent.missing(group_idx, block_hashes)

    def forget_all(self) -> None:
        """The engine has moved to another namespace."""
        self.events.all_missing()
        self.recent.forget_all()
