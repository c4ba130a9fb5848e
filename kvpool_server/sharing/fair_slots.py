"""Slots for work under way, which waiting callers get in turn."""

from __future__ import annotations

import asyncio
import functools
import math
from bisect import insort
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from operator import itemgetter

from kvpool.protocol.errors import BusyError
from kvpool_server.sharing.shares import Shares

_Turn = asyncio.Future[None]
TRY_AGAIN = "try again later, with fewer at once"


class FairSlots:
    """Slots of one event loop, bounded as in `Shares.has_room`. Each caller has a queue, and the queues take turns.

    Args:
        most_waiting: of one caller at once.
    """

    def __init__(self, most: int, most_own: int, most_waiting: float = math.inf):
        self._most, self._most_own, self._most_waiting = most, most_own, most_waiting
        self._taken = Shares()
        self._waiting: defaultdict[str, list[tuple[float, _Turn]]] = defaultdict(list)  # In the order of turns.

    @property
    def num_taken(self) -> int:
        return self._taken.total

    @property
    def has_waiting(self) -> bool:
        return any(self._waiting.values())

    @asynccontextmanager
    async def slot(self, caller: str, wait_s: float | None = None, place: float = math.inf) -> AsyncIterator[None]:
        """The caller has a slot until the body ends. Raises as `take`."""
        give_back = await self.take(caller, wait_s, place)
        try:
            yield
        finally:
            give_back()

    async def take(self, caller: str, wait_s: float | None = None, place: float = math.inf) -> Callable[[], None]:
        """Returns what gives the slot back; call it once.

        Raises BusyError if none becomes free in time, or if too many of the caller wait.

        Args:
            place: in the caller's queue, in which the lowest is first; of two that are equal, the earlier.
        """
        if self._has_room(caller) and not self.has_waiting:
            self._taken.add(caller)
            return functools.partial(self._free, caller)
        if len(self._waiting[caller]) >= self._most_waiting:
            raise BusyError(f"{self._most_waiting} requests of this caller wait; {TRY_AGAIN}")
        turn: _Turn = asyncio.get_running_loop().create_future()
        insort(self._waiting[caller], (place, turn), key=itemgetter(0))
        self._give()
        give_back = functools.partial(self._give_back, caller, turn)
        try:
            async with asyncio.timeout(wait_s):
                await turn
        except TimeoutError:
            give_back()
            raise BusyError(f"all that this caller may use at once is in use; {TRY_AGAIN}") from None
        except asyncio.CancelledError:
            give_back()
            raise
        return give_back

    def _give_back(self, caller: str, turn: _Turn) -> None:
        """Gives back a slot, or a place among those that wait."""
        if turn.cancelled():
            self._waiting[caller] = [each for each in self._waiting[caller] if each[1] is not turn]
            self._give()
        else:
            self._free(caller)

    def _free(self, caller: str) -> None:
        self._taken.add(caller, -1)
        self._give()

    def _has_room(self, caller: str) -> bool:
        return self._taken.has_room(caller, 1, self._most, self._most_own)

    def _give(self) -> None:
        """Gives a slot to each waiting caller that may have one; its queue goes behind the others."""
        for caller, queue in list(self._waiting.items()):
            if not queue:
                del self._waiting[caller]
            elif not queue[0][1].cancelled() and self._has_room(caller):
                self._taken.add(caller)
                queue.pop(0)[1].set_result(None)
                self._waiting[caller] = self._waiting.pop(caller)
