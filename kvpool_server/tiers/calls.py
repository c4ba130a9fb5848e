"""Calls to tiers, which may fail or never return: whether they are sent, which threads make them, and their spans."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, cast

import structlog

from kvpool_server.cache.entry import Entry, Group
from kvpool_server.tiers.tier import Block, BlockKey, Tier, TierError, keys_of

if TYPE_CHECKING:
    from kvpool.client.tracing import Tracing  # Not to be loaded by those who read a tier's options.

log = structlog.get_logger()

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

AWAY_S = (1.0, 30.0)
"""How long no calls are sent after a failure: the first in a row, and the longest. Each failure doubles it."""
ANSWER_S = 10.0
"""Deadline of a call for those that wait for it. The call may go on; until it ends, the tier is unavailable."""
PART_BLOCKS, MAX_FIND_BLOCKS, FIND_S = 1_024, 8_192, 1.0
"""Of operators' questions which blocks a tier has: blocks at a time, in all, and their time."""
MAX_REMEMBERED = 8_192
"""Blocks whose lookup or put is remembered for spans; the oldest is forgotten for another."""
Holders = tuple[list[tuple[str, str]], dict[str, dict[str, str]]]
"""The tier that has each block, with the server, empty where none has it; and which tiers and servers did not tell."""


class Health:
    """Whether calls are sent to one tier: none are for a while after a failure, longer each time, or without an answer.

    Belongs to the event loop.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic):
        self._name = name
        self._clock = clock
        self._calls: dict[object, float] = {}
        """When each call under way began."""
        self._away_s = 0.0
        """How long no calls are sent after the last failure; 0 once a call has succeeded."""
        self._back_at = 0.0

    @property
    def is_available(self) -> bool:
        """True if calls may be sent to the tier now."""
        now = self._clock()
        return now >= self._back_at and not any(now - began_at > ANSWER_S for began_at in self._calls.values())

    @property
    def is_working(self) -> bool:
        """True if the tier is available and its last call succeeded."""
        return self.is_available and not self._away_s

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around a call to the tier: an exception is a failure, and propagates."""
        call = object()
        self._calls[call] = self._clock()
        late = asyncio.get_running_loop().call_later(ANSWER_S, self._report_late, call)
        try:
            yield
        except Exception as error:
            tell = log.debug if self._away_s else log.error  # Of failures in a row, the first is news.
            if self._clock() >= self._back_at:  # Else it failed with another one.
                self._away_s = min(max(2 * self._away_s, AWAY_S[0]), AWAY_S[1])
                self._back_at = self._clock() + self._away_s
            problem = "a tier has failed and gets no calls for a while"
            tell(problem, tier=self._name, error=str(error), seconds=self._away_s)
            raise
        else:
            if self._away_s:
                log.info("a tier works again", tier=self._name)
            self._away_s = 0.0
        finally:
            late.cancel()
            del self._calls[call]

    def _report_late(self, call: object) -> None:
        if call is next(iter(self._calls)):  # Calls that began later hang with the first, and are not reported.
            log.error("a tier does not answer and gets no calls until it does", tier=self._name, seconds=ANSWER_S)


class DaemonThreadPool:
    """Threads for calls that may never return, with a queue. Belongs to one event loop, whose thread alone uses `call`.

    `concurrent.futures` joins its threads when the process ends: a thread that hangs in a dead file system would keep
    the server from ending. These are daemon threads.
    """

    def __init__(self, num_threads: int, name: str):
        self.num_threads = num_threads
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{nth}", daemon=True) for nth in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    async def call(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Returns or raises what the function does. The function runs to its end even if the caller is cancelled."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put((lambda: function(*args), future))
        return await future

    def close(self, timeout_s: float) -> bool:
        """Ends the threads once the queue is empty; True if all have ended. Blocks `timeout_s` at most."""
        for _ in self._threads:
            self._queue.put(None)
        ends_at = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, ends_at - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            function, future = item
            try:
                outcome, resolve = function(), future.set_result
            except BaseException as error:  # The caller gets the error; this thread continues.
                outcome, resolve = error, future.set_exception
            with contextlib.suppress(RuntimeError):  # The loop has ended, and the caller with it.
                future.get_loop().call_soon_threadsafe(_resolve, future, resolve, outcome)


def _resolve(future: asyncio.Future[Any], resolve: Callable[[Any], None], outcome: object) -> None:
    if not future.done():  # Its caller may have been cancelled.
        resolve(outcome)


async def holders_of(tiers: Sequence[tuple[Tier, Health]], group: Group, names: Sequence[bytes]) -> Holders:
    """The first tier that has each block.

    A tier that does not know from memory is asked for `MAX_FIND_BLOCKS` blocks, which may take `FIND_S`.
    """
    found, away = [("", "")] * len(names), dict[str, dict[str, str]]()
    for tier, health in tiers:
        left, num_asked, servers = [nth for nth, (name, _) in enumerate(found) if not name], 0, dict[str, str]()
        for at in range(0, len(left), PART_BLOCKS):
            part = left[at : at + PART_BLOCKS]
            asked = [names[nth] for nth in part]
            known: Sequence[bool | str] | None = tier.known(group, asked)
            if known is None and (num_asked := num_asked + len(part)) <= MAX_FIND_BLOCKS:
                known = await _ask(tier, health, group, asked, servers)
            if known is None or servers:
                away[tier.name] = servers
            if known is None:
                break
            for nth, has in itertools.compress(zip(part, known, strict=True), known):
                found[nth] = tier.name, has if isinstance(has, str) else ""
            await asyncio.sleep(0)
    return found, away


async def _ask(tier: Tier, health: Health, *asked: Any) -> Sequence[bool | str] | None:
    """As `Tier.holders`; None if the tier does not answer in time."""
    if not health.is_available:
        return None
    try:
        async with asyncio.timeout(FIND_S):
            with health.call():
                return await tier.holders(*asked)
    except (TierError, TimeoutError):
        return None


def traced(tier: Tier, tracing: Tracing) -> Tier:
    """The same tier, whose calls have spans: children of the lookup that asked for the blocks, or of their put."""
    return cast(Tier, _TracedTier(tier, tracing))


class _TracedTier:
    """Wraps the calls that take time; everything else is the tier's own. Belongs to the pool's event loop."""

    def __init__(self, tier: Tier, tracing: Tracing):
        self._tier = tier
        self._tracing = tracing
        self._parents: OrderedDict[BlockKey, str] = OrderedDict()  # The span that last concerned each block.

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    async def find(self, group: Group, block_hashes: Sequence[bytes]) -> list[bool]:
        with self._span("find", group, block_hashes):
            return await self._tier.find(group, block_hashes)

    async def write(self, group: Group, blocks: Sequence[Block]) -> int:
        with self._span("write", group, [block.block_hash for block in blocks]) as span:
            written = await self._tier.write(group, blocks)
            span.set_attribute("kvpool.written_blocks", written)
            return written

    async def read(
        self, group: Group, block_hashes: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[Sequence[int] | None]:
        with self._span("read", group, block_hashes) as span:
            found = await self._tier.read(group, block_hashes, into)
            span.set_attribute("kvpool.read_blocks", len(found) - found.count(None))
            return found

    def known(self, group: Group, block_hashes: Sequence[bytes]) -> list[bool] | None:
        self._remember(group, block_hashes)  # A lookup asks before it prefetches.
        return self._tier.known(group, block_hashes)

    def hold(self, entry: Entry, *, is_there: bool) -> None:
        if is_there:
            self._remember(entry.group, [entry.block_hash])
        self._tier.hold(entry, is_there=is_there)

    def _remember(self, group: Group, block_hashes: Sequence[bytes]) -> None:
        """The current span concerns these blocks; without one, nothing is remembered."""
        if parent := self._tracing.current():
            self._parents.update(dict.fromkeys(keys_of(group, block_hashes), parent))
            while len(self._parents) > MAX_REMEMBERED:
                self._parents.popitem(last=False)

    def _span(self, call: str, group: Group, block_hashes: Sequence[bytes]) -> contextlib.AbstractContextManager[Any]:
        parent = self._parents.get((group.fingerprint, group.idx, block_hashes[0]), "") if block_hashes else ""
        attributes: dict[str, str | int] = {"kvpool.tier": self._tier.name, "kvpool.blocks": len(block_hashes)}
        return self._tracing.span(f"kvpool.tier.{call}", parent, attributes)
