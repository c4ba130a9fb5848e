"""Lookups: which blocks of a request are complete, a lease on them, where they lie, and the record of their use.

The file stands in the order of a lookup's path: find, slots, record_use. Not thread-safe: the pool's event loop owns
it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence

from kvpool.types import BlockRun, RunHits, Slots
from kvpool_server.cache.allocator.placement import Placement
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.holds import Holds
from kvpool_server.cache.leases import Found, Owner
from kvpool_server.cache.namespaces import Namespaces
from kvpool_server.cache.steps import LOOKUP_STEP_BLOCKS, Steps


class Lookups:
    """See the module."""

    def __init__(self, namespaces: Namespaces, holds: Holds, placement: Placement, counters: dict[str, int]):
        self._namespaces = namespaces
        self._holds = holds
        self._placement = placement
        self._counters = counters

    def find(
        self,
        fingerprint: bytes,
        runs: Sequence[BlockRun],
        prefix_only: bool,
        lease_ttl_ms: int,
        owner: Owner,
        now: float,
    ) -> Found:
        """The complete entries of some blocks, and with a TTL a lease on them. Counts nothing yet."""
        namespace, groups = self._namespaces.groups_of_lookup(fingerprint, runs)
        entries: list[Entry] = []
        hits: list[RunHits] = []
        spans: list[tuple[Group, int, int]] = []
        num_blocks = 0
        for group, run in zip(groups, runs, strict=True):
            start = len(entries)
            hits.append(group.hits(run, prefix_only, entries))
            spans.append((group, start, len(entries)))
            num_blocks += len(run)
        lease_id = granted_ms = 0
        if lease_ttl_ms:
            self._namespaces.use(namespace, now)
            if entries:
                lease_id, granted_ms = self._holds.lease(entries, lease_ttl_ms, now, owner)
                if lease_id:
                    for entry in entries:
                        entry.leases += 1
        asked, hit_tokens = count_tokens(groups, runs, hits)
        return Found(namespace, tuple(hits), num_blocks, entries, spans, asked, hit_tokens, lease_id, granted_ms)

    def find_in_steps(
        self,
        fingerprint: bytes,
        runs: Sequence[BlockRun],
        prefix_only: bool,
        lease_ttl_ms: int,
        owner: Owner,
        expire: Callable[[], float],
    ) -> Steps[Found]:
        """As `find`. Each step leases what it finds; the lease's time begins with the last step.

        Args:
            expire: `Pool.expire`.
        """
        namespace, groups = self._namespaces.groups_of_lookup(fingerprint, runs)
        entries: list[Entry] = []
        if lease_ttl_ms:
            self._namespaces.use(namespace, expire())
            self._holds.leasing.append(entries)
        hits: list[RunHits] = []
        spans: list[tuple[Group, int, int]] = []
        lease_id = granted_ms = 0
        try:
            for group, run in zip(groups, runs, strict=True):
                start, leading, complete = len(entries), 0, 0
                for at in range(0, len(run), LOOKUP_STEP_BLOCKS):
                    if prefix_only and leading < at:
                        break
                    part = BlockRun(run.group_idx, run.block_hashes[at : at + LOOKUP_STEP_BLOCKS])
                    found: list[Entry] = []
                    hit = group.hits(part, prefix_only, found)
                    if lease_ttl_ms:
                        for entry in found:
                            entry.leases += 1
                    entries += found
                    complete |= hit.complete << at
                    if leading == at:
                        leading += hit.num_leading
                    yield
                hits.append(RunHits(leading, complete))
                spans.append((group, start, len(entries)))
            if lease_ttl_ms and entries:
                lease_id, granted_ms = self._holds.lease(entries, lease_ttl_ms, expire(), owner)
        finally:
            if lease_ttl_ms:
                self._holds.end_leasing(entries, is_leased=lease_id != 0)
        asked, hit_tokens = count_tokens(groups, runs, hits)
        num_blocks = sum(map(len, runs))
        # A lease that ends meanwhile lets its own list of entries go.
        return Found(namespace, tuple(hits), num_blocks, list(entries), spans, asked, hit_tokens, lease_id, granted_ms)

    def slots(self, found: Found) -> tuple[Slots, ...]:
        """Where the entries of a lookup lie, for each of its runs; valid while they are leased. Without permits."""
        located = []
        nbytes = 0
        for group, start, stop in found.spans:
            entries = found.entries[start:stop]
            nbytes += len(entries) * group.slot_class[1]
            offsets = array("Q", [entry.offset for entry in entries])
            located.append(Slots(offsets.tobytes(), b"".join([entry.checksums for entry in entries])))
        self._counters["located_blocks"] += len(found.entries)
        found.namespace.loaded_bytes += nbytes
        return tuple(located)

    def record_use(self, found: Found) -> None:
        """Counts a lookup and, if it leased its entries, tells the eviction policies of their use."""
        num_hits = len(found.entries)
        namespace = found.namespace
        namespace.lookup_blocks += found.num_blocks
        namespace.lookup_hits += num_hits
        namespace.lookup_tokens += found.lookup_tokens
        namespace.hit_tokens += found.hit_tokens
        self._counters["lookups"] += 1
        if not namespace.is_measurement:
            self._counters["lookup_blocks"] += found.num_blocks
            self._counters["lookup_hits"] += num_hits
        if found.lease_id:
            stamp = self._placement.next_stamp([group for group, _, _ in found.spans])
            for group, start, stop in found.spans:
                self._placement.evictor(group).used(found.entries[start:stop], stamp)

    def record_use_on_get(self, found: Found) -> None:
        """Has the first get under the lease record a lookup; for one that its client is going to repeat.

        So a lookup counts once however often it is repeated: the last repetition counts, or an earlier one whose blocks
        the client loads after all.
        """
        if (lease := self._holds.leases.get(found.lease_id)) is not None:
            lease.unrecorded = found


def count_tokens(groups: Sequence[Group], runs: Sequence[BlockRun], hits: Sequence[RunHits]) -> tuple[int, int]:
    """How many tokens a lookup asked for, and how many of them it found.

    The groups of a model hold the same tokens, so their runs count once: as many tokens as the longest run has, and as
    many found as every group has. Of several runs of one group the first counts: engines append single blocks to the
    runs, to learn whether the pool has what they hold themselves.
    """
    if len(runs) == 1:
        (run,), (group,), (hit,) = runs, groups, hits
        reach = hit.num_leading if group.needs_prefix else max(hit.num_leading, hit.complete.bit_length())
        return len(run.block_hashes) * group.block_tokens, reach * group.block_tokens
    asked, found, counted = 0, sys.maxsize, 0
    for run, group, hit in zip(runs, groups, hits, strict=True):
        bit = 1 << group.idx
        if counted & bit:
            continue
        counted |= bit
        # The blocks of a run up to the last one that a hit can end with.
        reach = hit.num_leading if group.needs_prefix else max(hit.num_leading, hit.complete.bit_length())
        if (tokens := len(run.block_hashes) * group.block_tokens) > asked:
            asked = tokens
        if (tokens := reach * group.block_tokens) < found:
            found = tokens
    return asked, found
