"""The pool: a synchronous state machine over entries, leases and tickets. It decides; its callers move the bytes.

The pool answers requests; `entry_table` keeps the entries, `placement` their slots. The file stands in the order of its
paths: lookup; put_start, put_end, put_revoke; get, release; verify, remove, clear.
Clock, ids and arena come from outside, so that a simulation can drive it. Not thread-safe: one event loop owns it.

Invariants (`check_integrity`):
- free + reserved + resident + quarantined slots = capacity.
- An entry is readable only when every shard has been covered by a put_end.
- A slot is freed only when no lease covers its entry, no ticket, nor the grace after one, lets anybody write to it, and
  no transfer of a lease or ticket that has ended is under way.
- A call that raises has changed nothing, except that holds may have expired and its namespace counts as used.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from kvpool.errors import InvalidRequestError, OutOfSpaceError
from kvpool.hashing import checksum
from kvpool.holdings import NamespaceInfo
from kvpool.namespace import NamespaceSpec
from kvpool.types import (
    BlockRun,
    Located,
    Lookup,
    PoolStats,
    PutGrant,
    PutReceipt,
    PutStatus,
    Quota,
    RunHits,
    ShardRange,
    Slots,
)
from kvpool_server.cache.allocator.arena import Arena
from kvpool_server.cache.allocator.placement import NoRoomError, Placement
from kvpool_server.cache.counters import COUNTERS
from kvpool_server.cache.entry import Entry, Group, Observer
from kvpool_server.cache.entry_table import EntryTable, Quarantine
from kvpool_server.cache.eviction import DEFAULT_POLICY, POLICIES, Policy
from kvpool_server.cache.holders import describe_holders
from kvpool_server.cache.integrity import check_holds, check_prefixes, check_slots
from kvpool_server.cache.leases import Found, Hold, HoldTable, Lease, Ticket
from kvpool_server.cache.limits import Limits
from kvpool_server.cache.namespaces import Namespaces, PoolNamespace
from kvpool_server.cache.quotas import Quotas
from kvpool_server.cache.transfers import NoTransfers, Transfers, UnfinishedHolds

Read = Callable[[int, int], Any]
"""(offset, nbytes) -> the arena's bytes there, as a contiguous buffer."""


class Pool:
    """See the module.

    Args:
        clock: monotonic seconds.
        new_id: unguessable 63-bit ids, never 0, never repeated within a ticket's life, also across restarts.
        policy: makes an eviction policy, for each slot size and each set of quotas.
        transfers: those of the data port; none by default.

    Attributes:
        placement: where entries lie, and which are evicted.
        leases, tickets: the live ones.
    """

    def __init__(
        self,
        arena: Arena,
        clock: Callable[[], float],
        new_id: Callable[[], int],
        limits: Limits | None = None,
        policy: Callable[[], Policy] = POLICIES[DEFAULT_POLICY],
        transfers: Transfers | None = None,
    ):
        self.arena = arena
        self.limits = limits or Limits()
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.new_id = new_id
        self.placement = Placement(arena, policy, self.counters)
        self._quarantine = Quarantine()
        self.entry_table = EntryTable(
            arena, self.placement, self._quarantine, clock, self.limits.grace_ms, self.counters
        )
        self.leases: HoldTable[Lease] = HoldTable("lease", "look up again")
        self.tickets: HoldTable[Ticket] = HoldTable("ticket", "put_start again")
        self._unfinished = UnfinishedHolds(transfers or NoTransfers())
        self._clock = clock
        self._namespaces = Namespaces(self.limits, arena.extent_bytes)
        self._quotas = Quotas(self.limits.max_quotas)

    def observe(self, observer: Observer) -> None:
        """Tells an observer of every block that becomes readable, or stops being readable, from now on."""
        self.entry_table.observe(observer)

    def open_namespace(
        self, spec: NamespaceSpec, expected_fingerprint: bytes = b"", opener: str = ""
    ) -> tuple[PoolNamespace, bool]:
        """The namespace of a spec, and whether this call opened it.

        Args:
            opener: host of the client.

        Raises:
            InvalidRequestError: the spec is malformed, or a block of it does not fit an extent of the arena.
            IncompatibleNamespaceError: the spec's fingerprint is not the expected one.
        """
        namespace, created = self._namespaces.open(spec, expected_fingerprint, self._clock(), opener)
        if created:
            self._assign_quotas([namespace])
        if (surplus := self._namespaces.pop_surplus()) is not None:
            self.expire()
            for entry in surplus.entries():
                self.entry_table.drop(entry)
            self.placement.remove(surplus.groups)
        self._mark_used(namespace, self._clock())
        for older in self._namespaces.superseded(namespace):
            older.superseded = True
            self.placement.mark_superseded(older.groups)
        return namespace, created

    def _mark_used(self, namespace: PoolNamespace, now: float) -> None:
        """An engine uses the namespace: it is not superseded, whatever was opened after it."""
        namespace.used_at = now
        if namespace.superseded:
            namespace.superseded = False
            self.placement.unmark_superseded(namespace.groups)

    def namespaces(self, holdings: bool = True) -> list[NamespaceInfo]:
        """Every open namespace. With `holdings`, which visits every entry, also what each holds."""
        now = self._clock()
        return [namespace.info(now, holdings) for namespace in self._namespaces.values()]

    @property
    def num_opened(self) -> int:
        return self._namespaces.num_opened

    def open_namespaces(self) -> list[PoolNamespace]:
        return self._namespaces.values()

    def namespace(self, fingerprint: bytes) -> PoolNamespace | None:
        return self._namespaces.find(fingerprint)

    def chunk_bytes(self, fingerprint: bytes, run: BlockRun) -> int:
        return self._namespaces.group(fingerprint, run.group_idx).spec.chunk_bytes

    def slot_bytes(self, fingerprint: bytes, run: BlockRun) -> int:
        return self._namespaces.group(fingerprint, run.group_idx).spec.slot_bytes

    def quotas(self) -> list[Quota]:
        """All quotas and their usage, by subject."""
        return self._quotas.usage()

    def set_quotas(self, quotas: Sequence[Quota]) -> None:
        """Sets quotas, deletes those whose limit is 0 bytes, and evicts what exceeds them; see `rebalance`.

        Raises InvalidRequestError if a quota cannot be set; nothing has changed then.
        """
        self._quotas.set(quotas)
        self._assign_quotas(self._namespaces.values())
        self.rebalance()

    def _assign_quotas(self, namespaces: Sequence[PoolNamespace]) -> None:
        """Tells the placement which quotas cover each group of these namespaces."""
        covering = [(each.groups, self._quotas.covering(each.spec.tenant, each.fingerprint)) for each in namespaces]
        self.placement.assign_quotas((group, accounts) for groups, accounts in covering for group in groups)

    def rebalance(self) -> None:
        """Evicts what exceeds a quota, and starts to drain an extent for a slot size below its share.

        Call it often: entries that are leased or being written stay until a later call.
        """
        now = self.expire()
        self.entry_table.evict(self.placement.over_quota(self._quotas.accounts()))
        self.entry_table.evict(self.placement.start_drain(now))

    def lookup(
        self, fingerprint: bytes, runs: Sequence[BlockRun], *, prefix_only: bool, lease_ttl_ms: int = 0
    ) -> Lookup:
        """Which blocks are complete. With a TTL, leases them, which is a use; without one renews nothing."""
        found = self.find(fingerprint, runs, prefix_only=prefix_only, lease_ttl_ms=lease_ttl_ms)
        self.record_use(found)
        return Lookup(found.hits, found.lease_id, found.lease_ttl_ms)

    def find(self, fingerprint: bytes, runs: Sequence[BlockRun], *, prefix_only: bool, lease_ttl_ms: int = 0) -> Found:
        """As `lookup`, without recording it: call `record_use` or `record_use_on_get` next."""
        namespace, groups = self._namespaces.groups(fingerprint, runs)
        now = self.expire() if lease_ttl_ms else 0.0  # First: it may evict entries of an extent that is being drained.
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
            self._mark_used(namespace, now)
            if entries:
                lease_id, granted_ms = self._lease(entries, lease_ttl_ms, now)
        return Found(namespace, tuple(hits), num_blocks, entries, spans, lease_id, granted_ms)

    def _lease(self, entries: list[Entry], ttl_ms: int, now: float) -> tuple[int, int]:
        """Leases entries; returns the lease's id and TTL, both 0 if there are too many leases."""
        if len(self.leases) >= self.limits.max_leases:
            self.counters["refused_leases"] += 1
            return 0, 0
        ttl_ms = min(ttl_ms, self.limits.max_ttl_ms)
        lease = Lease(self.new_id(), now + ttl_ms / 1000, entries)
        self.leases.add(lease)
        for entry in entries:
            entry.leases += 1
        return lease.id, ttl_ms

    def slots(self, found: Found) -> tuple[Slots, ...]:
        """Where the entries of a lookup lie, for each of its runs; valid while they are leased. Without permits."""
        located = []
        for _, start, stop in found.spans:
            entries = found.entries[start:stop]
            offsets = array("Q", [entry.offset for entry in entries])
            located.append(Slots(offsets.tobytes(), b"".join([entry.checksums for entry in entries])))
        self.counters["located_blocks"] += len(found.entries)
        return tuple(located)

    def record_use(self, found: Found) -> None:
        """Counts a lookup and, if it leased its entries, tells the eviction policies of their use."""
        num_hits = len(found.entries)
        found.namespace.lookup_blocks += found.num_blocks
        found.namespace.lookup_hits += num_hits
        self.counters["lookups"] += 1
        self.counters["lookup_blocks"] += found.num_blocks
        self.counters["lookup_hits"] += num_hits
        if found.lease_id:
            stamp = self.placement.next_stamp([group for group, _, _ in found.spans])
            for group, start, stop in found.spans:
                self.placement.evictor(group).used(found.entries[start:stop], stamp)

    def record_use_on_get(self, found: Found) -> None:
        """Has the first get under the lease record a lookup; for one that its client is going to repeat.

        So a lookup counts once however often it is repeated: the last repetition counts, or an earlier one whose blocks
        the client loads after all.
        """
        if (lease := self.leases.get(found.lease_id)) is not None:
            lease.unrecorded = found

    def put_start(
        self, fingerprint: bytes, runs: Sequence[BlockRun], shards: ShardRange, ticket_ttl_ms: int = 0
    ) -> PutGrant:
        """Reserves the shards of every block that is neither present nor being written.

        Raises OutOfSpaceError if there are too few slots for all of them; nothing has changed then.
        """
        ttl_ms = min(ticket_ttl_ms or self.limits.default_ticket_ttl_ms, self.limits.max_ttl_ms)
        ticket, statuses = self.reserve(fingerprint, runs, shards, ttl_ms / 1000)
        self.counters["put_granted_blocks"] += len(ticket.entries)
        self.counters["put_present_blocks"] += statuses.count(PutStatus.PRESENT)
        self.counters["put_busy_blocks"] += statuses.count(PutStatus.BUSY)
        if not ticket.entries:
            return PutGrant(0, 0, tuple(statuses), ())
        start = shards.start * ticket.entries[0].group.spec.chunk_bytes
        return PutGrant(ticket.id, ttl_ms, tuple(statuses), tuple(entry.offset + start for entry in ticket.entries))

    def reserve(
        self, fingerprint: bytes, runs: Sequence[BlockRun], shards: ShardRange, ttl_s: float
    ) -> tuple[Ticket, list[PutStatus]]:
        """As `put_start`, uncounted. Returns a ticket, which is live if it covers any block, and each block's status.

        Args:
            ttl_s: `math.inf`: the caller, in this process, is certain to end the ticket.
        """
        namespace, group = self._namespaces.one_group(fingerprint, runs)
        shards.check(group.spec.num_shards)
        now = self.expire()
        self._mark_used(namespace, now)
        if len(self.tickets) >= self.limits.max_tickets:
            raise OutOfSpaceError(f"{len(self.tickets)} puts are under way, which is the limit; try again later")
        ticket = Ticket(self.new_id(), now + ttl_s, [], shards)
        try:
            statuses = self.entry_table.reserve(group, runs, ticket)
        except NoRoomError as error:
            leases, tickets = self.leases.values(), self.tickets.values()
            holders = describe_holders(leases, tickets, self._unfinished, self._quarantine, now, error.account)
            raise error.because(holders) from None
        if ticket.entries:
            self.tickets.add(ticket)
        return ticket, statuses

    def put_end(self, ticket_id: int, checksums: Sequence[int]) -> PutReceipt:
        """Commits the blocks that a ticket covers; none of them if bytes are still being written under the ticket.

        Args:
            checksums: xxh3-64 of each chunk: entries x shards, entry-major.

        Raises:
            LeaseExpiredError: the ticket is not live.
            InvalidRequestError: there is not one checksum for each chunk; the ticket stays live.
        """
        self.expire()
        ticket = self.tickets.live(ticket_id)
        count = ticket.shards.count
        if len(checksums) != len(ticket.entries) * count:
            raise InvalidRequestError(
                f"put_end has {len(checksums)} checksums; the ticket covers {len(ticket.entries)} blocks "
                f"x {count} shards"
            )
        self.tickets.pop(ticket_id)
        if not self._end_ticket(ticket):
            self._abandon(ticket)
            return PutReceipt(0, 0)
        committed = completed = 0
        for idx, entry in enumerate(ticket.entries):
            committed += self.entry_table.commit(entry, ticket, checksums[idx * count : (idx + 1) * count])
            completed += entry.live and entry.complete
        self.counters["put_completed_blocks"] += completed
        return PutReceipt(committed, completed)

    def put_revoke(self, ticket_id: int) -> bool:
        """Ends a ticket whose writer has stopped writing, without committing; False if it was not live."""
        self.expire()
        ticket = self.tickets.pop(ticket_id)
        if ticket is None:
            return False
        self.counters["revoked_tickets"] += 1
        if not self._end_ticket(ticket):
            self._abandon(ticket)
            return True
        for entry in ticket.entries:
            self.entry_table.revoke(entry, ticket)
        return True

    def writable(self, ticket_id: int, offset: int, nbytes: int) -> None:
        """Raises unless a live ticket covers [offset, offset + nbytes)."""
        self.expire()
        ticket = self.tickets.live(ticket_id)
        entry = self.arena.owner(offset)
        if entry is not None and entry.live and ticket.covers(entry):
            chunk_bytes = entry.group.spec.chunk_bytes
            start = entry.offset + ticket.shards.start * chunk_bytes
            if start <= offset and offset + nbytes <= start + ticket.shards.count * chunk_bytes:
                return
        raise InvalidRequestError(f"[{offset}, {offset + nbytes}) is in no region of ticket {ticket_id:#x}")

    def get(self, lease_id: int, fingerprint: bytes, runs: Sequence[BlockRun], shards: ShardRange) -> Located:
        """Where leased blocks lie; one that was dropped, or is not leased, is not present. Raises LeaseExpiredError."""
        _, group = self._namespaces.one_group(fingerprint, runs)
        shards.check(group.spec.num_shards)
        now = self.expire()
        lease = self.leases.live(lease_id)
        if lease.unrecorded is not None:
            found, lease.unrecorded = lease.unrecorded, None
            self.record_use(found)
        held = lease.entry_ids
        present: list[bool] = []
        offsets: list[int] = []
        checksums = array("Q")
        first, stop, full_mask = shards.start, shards.start + shards.count, group.full_mask
        start = first * group.spec.chunk_bytes
        for entry in map(group.index.get, (block_hash for run in runs for block_hash in run.block_hashes)):
            is_present = entry is not None and entry.present == full_mask and id(entry) in held
            present.append(is_present)
            if is_present:
                assert entry is not None
                offsets.append(entry.offset + start)
                checksums += entry.checksums[first:stop]
        self.counters["get_blocks"] += len(present)
        self.counters["get_present_blocks"] += len(offsets)
        remaining_ms = int((lease.deadline - now) * 1000)
        return Located(remaining_ms, tuple(present), tuple(offsets), tuple(checksums))

    def readable(self, lease_id: int, offset: int, nbytes: int) -> None:
        """Raises unless a live lease covers [offset, offset + nbytes)."""
        self.expire()
        lease = self.leases.live(lease_id)
        entry = self.arena.owner(offset)
        if entry is None or not lease.covers(entry) or offset + nbytes > entry.offset + entry.group.spec.slot_bytes:
            raise InvalidRequestError(f"[{offset}, {offset + nbytes}) is in no block of lease {lease_id:#x}")

    def release(self, lease_ids: Sequence[int]) -> int:
        """Ends leases; returns how many were live."""
        self.expire()
        released = 0
        for lease_id in lease_ids:
            if (lease := self.leases.pop(lease_id)) is not None:
                self._end_lease(lease)
                released += 1
        return released

    def verify(self, fingerprint: bytes, runs: Sequence[BlockRun], read: Read) -> tuple[int, int]:
        """Recomputes the checksums of complete blocks, and drops those that differ; returns (checked, dropped)."""
        _, group = self._namespaces.one_group(fingerprint, runs)
        self.expire()
        checked = dropped = 0
        entries, _ = group.find(runs)
        for entry in entries:
            if not entry.complete:
                continue
            checked += 1
            size = group.spec.chunk_bytes
            if any(
                checksum(read(entry.offset + shard * size, size)) != expected
                for shard, expected in enumerate(entry.checksums)
            ):
                self.entry_table.drop(entry)
                dropped += 1
        self.counters["corrupt_blocks"] += dropped
        return checked, dropped

    def remove(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> int:
        """Drops blocks; returns how many were present. Clients that hold a lease on them finish their loads."""
        _, group = self._namespaces.one_group(fingerprint, runs)
        self.expire()
        entries, _ = group.find(runs)
        for entry in entries:
            self.entry_table.drop(entry)
        self.counters["removed_blocks"] += len(entries)
        return len(entries)

    def clear(self, fingerprint: bytes = b"") -> int:
        """Drops every block of a namespace, or of all namespaces; returns how many."""
        self.expire()
        chosen = [self._namespaces.get(fingerprint)] if fingerprint else self._namespaces.values()
        entries = [entry for namespace in chosen for entry in namespace.entries()]
        for entry in entries:
            self.entry_table.drop(entry)
        self.counters["removed_blocks"] += len(entries)
        return len(entries)

    def expire(self) -> float:
        """Ends leases, tickets and quarantines whose deadline has come; returns the time. Cheap when there is none."""
        now = self._clock()
        while (lease := self.leases.pop_expired(now)) is not None:
            self.counters["expired_leases"] += 1
            self._end_lease(lease)
        for hold in self._unfinished.pop_finished():
            self._unpin(hold)
        while (ticket := self.tickets.pop_expired(now)) is not None:
            self.counters["expired_tickets"] += 1
            self._end_ticket(ticket)
            for entry in ticket.entries:
                self.entry_table.expire(entry, ticket)
        self.entry_table.free_expired(now)
        return now

    def stats(self, prefaulted_bytes: int = 0) -> PoolStats:
        return PoolStats(
            arena_bytes=self.arena.arena_bytes,
            free_bytes=self.arena.arena_bytes - self.arena.used_bytes,
            prefaulted_bytes=prefaulted_bytes,
            num_entries=self.entry_table.num_complete,
            num_incomplete=self.entry_table.num_live - self.entry_table.num_complete,
            num_quarantined=len(self._quarantine),
            num_leases=len(self.leases),
            num_tickets=len(self.tickets),
            counters=dict(self.counters),
        )

    def check_integrity(self) -> None:
        """Recomputes the invariants from scratch; raises AssertionError. For tests: it visits every slot."""
        entries = [entry for namespace in self._namespaces.values() for entry in namespace.entries()]
        entry_table = self.entry_table
        quarantined = self._quarantine.by_offset()
        check_slots(self.arena, entries, quarantined)
        leases = [*self.leases.values(), *self._unfinished]
        check_holds(entries, list(quarantined.values()), leases, self.tickets.values())
        check_prefixes(entries)
        assert len(entries) == entry_table.num_live, "the count of entries is off"
        assert sum(entry.complete for entry in entries) == entry_table.num_complete, "the count of the complete is off"

    def _end_lease(self, lease: Lease) -> None:
        if self._unfinished.end(lease):
            self._unpin(lease)

    def _end_ticket(self, ticket: Ticket) -> bool:
        """Ends a ticket's permits. False if bytes are being written under one: its entries stay pinned meanwhile."""
        if self._unfinished.end(ticket):
            return True
        for entry in ticket.entries:
            entry.leases += 1
        return False

    def _abandon(self, ticket: Ticket) -> None:
        """Drops the entries of an unfinished ticket: else another writer could get their shards while bytes arrive."""
        for entry in ticket.entries:
            self.entry_table.abandon(entry, ticket, 0.0)

    def _unpin(self, hold: Hold) -> None:
        for entry in hold.entries:
            entry.leases -= 1
            if not entry.live:
                self.entry_table.free_if_unheld(entry)
