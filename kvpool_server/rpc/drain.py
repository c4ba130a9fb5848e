"""Takes a server out of service: no new work, then the end of the work under way, then the tiers.

States: serving -> draining -> drained. From the first moment of a drain on no lease and no ticket is granted, but for
leases of other servers while blocks are handed over to them. The calls of those that are live are answered: their
transfers finish. What the tiers lack is written meanwhile, and what the last puts have stored is written at the end. A
drain ends at its deadline, whatever is unfinished.

Belongs to the server's event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

import structlog

from kvpool.protocol.errors import DrainingError, InvalidRequestError
from kvpool.protocol.types import MAX_DRAIN_MS
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.tiering.tiered_pool import TieredPool

log = structlog.get_logger()

LOOK_EVERY_S = 0.05
"""How often a drain looks whether leases and tickets have ended."""


class Drain:
    """The drain of one server. `run` does it once `begin` was called.

    Args:
        default_ms: the time of a drain that is given none.
        announce: tells everybody who asks for the server's health; awaited by the first `begin`.
        hand_over: has other servers read blocks of this one; None: no blocks are handed over.
    """

    def __init__(
        self,
        tiered: TieredPool,
        default_ms: int,
        announce: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
        hand_over: Callable[[], Awaitable[None]] | None = None,
    ):
        self._tiered = tiered
        self._default_ms = default_ms
        self._announce = announce
        self._hand_over = hand_over
        self._clock = clock
        self._begun = asyncio.Event()
        self.ends_at = math.inf

    @property
    def is_draining(self) -> bool:
        return self._begun.is_set()

    def check(self, *, of_server: bool = False) -> None:
        """Raises DrainingError if the server grants no leases and tickets any more.

        `of_server`: another server asks for a lease, which it gets until the hand-over has ended.
        """
        if self.is_draining and not (of_server and self._hand_over is not None):
            raise DrainingError(
                "the server is draining: it takes no new lookups and puts, and stops soon; go on without the pool, or "
                "use another server"
            )

    async def begin(self, deadline_ms: int = 0) -> pb.DrainResponse:
        """Begins the drain, or brings its deadline forward, to `deadline_ms` from now; returns how far the drain is.

        0: `default_ms`, unless the drain has begun. Raises InvalidRequestError if the deadline is too late.
        """
        if deadline_ms > MAX_DRAIN_MS:
            raise InvalidRequestError(f"deadline_ms is {deadline_ms}; give at most {MAX_DRAIN_MS}")
        is_first = not self.is_draining
        if deadline_ms or is_first:
            self.ends_at = min(self.ends_at, self._clock() + (deadline_ms or self._default_ms) / 1000)
        if is_first:
            self._begun.set()
            progress = self.progress()
            log.info(
                "draining", leases=progress.num_leases, tickets=progress.num_tickets, deadline_ms=progress.remaining_ms
            )
            await self._announce()
        return self.progress()

    def progress(self) -> pb.DrainResponse:
        """How far the drain is; cheap, however many leases and tickets are live."""
        pool = self._tiered.pool
        return pb.DrainResponse(
            num_leases=pool.leases.num_expiring,
            num_tickets=pool.tickets.num_expiring,
            num_queued_blocks=self._tiered.num_queued,
            remaining_ms=round(self.left_s * 1000),
        )

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; 0 before the drain has begun."""
        return max(0.0, self.ends_at - self._clock()) if self.is_draining else 0.0

    async def run(self) -> None:
        """Returns once the server has nothing left to do, or at the deadline of the drain."""
        await self._begun.wait()
        # A tier takes longest, so that it begins before the last transfers have ended.
        flush = asyncio.create_task(self._tiered.drain(self.left_s))
        hand_over = asyncio.create_task(self._hand_over_blocks())
        while self.left_s:
            progress = self.progress()
            if flush.done() and hand_over.done() and not progress.num_leases and not progress.num_tickets:
                break
            await asyncio.sleep(min(LOOK_EVERY_S, self.left_s))
        for task in (flush, hand_over):
            task.cancel()
        await asyncio.wait((flush, hand_over))
        await self._tiered.drain(self.left_s)  # What the last puts have stored.
        left = self.progress()
        is_late = left.num_leases or left.num_tickets or left.num_queued_blocks or not self.left_s
        say = log.warning if is_late else log.info
        say("drained", leases=left.num_leases, tickets=left.num_tickets, blocks_left=left.num_queued_blocks)

    async def _hand_over_blocks(self) -> None:
        try:
            if self._hand_over is not None:
                await self._hand_over()
        except Exception:
            log.exception("handing blocks over to other servers failed")
        finally:
            self._hand_over = None
