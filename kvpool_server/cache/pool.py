"""The pool: a synchronous state machine over entries, leases and tickets. It decides; its callers move bytes.

It answers requests; where entries lie, how they come and how they go is in `residents`. The file stands in the order of
its paths: lookup; put_start, put_end, put_revoke; get, release; verify, remove, clear.
Clock, ids and arena come from outside, so a simulation can drive it. Not thread-safe: one event loop owns it.

Invariants (`check_integrity`):
- free + reserved + resident + quarantined slots = capacity.
- An entry is readable only when every shard has been covered by a put_end.
- A slot is free again only when no lease covers it and no ticket, nor the grace after one, could still write to it.
- A call that raises has changed nothing, but for what had expired before it; and its namespace has been used.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvpool.errors import InvalidRequestError, LeaseExpiredError, OutOfSpaceError
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
)
from kvpool_server.cache.allocator.arena import Arena
from kvpool_server.cache.allocator.placement import NoRoomError
from kvpool_server.cache.below import Below
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.entry_table import EntryTable
from kvpool_server.cache.eviction import DEFAULT_POLICY, POLICIES, Policy
from kvpool_server.cache.holders import Holders
from kvpool_server.cache.integrity import check_holdings, check_prefixes, check_slots
from kvpool_server.cache.leases import Lease, Register, Seen, Ticket
from kvpool_server.cache.limits import Limits
from kvpool_server.cache.namespaces import Namespace, Namespaces
from kvpool_server.cache.quotas import Accounts

Read = Callable[[int, int], Any]
"""(offset, nbytes) -> the arena's bytes there, as a contiguous buffer."""


class Pool:
    """See the module.

    Args:
        arena: slots to give out.
        clock: monotonic seconds.
        new_id: unguessable 63-bit ids, never 0, never repeated within a ticket's life, also across restarts.
        policy: makes what decides who goes, for each slot size and each set of quotas.

    Attributes:
        below: hears what lookups miss, and may bring it up.
        new_id: as given.
        entry_table: its entries.
        leases, tickets: who may read them, and write them, now.
    """

    def __init__(
        self,
        arena: Arena,
        clock: Callable[[], float],
        new_id: Callable[[], int],
        limits: Limits | None = None,
        policy: Callable[[], Policy] = POLICIES[DEFAULT_POLICY],
    ):
        self.arena = arena
        self.limits = limits or Limits()
        self.counters: Counter[str] = Counter()
        self.below = Below()
        self.new_id = new_id
        self.entry_table = EntryTable(arena, clock, self.limits.grace_ms, policy, self.counters)
        self.leases: Register[Lease] = Register()
        self.tickets: Register[Ticket] = Register()
        self._clock = clock
        self._namespaces = Namespaces(self.limits, arena.extent_bytes)
        self._accounts = Accounts(self.limits.max_quotas)

    # Namespaces

    def open_namespace(
        self, spec: NamespaceSpec, expected_fingerprint: bytes = b"", opener: str = ""
    ) -> tuple[Namespace, bool]:
        """The namespace of a spec, and whether it is new here.

        Args:
            opener: host of the client.

        Raises:
            InvalidRequestError: the spec cannot name one, or its slots do not fit the arena.
            IncompatibleNamespaceError: it is not the expected one.
        """
        namespace, created = self._namespaces.open(spec, expected_fingerprint, self._clock(), opener)
        if created:
            self._place([namespace])
        if (surplus := self._namespaces.pop_surplus()) is not None:
            self.expire()
            for entry in surplus.entries():
                self.entry_table.drop(entry)
            self.entry_table.placement.remove(surplus.groups)
        self._used(namespace, self._clock())
        for older in self._namespaces.superseded(namespace):
            older.superseded = True
            self.entry_table.placement.superseded.add(older.groups)
        return namespace, created

    def _used(self, namespace: Namespace, now: float) -> None:
        """An engine needs it: whatever took its place, it is not superseded."""
        namespace.used_at = now
        if namespace.superseded:
            namespace.superseded = False
            self.entry_table.placement.superseded.remove(namespace.groups)

    def namespaces(self, holdings: bool = True) -> list[NamespaceInfo]:
        """Every open namespace, and what it holds: to count that is to look at every entry."""
        now = self._clock()
        return [namespace.info(now, holdings) for namespace in self._namespaces.values()]

    @property
    def num_opened(self) -> int:
        """Namespaces that were opened since the start."""
        return self._namespaces.num_opened

    def open_namespaces(self) -> list[Namespace]:
        return self._namespaces.values()

    def namespace(self, fingerprint: bytes) -> Namespace | None:
        """An open namespace; to ask for it is no use of it."""
        return self._namespaces.find(fingerprint)

    def chunk_bytes(self, fingerprint: bytes, run: BlockRun) -> int:
        """Bytes of one chunk of a run's group."""
        return self._namespaces.group(fingerprint, run.group_idx).spec.chunk_bytes

    # Quotas

    def quotas(self) -> list[Quota]:
        """All there are, by subject."""
        return self._accounts.quotas()

    def set_quotas(self, quotas: Sequence[Quota]) -> None:
        """Bounds what subjects may hold; those of 0 bytes are taken away. What is too much is evicted, see `settle`.

        Raises:
            InvalidRequestError: one of them cannot be set; none is.
        """
        self._accounts.set(quotas)
        self._place(self._namespaces.values())
        self.settle()

    def _place(self, namespaces: Sequence[Namespace]) -> None:
        """Puts namespaces' groups under the quotas that there are."""
        under = [(each.groups, self._accounts.of(each.spec.tenant, each.fingerprint)) for each in namespaces]
        self.entry_table.placement.place((group, accounts) for groups, accounts in under for group in groups)

    def settle(self) -> None:
        """Evicts what subjects hold beyond their quotas, and what keeps a slot size from its share. To be called often:
        what is leased or being written stays until it is not."""
        now = self.expire()
        self.entry_table.evict(self.entry_table.placement.surplus(self._accounts.values()))
        self.entry_table.evict(self.entry_table.placement.vacate(now))

    # Lookup

    def lookup(
        self, fingerprint: bytes, runs: Sequence[BlockRun], *, prefix_only: bool, lease_ttl_ms: int = 0
    ) -> Lookup:
        """Which blocks are complete; with a TTL, a lease on them. Without one nothing is renewed."""
        namespace, groups = self._namespaces.groups(fingerprint, runs)
        now = self.expire() if lease_ttl_ms else 0.0  # Before anything is found that might go with it.
        found: list[Entry] = []
        hits: list[RunHits] = []
        stops: list[int] = []
        for group, run in zip(groups, runs, strict=True):
            hits.append(group.hits(run, prefix_only, found))
            stops.append(len(found))
        told, retry_after_ms = self.below.want(namespace, runs, hits, prefix_only) if lease_ttl_ms else (tuple(hits), 0)
        seen = Seen(namespace, sum(map(len, runs)), len(found), list(zip(groups, [0, *stops], stops, strict=False)))
        if not retry_after_ms:
            self._count(seen)
        if not lease_ttl_ms:
            return Lookup(told)
        self._used(namespace, now)
        if not found:
            return Lookup(told, retry_after_ms=retry_after_ms)
        if len(self.leases) >= self.limits.max_leases:
            self.counters["refused_leases"] += 1
            return Lookup(told, retry_after_ms=retry_after_ms)
        ttl_ms = min(lease_ttl_ms, self.limits.max_ttl_ms)
        lease = Lease(self.new_id(), now + ttl_ms / 1000, found)
        self.leases.add(lease)
        for entry in found:
            entry.leases += 1
        if retry_after_ms:
            lease.seen = seen  # Who asks again shall count once: this one counts if something is got under it.
        else:
            self._use(lease, seen)
        return Lookup(told, lease.id, ttl_ms, retry_after_ms)

    def _count(self, seen: Seen) -> None:
        seen.namespace.lookup_blocks += seen.num_asked
        seen.namespace.lookup_hits += seen.num_found
        self.counters["lookups"] += 1
        self.counters["lookup_blocks"] += seen.num_asked
        self.counters["lookup_hits"] += seen.num_found

    def _use(self, lease: Lease, seen: Seen) -> None:
        """Tells the policies what a reader wants."""
        stamp = self.entry_table.next_stamp([group for group, _, _ in seen.parts])
        for group, start, stop in seen.parts:
            self.entry_table.placement.policy(group).used(lease.entries[start:stop], stamp)

    # Put

    def put_start(
        self,
        fingerprint: bytes,
        runs: Sequence[BlockRun],
        shards: ShardRange,
        ticket_ttl_ms: int = 0,
        *,
        expires: bool = True,
    ) -> PutGrant:
        """Reserves the shards of every block that is neither there nor being written.

        Args:
            expires: False: the ticket lives until it is ended, which its holder, in this process, does for certain.

        Raises:
            OutOfSpaceError: there is no room for all of them; nothing changed.
        """
        namespace, group = self._namespaces.one_group(fingerprint, runs)
        shards.check(group.spec.num_shards)
        now = self.expire()
        self._used(namespace, now)
        if len(self.tickets) >= self.limits.max_tickets:
            raise OutOfSpaceError(f"{len(self.tickets)} puts are under way, which is the limit; try again later")
        ttl_ms = min(ticket_ttl_ms or self.limits.default_ticket_ttl_ms, self.limits.max_ttl_ms)
        ticket = Ticket(self.new_id(), now + ttl_ms / 1000 if expires else math.inf, [], shards)
        try:
            statuses = self.entry_table.reserve(group, runs, ticket)
        except NoRoomError as error:
            holders = Holders(self.leases.values(), self.tickets.values(), self.entry_table.quarantine)
            raise error.because(holders.describe(now, error.account)) from None
        granted = tuple(entry.offset + shards.start * group.spec.chunk_bytes for entry in ticket.entries)
        if expires:  # What the server itself brings up is no client's put.
            self.counters["put_granted_blocks"] += len(granted)
            self.counters["put_present_blocks"] += statuses.count(PutStatus.PRESENT)
            self.counters["put_busy_blocks"] += statuses.count(PutStatus.BUSY)
        if not granted:
            return PutGrant(0, 0, tuple(statuses), ())
        self.tickets.add(ticket)
        return PutGrant(ticket.id, ttl_ms, tuple(statuses), granted)

    def put_end(self, ticket_id: int, checksums: Sequence[int]) -> PutReceipt:
        """Commits what a ticket covers.

        Args:
            checksums: xxh3-64 of each chunk: entries x shards, entry-major.

        Raises:
            LeaseExpiredError: the ticket is not live.
            InvalidRequestError: another number of checksums than of chunks; the ticket stays live.
        """
        self.expire()
        ticket = self._ticket(ticket_id)
        count = ticket.shards.count
        if len(checksums) != len(ticket.entries) * count:
            raise InvalidRequestError(
                f"put_end has {len(checksums)} checksums; the ticket covers {len(ticket.entries)} blocks "
                f"x {count} shards"
            )
        self.tickets.pop(ticket_id)
        committed = completed = 0
        for idx, entry in enumerate(ticket.entries):
            committed += self.entry_table.commit(entry, ticket, checksums[idx * count : (idx + 1) * count])
            completed += entry.live and entry.complete
        self.counters["put_completed_blocks"] += completed
        return PutReceipt(committed, completed)

    def put_revoke(self, ticket_id: int) -> bool:
        """Takes a ticket back from a writer that has stopped writing; False if it was not live."""
        self.expire()
        ticket = self.tickets.pop(ticket_id)
        if ticket is None:
            return False
        self.counters["revoked_tickets"] += 1
        for entry in ticket.entries:
            self.entry_table.take_back(entry, ticket)
        return True

    def writable(self, ticket_id: int, offset: int, nbytes: int) -> None:
        """Raises unless a live ticket covers [offset, offset + nbytes)."""
        ticket = self._ticket(ticket_id)
        if ticket.deadline <= self._clock():
            self.expire()
            raise LeaseExpiredError(f"ticket {ticket_id:#x} has expired; put_start again")
        entry = self.arena.owner(offset)
        if entry is not None and entry.live and ticket.covers(entry):
            chunk_bytes = entry.group.spec.chunk_bytes
            start = entry.offset + ticket.shards.start * chunk_bytes
            if start <= offset and offset + nbytes <= start + ticket.shards.count * chunk_bytes:
                return
        raise InvalidRequestError(f"[{offset}, {offset + nbytes}) is in no region of ticket {ticket_id:#x}")

    # Get

    def get(self, lease_id: int, fingerprint: bytes, runs: Sequence[BlockRun], shards: ShardRange) -> Located:
        """Where leased blocks lie. A block that is gone, or not under the lease, is not present.

        Raises:
            LeaseExpiredError: the lease is not live.
        """
        _, group = self._namespaces.one_group(fingerprint, runs)
        shards.check(group.spec.num_shards)
        now = self.expire()
        lease = self._lease(lease_id)
        if (seen := lease.seen) is not None:
            lease.seen = None
            self._count(seen)
            self._use(lease, seen)
        held = lease.members
        present: list[bool] = []
        offsets: list[int] = []
        checksums = array("Q")
        first, stop, full_mask = shards.start, shards.start + shards.count, group.full_mask
        start = first * group.spec.chunk_bytes
        for entry in map(group.index.get, (block_hash for run in runs for block_hash in run.block_hashes)):
            there = entry is not None and entry.present == full_mask and id(entry) in held
            present.append(there)
            if there:
                assert entry is not None
                offsets.append(entry.offset + start)
                checksums += entry.checksums[first:stop]
        self.counters["get_blocks"] += len(present)
        self.counters["get_present_blocks"] += len(offsets)
        remaining_ms = int((lease.deadline - now) * 1000)
        return Located(remaining_ms, tuple(present), tuple(offsets), tuple(checksums))

    def readable(self, lease_id: int, offset: int, nbytes: int) -> None:
        """Raises unless a live lease covers [offset, offset + nbytes)."""
        lease = self._lease(lease_id)
        if lease.deadline <= self._clock():
            self.expire()
            raise LeaseExpiredError(f"lease {lease_id:#x} has expired; look up again")
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

    # Verify, remove, clear

    def verify(self, fingerprint: bytes, runs: Sequence[BlockRun], read: Read) -> tuple[int, int]:
        """Recomputes checksums where the bytes lie, and drops what has changed; (checked, dropped)."""
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
        """Drops blocks; returns how many were there. Readers that hold a lease finish undisturbed."""
        _, group = self._namespaces.one_group(fingerprint, runs)
        self.expire()
        entries, _ = group.find(runs)
        for entry in entries:
            self.entry_table.drop(entry)
        self.counters["removed_blocks"] += len(entries)
        return len(entries)

    def clear(self, fingerprint: bytes = b"") -> int:
        """Drops every block of a namespace, or of all; returns how many there were."""
        self.expire()
        chosen = [self._namespaces.get(fingerprint)] if fingerprint else self._namespaces.values()
        entries = [entry for namespace in chosen for entry in namespace.entries()]
        for entry in entries:
            self.entry_table.drop(entry)
        self.counters["removed_blocks"] += len(entries)
        return len(entries)

    # Time

    def expire(self) -> float:
        """Ends what has reached its deadline; returns the time. Cheap when nothing has."""
        now = self._clock()
        for lease in self.leases.pop_expired(now):
            self.counters["expired_leases"] += 1
            self._end_lease(lease)
        for ticket in self.tickets.pop_expired(now):
            self.counters["expired_tickets"] += 1
            for entry in ticket.entries:
                self.entry_table.abandon(entry, ticket)
        self.entry_table.free_ended(now)
        return now

    # State

    def stats(self, prefaulted_bytes: int = 0) -> PoolStats:
        return PoolStats(
            arena_bytes=self.arena.arena_bytes,
            free_bytes=self.arena.arena_bytes - self.arena.used_bytes,
            prefaulted_bytes=prefaulted_bytes,
            num_entries=self.entry_table.num_complete,
            num_incomplete=self.entry_table.num_live - self.entry_table.num_complete,
            num_quarantined=len(self.entry_table.quarantine),
            num_leases=len(self.leases),
            num_tickets=len(self.tickets),
            counters=dict(self.counters),
        )

    def check_integrity(self) -> None:
        """Recomputes the invariants from scratch; raises AssertionError. For tests: it looks at every slot."""
        entries = [entry for namespace in self._namespaces.values() for entry in namespace.entries()]
        entry_table = self.entry_table
        quarantined = entry_table.quarantine.entries()
        check_slots(self.arena, entries, quarantined)
        check_holdings(entries, list(quarantined.values()), self.leases.values(), self.tickets.values())
        check_prefixes(entries)
        assert len(entries) == entry_table.num_live, "the count of entries is off"
        assert sum(entry.complete for entry in entries) == entry_table.num_complete, "the count of the complete is off"

    # Helpers

    def _ticket(self, ticket_id: int) -> Ticket:
        ticket = self.tickets.get(ticket_id)
        if ticket is None:
            raise LeaseExpiredError(
                f"ticket {ticket_id:#x} is not live: it expired, was ended, or is of another boot; put_start again"
            )
        return ticket

    def _lease(self, lease_id: int) -> Lease:
        lease = self.leases.get(lease_id)
        if lease is None:
            raise LeaseExpiredError(
                f"lease {lease_id:#x} is not live: it expired, was released, or is of another boot; look up again"
            )
        return lease

    def _end_lease(self, lease: Lease) -> None:
        for entry in lease.entries:
            entry.leases -= 1
            if not entry.live:
                self.entry_table.settle(entry)
