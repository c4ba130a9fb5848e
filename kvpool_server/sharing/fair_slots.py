"""Slots for work under way, which waiting callers get in turn, and how long that work may wait for its client."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import math
from bisect import insort
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from operator import itemgetter
from typing import Any

from kvpool.protocol.errors import BusyError, PoolTimeoutError
from kvpool_server.sharing import SPARED_S, Shares

_Turn = asyncio.Future[None]
TRY_AGAIN = "try again later, with fewer at once"
LOOK_EVERY_S = 0.25
SPARED_BYTES = 256 << 10
"""Bytes that make up for a wait of `SPARED_S`: a call that moves fewer falls behind."""


class Pace:
    """The time that a call has left to wait for its client. Waits use it up, and bytes that move bring it back.

    Args:
        most_s: the time at first, and at most.
        nbytes: that bring back all of it.
    """

    def __init__(self, most_s: float, nbytes: int):
        self._most_s, self._nbytes = most_s, nbytes
        self._left_s, self._behind_s, self._began_at = most_s, 0.0, 0.0
        self._timer: asyncio.Timeout | None = None  # While the call waits.

    async def wait(self, moving: Awaitable[Any]) -> Any:
        """Waits for a message to go, or for one to come. Raises PoolTimeoutError when the time is used up."""
        now = asyncio.get_running_loop().time
        self._began_at = now()
        try:
            async with asyncio.timeout_at(self._began_at + self._left_s) as self._timer:
                return await moving
        except TimeoutError:
            limits = f"{self._nbytes} bytes in {self._most_s:g} s, or was {SPARED_S:g} s behind while others waited"
            raise PoolTimeoutError(f"the client moved less than {limits}; try again") from None
        finally:
            waited_s = now() - self._began_at
            self._timer, self._left_s, self._behind_s = None, self._left_s - waited_s, self._behind_s + waited_s

    def moved(self, nbytes: int) -> None:
        self._left_s = min(self._most_s, self._left_s + self._most_s * nbytes / self._nbytes)
        self._behind_s = max(0.0, self._behind_s - SPARED_S * nbytes / SPARED_BYTES)

    def behind_s(self) -> float:
        """The time that its bytes have not made up for; 0 while the call does not wait."""
        waits = self._timer is not None and not self._timer.expired()
        return self._behind_s + asyncio.get_running_loop().time() - self._began_at if waits else 0.0

    def give_way(self) -> None:
        """Ends the wait of a call that is behind by `SPARED_S`."""
        if self._timer is not None and self.behind_s() >= SPARED_S:
            self._timer.reschedule(0.0)
            self._timer = None


class FairSlots:
    """Slots of one event loop, bounded as in `Shares.has_room`. Each caller has a queue, and the queues take turns.

    While callers wait, calls that are behind with their clients lose their slots, the one furthest behind first.

    Args:
        most_waiting: of one caller at once, where callers are told apart.
    """

    def __init__(self, most: int, most_own: int, most_waiting: float = math.inf):
        self._most, self._most_own, self._most_waiting = most, most_own, most_waiting
        self._taken = Shares()
        self._waiting: defaultdict[str, list[tuple[float, _Turn]]] = defaultdict(list)  # In the order of turns.
        self._paces: dict[Pace, str] = {}  # Of calls that have slots, with their callers.
        self._is_looking = False

    @property
    def num_taken(self) -> int:
        return self._taken.total

    @property
    def has_waiting(self) -> bool:
        return any(self._waiting.values())

    @asynccontextmanager
    async def slot(
        self, caller: str, wait_s: float | None = None, place: float = math.inf, pace: Pace | None = None
    ) -> AsyncIterator[None]:
        """The caller has a slot until the body ends. Raises as `take`."""
        give_back = await self.take(caller, wait_s, place, pace)
        try:
            yield
        finally:
            give_back()

    async def take(
        self, caller: str, wait_s: float | None = None, place: float = math.inf, pace: Pace | None = None
    ) -> Callable[[], None]:
        """Returns what gives the slot back; call it once.

        Raises BusyError if none becomes free in time, or if too many of the caller wait.

        Args:
            place: in the caller's queue, in which the lowest is first; of two that are equal, the earlier.
            pace: of the call, if it waits for its client while it has the slot.
        """
        if self._has_room(caller) and not self.has_waiting:
            self._taken.add(caller)
        else:
            await self._wait(caller, wait_s, place)
        if pace is not None:
            self._paces[pace] = caller
            if not self._is_looking:
                self._look()
        return functools.partial(self._free, caller, pace)

    async def _wait(self, caller: str, wait_s: float | None, place: float) -> None:
        if caller and len(self._waiting[caller]) >= self._most_waiting:
            raise BusyError(f"{self._most_waiting} requests of this caller wait; {TRY_AGAIN}")
        turn: _Turn = asyncio.get_running_loop().create_future()
        insort(self._waiting[caller], (place, turn), key=itemgetter(0))
        self._give()
        try:
            async with asyncio.timeout(wait_s):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn.cancelled():
                self._waiting[caller] = [each for each in self._waiting[caller] if each[1] is not turn]
                self._give()
            else:
                self._free(caller)
            if isinstance(error, TimeoutError):
                raise BusyError(f"all that this caller may use at once is in use; {TRY_AGAIN}") from None
            raise

    def _look(self) -> None:
        """For each caller that waits, has the call that is furthest behind give way. Again while there may be such."""
        for caller in [caller for caller, queue in self._waiting.items() if queue]:
            is_full = self._taken.of(caller) >= self._most_own
            paces = [pace for pace, owner in self._paces.items() if owner == caller or not is_full]
            if paces:
                max(paces, key=Pace.behind_s).give_way()
        if self._paces:
            asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look, context=contextvars.Context())
        self._is_looking = bool(self._paces)

    def _free(self, caller: str, pace: Pace | None = None) -> None:
        self._taken.add(caller, -1)
        if pace is not None:
            del self._paces[pace]
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
