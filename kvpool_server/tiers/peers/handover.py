"""Hands blocks of a server that leaves over to its peers: each peer is asked to read some prompts.

Nothing is sent. A receiver finds the blocks here through its own tier of peers, and verifies what it reads. Prompts
that were used last come first; one that another server has as a whole is not handed over. The others go to the receiver
that has been given the least, counted with what the prompt adds: a receiver that has a part of a prompt is preferred,
and none gets everything. A receiver that does not answer is given no more; a prompt that a receiver does not read is
offered to another one.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import operator
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvpool.protocol.types import BlockRun
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.eviction.policy import TICK
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.steps import LOOKUP_STEP_BLOCKS
from kvpool_server.tiers.tier import BlockKey, Prompt, Tier, keys_of

if TYPE_CHECKING:
    from kvpool_server.tiers.peers.peer import Peer

T = TypeVar("T")

MAX_PREFIXES = 1_024
"""Prefixes that are offered: as many leaves are remembered while the index is visited."""
MAX_RUN_BLOCKS = LOOKUP_STEP_BLOCKS
"""Of a prefix, its first blocks: a peer looks so many up in one step."""
AT_ONCE, LEASES = 4, 8
"""Prompts on their way, and their groups, if it is more than one prompt: a receiver has a lease here for each."""
LOOK_EVERY_S, STALLED_S, PAUSE_S = 0.01, 1.5, 1.0
"""How often a receiver is asked how far it is, at most; how long one may read nothing; and how long a prompt waits that
was offered to one that does not answer: `Health` lets it be asked again then."""
MAX_RECEIVERS, MAX_HOLDERS, MAX_TRIES, MAX_FAILURES = 16, 8, 4, 2 * AT_ONCE
"""Servers that are given blocks; of one prompt, servers that are asked whether they have it, and offers of it; and
offers in a row without an answer after which a server is given no more: all prompts on their way may fail together."""


async def hand_over(pool: Pool, tiers: Sequence[Tier]) -> None:
    """Has the tiers that do so hand blocks of the pool over. Cancel it at the deadline.

    The pool's event loop gets a turn after each part of the index.
    """
    leaves: list[Entry] = []
    for namespace in pool.open_namespaces():
        if namespace.is_measurement or namespace.superseded:
            continue
        for part in itertools.chain.from_iterable(group.index.parts() for group in namespace.groups):
            some = (leaf for entry in part if not entry.children and (leaf := _readable(entry)) is not None)
            leaves = heapq.nlargest(MAX_PREFIXES, itertools.chain(leaves, some), key=lambda leaf: leaf.used)
            await asyncio.sleep(0)
    for tier in tiers:
        if tier.hands_over:
            await tier.hand_over(_prompts(pool, leaves))


def _readable(entry: Entry) -> Entry | None:
    """The last readable block of a prefix, behind which others may just be put; None if clients need it no more."""
    leaf: Entry | None = entry
    while leaf is not None and not leaf.complete:
        leaf = leaf.parent
    return leaf if leaf is not None and leaf.used >= 0 else None


def _prompts(pool: Pool, leaves: Sequence[Entry]) -> Iterator[Prompt]:
    """The prefixes of leaves. One call of the pool uses a prompt's blocks in all groups, which stay together."""
    for _, leaves_of_call in itertools.groupby(leaves, lambda leaf: leaf.used // TICK):
        prompts: list[Prompt] = []
        for leaf in leaves_of_call:
            group, run = leaf.group, _run(leaf)
            if run is None or pool.namespace(group.fingerprint) is None:
                continue
            for prompt in prompts:
                if group not in prompt and next(iter(prompt)).fingerprint == group.fingerprint:
                    prompt[group] = run
                    break
            else:
                prompts.append({group: run})
        yield from prompts


def _run(leaf: Entry) -> BlockRun | None:
    """The blocks up to a leaf that are readable now; None if none is of use."""
    prefix: list[Entry] = []
    entry: Entry | None = leaf
    while entry is not None and entry.live and entry.complete:
        prefix.append(entry)
        entry = entry.parent
    if not prefix or (leaf.group.needs_prefix and prefix[-1].parent_hash):
        return None
    prefix.reverse()
    hashes = [each.block_hash for each in prefix[:MAX_RUN_BLOCKS]]
    return BlockRun(leaf.group.idx, hashes, prefix[0].parent_hash)


class Ask(Protocol):
    """Asks one server; None if it does not answer, or is not to be asked now."""

    async def __call__(self, endpoint: str, question: Callable[[Peer], T], /) -> T | None: ...


class HandOver:
    """One hand-over, which may be cancelled at any time.

    Args:
        receivers: endpoints of other servers.
        max_bytes: bound on what all receivers read.
        holders: endpoints of other servers that may have blocks of a group, the likeliest first.

    Attributes:
        num_prompts: that were to be handed over.
        num_blocks: blocks that receivers have got.
        bytes_of: bytes that each receiver has read, or is reading.
    """

    def __init__(
        self,
        receivers: Sequence[str],
        max_bytes: int,
        holders: Callable[[Group, Sequence[bytes]], Awaitable[list[str]]],
        ask: Ask,
    ):
        self._failures = dict.fromkeys(receivers[:MAX_RECEIVERS], 0)  # Offers in a row without an answer.
        self._max_bytes = max_bytes
        self._holders = holders
        self._ask = ask
        self._room, self._num_runs = asyncio.Condition(), 0  # Runs that receivers are reading.
        self._given: defaultdict[str, set[BlockKey]] = defaultdict(set)
        self.num_prompts = self.num_blocks = 0
        self.bytes_of: Counter[str] = Counter()

    async def run(self, prompts: Iterator[Prompt]) -> None:
        """Returns when no prompt is left, or no receiver."""
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._give_all(prompts))

    async def _give_all(self, prompts: Iterator[Prompt]) -> None:
        for prompt in prompts:
            self.num_prompts += 1
            tried: list[str] = []
            while len(tried) < MAX_TRIES and (endpoint := await self._receiver(prompt, tried)) not in ("", *tried):
                async with self._room:  # A receiver reads each group under a lease, of which the server grants few.
                    await self._room.wait_for(functools.partial(self._has_room, len(prompt)))
                    self._num_runs += len(prompt)
                try:
                    has_read = await self._give(endpoint, prompt)
                finally:
                    self._num_runs -= len(prompt)
                    async with self._room:
                        self._room.notify_all()
                self._failures[endpoint] = self._failures[endpoint] + 1 if has_read is None else 0
                if has_read:
                    break
                if has_read is None:
                    await asyncio.sleep(PAUSE_S)
                else:
                    tried.append(endpoint)
            if not self._receivers:
                return

    def _has_room(self, num_runs: int) -> bool:
        return not self._num_runs or self._num_runs + num_runs <= LEASES

    @property
    def _receivers(self) -> list[str]:
        return [endpoint for endpoint, failures in self._failures.items() if failures < MAX_FAILURES]

    async def _receiver(self, prompt: Prompt, tried: Sequence[str]) -> str:
        """The receiver that is to read a prompt, if possible one not tried; empty if another server has it all."""
        first = min(prompt, key=lambda group: group.idx)
        held_bytes: Counter[str] = Counter()
        for endpoint in (await self._holders(first, prompt[first].block_hashes))[:MAX_HOLDERS]:
            held = await self._held(endpoint, prompt)
            if all(held[group] == len(run) for group, run in prompt.items()):
                return ""
            held_bytes[endpoint] = sum(count * group.spec.slot_bytes for group, count in held.items())
        load = {
            each: self.bytes_of[each] + max(0, sum(self._new(each, prompt).values()) - held_bytes[each])
            for each in self._receivers
        }
        return min(load, key=lambda each: (each in tried, self._failures[each] > 0, load[each]), default="")

    async def _held(self, endpoint: str, prompt: Prompt) -> dict[Group, int]:
        """How many leading blocks of each group a server has; 0 if it does not answer."""
        held = {}
        for group, run in prompt.items():
            holds = operator.methodcaller("holds", group, run.block_hashes)
            held[group] = await self._ask(endpoint, holds) or 0
        return held

    def _new(self, endpoint: str, prompt: Prompt) -> dict[BlockKey, int]:
        """The blocks of a prompt that a receiver was not given yet, with their sizes."""
        return {
            key: group.spec.slot_bytes
            for group, run in prompt.items()
            for key in keys_of(group, run.block_hashes)
            if key not in self._given[endpoint]
        }

    async def _give(self, endpoint: str, prompt: Prompt) -> bool | None:
        """Has a receiver read a prompt, unless that is too large.

        Returns False if the receiver reads nothing, and None if it does not answer.
        """
        new = self._new(endpoint, prompt)
        if not new or self.bytes_of.total() + sum(new.values()) > self._max_bytes:
            return True
        given = self._given[endpoint]
        given |= new.keys()
        self.bytes_of[endpoint] += sum(new.values())
        there: set[BlockKey] | None = None
        before: set[BlockKey] = set()
        read_at, most_held = time.monotonic(), 0
        # No block is named again that was seen there: a receiver without room would read again what it has evicted.
        while time.monotonic() - read_at < STALLED_S and (rest := _behind(prompt, there or set())):
            if (held := sum((await self._held(endpoint, prompt)).values())) < most_held:
                there = set()  # It evicts what it has read: it has no room for the prompt.
                break
            most_held = held
            answer = await self._ask(endpoint, operator.methodcaller("bring_up", rest))
            if answer is None:
                break
            arrived = answer[0] & new.keys()
            if there is None:
                before, there = arrived, set()
                self.bytes_of[endpoint] -= sum(new[key] for key in before)
            elif arrived:
                read_at = time.monotonic()
                self.num_blocks += len(arrived)
            there |= answer[0]
            if not answer[1]:
                break
            await asyncio.sleep(min(STALLED_S, max(LOOK_EVERY_S, answer[1] / 1000)))
        unread = new.keys() - (there or set())
        given -= unread
        self.bytes_of[endpoint] -= sum(new[key] for key in unread - before)
        return None if there is None else not unread


def _behind(prompt: Prompt, seen: Container[BlockKey]) -> Prompt:
    """What of a prompt is behind the blocks that were seen, by group."""
    rest = {}
    for group, run in prompt.items():
        hashes = [name for _, _, name in itertools.dropwhile(seen.__contains__, keys_of(group, run.block_hashes))]
        if hashes:
            parent = run.block_hashes[-len(hashes) - 1] if len(hashes) < len(run) else run.parent_hash
            rest[group] = BlockRun(run.group_idx, hashes, parent)
    return rest
