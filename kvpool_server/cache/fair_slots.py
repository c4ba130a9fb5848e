"""Slots for work under way, which waiting callers get in turn."""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvpool.protocol.errors import UnavailableError
from kvpool_server.cache.shares import Shares


class FairSlots:
    """Slots of one event loop, bounded as in `Shares.has_room`. Each caller has a queue, and the queues take turns.

    Args:
        own: slots beside these that every caller has.
    """

    def __init__(self, most: int, most_own: int, own: int = 0):
        self._most, self._most_own, self._own = most, most_own, own
        self._taken = Shares()
        self._waiting: defaultdict[str, deque[asyncio.Future[None]]] = defaultdict(deque)  # In the order of turns.

    def num_waiting(self, caller: str) -> int:
        return len(self._waiting[caller])

    @property
    def has_waiting(self) -> bool:
        """Whether any caller waits."""
        return any(self._waiting.values())

    @asynccontextmanager
    async def slot(self, caller: str, wait_s: float | None = None) -> AsyncIterator[None]:
        """The caller has a slot until the body ends. Raises as `take`."""
        give_back = await self.take(caller, wait_s)
        try:
            yield
        finally:
            give_back()

    async def take(self, caller: str, wait_s: float | None = None) -> Callable[[], None]:
        """Returns what gives the slot back; call it once. Raises UnavailableError if none becomes free in time."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[caller].append(turn)
        self._give()
        give_back = functools.partial(self._give_back, caller, turn)
        try:
            async with asyncio.timeout(wait_s):
                await turn
        except TimeoutError:
            give_back()
            raise UnavailableError("all that this caller may use at once is in use; try again later") from None
        except asyncio.CancelledError:
            give_back()
            raise
        return give_back

    def _give_back(self, caller: str, turn: asyncio.Future[None]) -> None:
        """Gives back a slot, or a place among those that wait."""
        if turn.cancelled():
            self._waiting[caller].remove(turn)
        else:
            self._taken.add(caller, -1)
        self._give()

    def _give(self) -> None:
        """Gives a slot to each waiting caller that may have one; its queue goes behind the others."""
        for caller, queue in list(self._waiting.items()):
            if not queue:
                del self._waiting[caller]
            elif not queue[0].cancelled() and (
                self._taken.of(caller) < self._own or self._taken.has_room(caller, 1, self._most, self._most_own)
            ):
                self._taken.add(caller)
                queue.popleft().set_result(None)
                self._waiting[caller] = self._waiting.pop(caller)
