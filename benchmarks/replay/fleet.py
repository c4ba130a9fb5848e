"""Replays a trace against many servers that read from one another: real `Pool`s, and a directory without a delay.

What a server holds, evicts and keeps of what it has read is the server's own code. The directory says which servers
have most of a prompt's announced blocks, as `kvpool_server.tiers.peers` asks it. A block of the trace has 512 tokens,
of which a server with blocks of 16 announces one block in 32, each by its hash: any with a probability of 0.64.

Left out: the time that anything takes, answers that are remembered for seconds, and that a lookup prefetches a part of
a long prompt, and the next one the rest.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence

from benchmarks.replay.pool import LEASE_MS, ReplayedPool, run_of
from benchmarks.replay.request import Request
from kvpool.protocol.types import BlockRun
from kvpool_server.cache.entry import Entry, Observer
from kvpool_server.tiers.peers.directory import questioned
from kvpool_server.tiers.peers.tier import MAX_OWNERS

FIRST_BLOCKS, DOCUMENTS_A_SERVER, DOCUMENT_BLOCKS, QUESTION_BLOCKS, ZIPF = 2, 20, 12, 2, 0.8
"""Of `documents`."""
ANNOUNCED = 1 - (1 - 1 / 32) ** 32


class _Holder(Observer):
    """Tells a fleet which blocks a server holds."""

    def __init__(self, owners: dict[bytes, set[int]], server: int):
        self._owners, self._server = owners, server
        self._held: set[bytes] = set()

    def stored(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._held.add(entry.block_hash)
            self._owners.setdefault(entry.block_hash, set()).add(self._server)

    def removed(self, entry: Entry) -> None:
        self._held.discard(entry.block_hash)
        self._owners[entry.block_hash].discard(self._server)

    def ended(self) -> None:
        """The server has ended: the directory names it no more."""
        for name in self._held:
            self._owners[name].discard(self._server)


class Fleet:
    """Servers of `capacity` blocks each.

    Args:
        announced: the share of the trace's blocks that are; 0: servers do not read from one another.
        lost: the share of questions, to the directory or to a server, that nobody answers.

    Attributes:
        owners: for each block the servers that hold it.
        requests, sent: of each server: requests that came to it, and blocks that it has sent to others.
        questions, asked: to the directory, and to servers.
        num_parts: into how many the network is cut; the directory reaches all of them.
    """

    def __init__(self, num_servers: int, capacity: int, policy: str, announced: float = ANNOUNCED, lost: float = 0.0):
        self.owners: dict[bytes, set[int]] = {}
        self.requests, self.sent = [0] * num_servers, [0] * num_servers
        self.questions = self.asked = 0
        self.num_parts = 1
        self._announced, self._lost = announced, lost
        self._picks = random.Random(0)
        self._new = functools.partial(ReplayedPool, capacity, policy)
        self._servers: list[ReplayedPool] = [self._new() for _ in range(num_servers)]
        self._holders = [_Holder(self.owners, nth) for nth in range(num_servers)]
        for server, holder in zip(self._servers, self._holders, strict=True):
            server.pool.observe(holder)

    def restart(self, nth: int) -> None:
        """A server begins again with nothing in its memory."""
        self._holders[nth].ended()
        now_s, self._servers[nth], self._holders[nth] = self._servers[nth].now_s, self._new(), _Holder(self.owners, nth)
        self._servers[nth].now_s = now_s
        self._servers[nth].pool.observe(self._holders[nth])

    def play(
        self,
        requests: Sequence[Request],
        route: Callable[[Fleet, BlockRun], int],
        before: Callable[[Fleet, int], None] = lambda fleet, nth: None,
    ) -> int:
        """Leading blocks that hit, of all requests; `before` each one something may befall the fleet."""
        hits = 0
        for position, request in enumerate(requests):
            before(self, position)
            if request.ids:
                run = run_of(request)
                nth = route(self, run)
                self.requests[nth] += 1
                for server in self._servers:
                    server.now_s = max(server.now_s, request.at_s)
                hits += self._serve(nth, run)
        return hits

    def _serve(self, nth: int, run: BlockRun) -> int:
        server = self._servers[nth]
        leading = server.look(run, 0)
        if self._announced and leading < len(run):
            self._read(nth, run, leading)
        leading = server.look(run, LEASE_MS)
        if leading < len(run):
            server.put(BlockRun(0, run.block_hashes[leading:], run.block_hashes[leading - 1] if leading else b""))
        return leading

    def _read(self, nth: int, run: BlockRun, leading: int) -> None:
        """Reads what follows the leading blocks from other servers, as far as the likeliest have it."""
        missing = run.block_hashes[leading:]
        found: dict[bytes, int] = {}
        for owner in self._likely(nth, missing):
            self.asked += 1
            if self._is_lost() or (owner - nth) % self.num_parts:
                continue
            there = [name for name in missing if name not in found and owner in self.owners.get(name, ())]
            found |= dict.fromkeys(there, owner)
            if there:
                self._servers[owner].look(BlockRun(0, there), LEASE_MS)
        count = next((at for at, name in enumerate(missing) if name not in found), len(missing))
        if count:
            read = missing[:count]
            self._servers[nth].put(BlockRun(0, read, run.block_hashes[leading - 1] if leading else b""))
            for owner, blocks in Counter(found[name] for name in read).items():
                self.sent[owner] += blocks

    def _likely(self, nth: int, missing: Sequence[bytes]) -> list[int]:
        announced = (name for name in missing if zlib.crc32(name) < self._announced * 2**32)
        asked = questioned(announced, needs_prefix=True)
        self.questions += bool(asked)
        if self._is_lost():
            return []
        last = {owner: at for at, name in enumerate(asked) for owner in self.owners.get(name, ()) if owner != nth}
        return sorted(last, key=lambda owner: (-last[owner], self._picks.random()))[:MAX_OWNERS]

    def _is_lost(self) -> bool:
        return self._picks.random() < self._lost


def documents(num_servers: int, num_requests: int) -> list[Request]:
    """Questions about documents, of which some are asked for often (Zipf), behind one prompt that all begin with."""
    picks, count = random.Random(0), DOCUMENTS_A_SERVER * num_servers
    weights = list(itertools.accumulate(1 / (nth + 1) ** ZIPF for nth in range(count)))
    requests, new = [], itertools.count(FIRST_BLOCKS + count * DOCUMENT_BLOCKS)
    for nth in range(num_requests):
        first = FIRST_BLOCKS + bisect.bisect(weights, picks.random() * weights[-1]) * DOCUMENT_BLOCKS
        ids = [*range(FIRST_BLOCKS), *range(first, first + DOCUMENT_BLOCKS), *itertools.islice(new, QUESTION_BLOCKS)]
        requests.append(Request(nth / num_servers, ids))
    return requests


def plain(fleet: Fleet, _: BlockRun) -> int:
    """A load balancer that knows nothing of prefixes."""
    return sum(fleet.requests) % len(fleet.requests)


def aware(fleet: Fleet, run: BlockRun) -> int:
    """A router that knows who has the longest prefix, and takes it if it has half of the prompt.

    Otherwise, and of several, the server with the fewest requests so far. Source: the cache-aware routing of SGLang's
    router, with its threshold.
    """
    everyone = set(range(len(fleet.requests)))
    best, length = everyone, 0
    for name in run.block_hashes:
        if not (having := best & fleet.owners.get(name, set())):
            break
        best, length = having, length + 1
    return min(best if 2 * length > len(run) else everyone, key=fleet.requests.__getitem__)
