"""What requests do with stored blocks: look them up under a lease, record their use, drop them.

`Lookups` stands in the order of a lookup's path: find, slots, get, record_use.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.protocol.namespace import GroupSpec
from kvpool.protocol.types import BlockRun, Located, MissCause, RunHits, ShardRange, Slots, in_parts
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.entry_table import EntryTable
from kvpool_server.cache.holds import Holds
from kvpool_server.cache.leases import NOBODY, Found, Owner
from kvpool_server.cache.namespaces import Namespaces, PoolNamespace
from kvpool_server.cache.placement import Placement
from kvpool_server.cache.steps import LOOKUP_STEP_BLOCKS, STEP_BLOCKS, Steps
from kvpool_server.sharing import Limits

MAX_PROMPT_TOKENS = 1 << 26
"""Counted of one lookup: a client names the tokens of a block, and the sums of all lookups must fit into 64 bits."""


@dataclass(eq=False)
class Lookups:
    """Find blocks, say where they lie, and record their use."""

    _namespaces: Namespaces
    _holds: Holds
    _placement: Placement
    _limits: Limits
    _counters: dict[str, int]
    _expire: Callable[[], float]

    def find(
        self,
        fingerprint: bytes,
        runs: Sequence[BlockRun],
        prefix_only: bool,
        lease_ttl_ms: int = 0,
        owner: Owner = NOBODY,
    ) -> Steps[Found]:
        """The complete entries of some blocks and, with a TTL, a lease on them, whose time begins with the last step.

        Counts nothing yet: call `record_use` or `record_use_on_get` next. Without a TTL nothing is renewed.
        """
        namespace, groups = self._namespaces.groups(fingerprint, runs)
        now = 0.0
        if lease_ttl_ms:
            now = self._expire()  # First: it may evict entries of an extent that is being drained.
            self._namespaces.use(namespace, now)
        entries: list[Entry] = []
        pinned: list[Entry] = []  # Found by earlier steps, and counted as leased between two steps.
        hits: list[RunHits] = []
        spans: list[tuple[Group, int, int]] = []
        room = LOOKUP_STEP_BLOCKS
        lease_id = granted_ms = 0
        try:
            for group, run in zip(groups, runs, strict=True):
                start, at, leading, complete = len(entries), 0, 0, 0
                while at < len(run) and (leading == at or not prefix_only):
                    if not room:
                        if lease_ttl_ms:
                            self._holds.pin(pinned, entries)
                        yield
                        now, room = self._expire() if lease_ttl_ms else now, LOOKUP_STEP_BLOCKS
                    part = run
                    if at or len(run) > room:
                        part = BlockRun(run.group_idx, run.block_hashes[at : at + room])
                    hit = group.hits(part, prefix_only, entries)
                    complete |= hit.complete << at
                    if leading == at:
                        leading += hit.num_leading
                    at += len(part)
                    room -= len(part)
                hits.append(RunHits(leading, complete))
                spans.append((group, start, len(entries)))
            if lease_ttl_ms and entries:
                lease_id, granted_ms = self._holds.lease(entries, len(pinned), lease_ttl_ms, now, owner)
        finally:
            if pinned:
                self._holds.unpin(pinned, is_leased=lease_id != 0)
        asked, hit_tokens = count_tokens(namespace, runs, hits)
        # A lease that ends meanwhile lets its own list of entries go.
        return Found(
            namespace, tuple(hits), sum(map(len, runs)), entries[:], spans, asked, hit_tokens, lease_id, granted_ms
        )

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

    def get(
        self,
        lease_id: int,
        fingerprint: bytes,
        runs: Sequence[BlockRun],
        shards: ShardRange,
        owner: Owner = NOBODY,
    ) -> Steps[Located]:
        """Where leased blocks lie; one that was dropped, or is not leased, is not present.

        Raises LeaseExpiredError unless the lease is live, also when the last step begins.
        """
        namespace, group = self._namespaces.one_group(fingerprint, runs)
        shards.check(group.spec.num_shards)
        self._limits.check_chunks(runs, shards)
        now = self._expire()
        lease = self._holds.leases.live(lease_id, owner, now)
        if lease.unrecorded is not None:
            found, lease.unrecorded = lease.unrecorded, None
            self.record_use(found)
        held = lease.entry_ids
        present: list[bool] = []
        offsets: list[int] = []
        checksums = array("Q")
        first, stop, full_mask = shards.start, shards.start + shards.count, group.full_mask
        start = first * group.spec.chunk_bytes
        for part in in_parts(runs, LOOKUP_STEP_BLOCKS):
            if present:
                yield
                now = self._expire()
                self._holds.leases.live(lease_id, owner, now)
            for entry in group.index.get_all(block_hash for run in part for block_hash in run.block_hashes):
                is_present = entry is not None and entry.present == full_mask and id(entry) in held
                present.append(is_present)
                if is_present:
                    assert entry is not None
                    offsets.append(entry.offset + start)
                    checksums += entry.checksums[first:stop]
        self._counters["get_blocks"] += len(present)
        self._counters["get_present_blocks"] += len(offsets)
        namespace.loaded_bytes += len(offsets) * shards.count * group.spec.chunk_bytes
        remaining_ms = int((lease.deadline - now) * 1000)
        return Located(remaining_ms, tuple(present), tuple(offsets), tuple(checksums))

    def record_use(self, found: Found) -> None:
        """As `touch`, and counts the lookup."""
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
        self.touch(found)

    def touch(self, found: Found) -> None:
        """If a lookup leased its entries, tells the eviction policies of their use."""
        if found.lease_id:
            used = [(group, start, stop) for group, start, stop in found.spans if start < stop and group.num_live]
            stamp = self._placement.next_stamp([group for group, _, _ in used])
            for group, start, stop in used:
                self._placement.evictor(group).used(found.entries[start:stop], stamp)

    def record_use_on_get(self, found: Found) -> None:
        """Has the first get under the lease record a lookup that its client is going to repeat.

        So a repeated lookup counts once: the last time, or an earlier one whose blocks the client loads after all.
        """
        if (lease := self._holds.leases.get(found.lease_id)) is not None:
            lease.unrecorded = found


@dataclass(eq=False)
class Removals:
    """Drop blocks that a client or the server no longer wants, before their time."""

    _namespaces: Namespaces
    _entry_table: EntryTable
    _counters: dict[str, int]
    _expire: Callable[[], float]

    def complete(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> Steps[list[Entry]]:
        """The complete entries of these blocks, as `_find`."""
        entries = yield from self._find(fingerprint, runs)
        return [entry for entry in entries if entry.complete]

    def _find(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> Steps[list[Entry]]:
        """The entries of these blocks, each once; some may have been dropped since."""
        _, group = self._namespaces.one_group(fingerprint, runs)
        self._expire()
        entries: dict[Entry, None] = {}
        for nth, part in enumerate(in_parts(runs, LOOKUP_STEP_BLOCKS)):
            if nth:
                yield
            entries |= dict.fromkeys(group.find(part)[0])
        yield from self._end_clears([group])
        return list(entries)

    def drop_corrupt(self, entries: Sequence[Entry]) -> Steps[int]:
        """Drops entries whose bytes differ from their checksums; returns how many had not been dropped before."""
        dropped = yield from self._entry_table.drop_in_steps(entries, MissCause.CORRUPT)
        self._counters["corrupt_blocks"] += dropped
        return dropped

    def remove(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> Steps[int]:
        """Drops blocks; returns how many were present. Clients that hold a lease on them finish their loads."""
        entries = yield from self._find(fingerprint, runs)
        removed = yield from self._entry_table.drop_in_steps(entries, MissCause.REMOVED)
        self._counters["removed_blocks"] += removed
        return removed

    def clear(self, fingerprint: bytes = b"") -> Steps[int]:
        """Drops every block of a namespace, or of all namespaces; returns how many.

        No lookup finds any of the blocks from the first step on. Blocks that are put meanwhile stay.
        """
        self._expire()
        every = (*self._namespaces.values(), *self._namespaces.closing.values())
        chosen = [self._namespaces.get(fingerprint)] if fingerprint else every
        groups = [group for namespace in chosen for group in namespace.groups]
        yield from self._end_clears(groups)
        removed = sum(group.start_leaving() for group in groups)
        self._counters["removed_blocks"] += removed
        yield from self._end_clears(groups)
        return removed

    def _end_clears(self, groups: Sequence[Group]) -> Steps[None]:
        """Drops what clears under way have left: what a removal has not found must not come back with a restart."""
        while self._entry_table.drop_leaving(groups, STEP_BLOCKS) == STEP_BLOCKS:
            yield


def count_tokens(namespace: PoolNamespace, runs: Sequence[BlockRun], hits: Sequence[RunHits]) -> tuple[int, int]:
    """How many tokens a lookup asked for, and how many of them it found.

    The groups of a model hold the same tokens, so their runs count once: as many tokens as the longest run has, and as
    many found as every group has. Of several runs of one group the first counts: engines append single blocks to the
    runs, to learn whether the pool has what they hold themselves. All pipeline stages are asked for the same tokens:
    the first stage counts them.
    """
    if namespace.spec.pipeline_stage:
        return 0, 0
    if len(runs) == 1:
        (run,), (hit,) = runs, hits
        group = namespace.groups[run.group_idx]
        reach = hit.num_leading if group.needs_prefix else max(hit.num_leading, hit.complete.bit_length())
        return _bounded(len(run.block_hashes) * group.block_tokens), _bounded(reach * group.block_tokens)
    asked, found, counted = 0, sys.maxsize, 0
    for run, hit in zip(runs, hits, strict=True):
        bit = 1 << run.group_idx
        if counted & bit:
            continue
        counted |= bit
        group = namespace.groups[run.group_idx]
        # The blocks of a run up to the last one that a hit can end with.
        reach = hit.num_leading if group.needs_prefix else max(hit.num_leading, hit.complete.bit_length())
        if (tokens := len(run.block_hashes) * group.block_tokens) > asked:
            asked = tokens
        if (tokens := reach * group.block_tokens) < found:
            found = tokens
    return _bounded(asked), _bounded(found)


def _bounded(tokens: int) -> int:
    return min(tokens, MAX_PROMPT_TOKENS)


def usable_tokens(groups: Sequence[GroupSpec], runs: Sequence[BlockRun], hits: Sequence[RunHits]) -> int:
    """The longest prefix that an engine could resume, in tokens; 0 if a group has no run.

    A hit ends at a boundary: a number of tokens at which every group has the blocks that a hit needs. The rule of a
    kind is `GroupSpec.hit_blocks`. A kind whose rule the server does not know needs all blocks of the prefix.

    Args:
        groups: all of a namespace.
        runs: of one prompt, from its first token on; of several runs of a group the first counts.
        hits: one a run, with the bitmap of all complete blocks.
    """
    found = {run.group_idx: (len(run), hit) for run, hit in reversed(list(zip(runs, hits, strict=True)))}
    if len(found) < len(groups):
        return 0
    alignment = math.lcm(*(group.block_tokens for group in groups))
    most = min(found[idx][0] * group.block_tokens for idx, group in enumerate(groups))
    for idx, group in enumerate(groups):
        if not group.hit_blocks:
            most = min(most, found[idx][1].num_leading * group.block_tokens)
    boundaries = np.arange(most // alignment * alignment, 0, -alignment)
    are_usable = np.ones(len(boundaries), np.bool_)
    for idx, group in enumerate(groups):
        if group.hit_blocks and len(boundaries):
            ends = boundaries // group.block_tokens
            count, hit = found[idx]
            are_usable &= _run_lengths(hit.complete, count)[ends - 1] >= np.minimum(group.hit_blocks, ends)
    return int(boundaries[are_usable.argmax()]) if are_usable.any() else 0


def _run_lengths(complete: int, count: int) -> npt.NDArray[np.int64]:
    """How many blocks without a gap end at each of `count` blocks."""
    packed = np.frombuffer(complete.to_bytes(-(-count // 8), "little"), np.uint8)
    bits = np.unpackbits(packed, count=count, bitorder="little")
    nth = np.arange(1, count + 1)
    return nth - np.maximum.accumulate(np.where(bits, 0, nth))
