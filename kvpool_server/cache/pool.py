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

A call on many blocks has a form in steps (`steps.py`), and what ends many holds at once does so over several calls:
`settle` does more of it, and says whether more is left.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Container, Sequence
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
    in_parts,
)
from kvpool_server.cache.allocator.arena import Arena
from kvpool_server.cache.allocator.placement import NoRoomError, Placement
from kvpool_server.cache.counters import COUNTERS
from kvpool_server.cache.ended_holds import EndedHolds, EndOfEntry
from kvpool_server.cache.entry import Entry, Group, Observer
from kvpool_server.cache.entry_table import EntryTable, Quarantine
from kvpool_server.cache.eviction import DEFAULT_POLICY, POLICIES, Policy
from kvpool_server.cache.holders import describe_holders
from kvpool_server.cache.integrity import check_holds, check_prefixes, check_slots
from kvpool_server.cache.leases import NOBODY, Found, Hold, HoldTable, Lease, Owner, Ticket
from kvpool_server.cache.limits import IdentityLimits, Limits, default_limits
from kvpool_server.cache.namespaces import Namespaces, PoolNamespace
from kvpool_server.cache.quotas import Account, Quotas
from kvpool_server.cache.steps import LOOKUP_STEP_BLOCKS, SETTLED_PER_CALL, STEP_BLOCKS, Steps, finish
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
        limits_of: of an identity, asked for whenever they apply, because they may change.

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
        limits_of: Callable[[str], IdentityLimits] = default_limits,
    ):
        self.arena = arena
        self.limits_of = limits_of
        self.limits = limits or Limits()
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.new_id = new_id
        longest_hold_s = (self.limits.max_ttl_ms + self.limits.grace_ms) / 1000
        self.placement = Placement(arena, policy, self.counters, longest_hold_s)
        self._quarantine = Quarantine()
        self.entry_table = EntryTable(
            arena, self.placement, self._quarantine, clock, self.limits.grace_ms, self.counters
        )
        self.leases: HoldTable[Lease] = HoldTable("lease", "look up again")
        self.tickets: HoldTable[Ticket] = HoldTable("ticket", "put_start again")
        self._unfinished = UnfinishedHolds(transfers or NoTransfers())
        self._clock = clock
        self._namespaces = Namespaces(self.limits, arena.extent_bytes, arena.has_tenants)
        self._quotas = Quotas(self.limits.max_quotas, arena)
        self._ended = EndedHolds(self.entry_table)
        self._leasing: list[list[Entry]] = []
        self._writing: list[Ticket] = []

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
            OutOfSpaceError: too many namespaces are open, and all of them are in use.
            UnavailableError: the namespace is being closed.
        """
        namespace, created = self._namespaces.open(spec, expected_fingerprint, self._clock(), opener)
        if created:
            self._assign_quotas([namespace])
            self._drop_closed(SETTLED_PER_CALL)
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
        finish(self.set_quotas_in_steps(quotas))

    def set_quotas_in_steps(self, quotas: Sequence[Quota]) -> Steps[None]:
        """As `set_quotas`. The quotas are in force from the first step on."""
        self._quotas.set(quotas)
        self._assign_quotas(self._namespaces.values())
        while self.placement.requeue():
            yield
        while self.rebalance():
            yield

    def _assign_quotas(self, namespaces: Sequence[PoolNamespace]) -> None:
        """Tells the placement which quotas cover each group of these namespaces."""
        covering = [(each.groups, self._quotas.covering(each.spec.tenant, each.fingerprint)) for each in namespaces]
        self.placement.assign_quotas((group, accounts) for groups, accounts in covering for group in groups)

    def rebalance(self) -> bool:
        """Evicts some of what exceeds a quota, and starts to drain an extent for a slot size below its share.

        Call it often: entries that are leased or being written stay until a later call. True: more can be evicted now.
        """
        now = self.expire()
        victims = self.placement.over_quota(self._quotas.accounts(), STEP_BLOCKS)
        self.entry_table.evict(victims)
        self.entry_table.evict(self.placement.start_drain(now, STEP_BLOCKS))
        return len(victims) >= STEP_BLOCKS

    def lookup(
        self, fingerprint: bytes, runs: Sequence[BlockRun], *, prefix_only: bool, lease_ttl_ms: int = 0
    ) -> Lookup:
        """Which blocks are complete. With a TTL, leases them, which is a use; without one renews nothing."""
        found = self.find(fingerprint, runs, prefix_only=prefix_only, lease_ttl_ms=lease_ttl_ms)
        self.record_use(found)
        return Lookup(found.hits, found.lease_id, found.lease_ttl_ms)

    def find(
        self,
        fingerprint: bytes,
        runs: Sequence[BlockRun],
        *,
        prefix_only: bool,
        lease_ttl_ms: int = 0,
        owner: Owner = NOBODY,
    ) -> Found:
        """As `lookup`, without recording it: call `record_use` or `record_use_on_get` next.

        Args:
            owner: whose the lease is.
        """
        namespace, groups = self._namespaces.groups_of_lookup(fingerprint, runs)
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
                lease_id, granted_ms = self._lease(entries, lease_ttl_ms, now, owner)
                if lease_id:
                    for entry in entries:
                        entry.leases += 1
        return Found(namespace, tuple(hits), num_blocks, entries, spans, lease_id, granted_ms)

    def find_in_steps(
        self,
        fingerprint: bytes,
        runs: Sequence[BlockRun],
        *,
        prefix_only: bool,
        lease_ttl_ms: int,
        owner: Owner = NOBODY,
    ) -> Steps[Found]:
        """As `find`. Each step leases what it finds; the lease's time begins with the last step."""
        namespace, groups = self._namespaces.groups_of_lookup(fingerprint, runs)
        entries: list[Entry] = []
        if lease_ttl_ms:
            self._mark_used(namespace, self.expire())
            self._leasing.append(entries)
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
                lease_id, granted_ms = self._lease(entries, lease_ttl_ms, self.expire(), owner)
        finally:
            self._leasing = [each for each in self._leasing if each is not entries]
            if lease_ttl_ms and not lease_id:
                self._ended.add_lease(Lease(0, 0.0, list(entries)))
        return Found(namespace, tuple(hits), sum(map(len, runs)), entries, spans, lease_id, granted_ms)

    def _lease(self, entries: list[Entry], ttl_ms: int, now: float, owner: Owner) -> tuple[int, int]:
        """Makes a lease on entries that are counted as leased; returns its id and TTL, both 0 if there is no room."""
        if not self._may_lease(owner, len(entries)):
            self.counters["refused_leases"] += 1
            return 0, 0
        ttl_ms = min(ttl_ms, self.limits.max_ttl_ms)
        lease = Lease(self.new_id(), now + ttl_ms / 1000, entries, owner=owner)
        self.leases.add(lease)
        return lease.id, ttl_ms

    def _may_lease(self, owner: Owner, num_blocks: int) -> bool:
        limits = self.limits
        if len(self.leases) >= limits.max_leases:
            return False
        if owner.tenant:
            own = self.limits_of(owner.name)
            if not self.leases.is_within(owner, num_blocks, own.leases, own.leased_blocks):
                return False
        return not owner.name or self.leases.has_room(owner, num_blocks, limits.max_leases, limits.max_leased_blocks)

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

        Raises OutOfSpaceError if there are too few slots for all of them; no block is reserved then.
        """
        return finish(self.put_start_in_steps(fingerprint, runs, shards, ticket_ttl_ms))

    def put_start_in_steps(
        self,
        fingerprint: bytes,
        runs: Sequence[BlockRun],
        shards: ShardRange,
        ticket_ttl_ms: int = 0,
        owner: Owner = NOBODY,
    ) -> Steps[PutGrant]:
        """As `put_start`; the ticket is the owner's."""
        ttl_ms = min(ticket_ttl_ms or self.limits.default_ticket_ttl_ms, self.limits.max_ttl_ms)
        ticket, statuses = yield from self.reserve_in_steps(fingerprint, runs, shards, ttl_ms / 1000, owner)
        self.counters["put_granted_blocks"] += len(ticket.entries)
        self.counters["put_present_blocks"] += statuses.count(PutStatus.PRESENT)
        self.counters["put_busy_blocks"] += statuses.count(PutStatus.BUSY)
        if not ticket.entries:
            return PutGrant(0, 0, tuple(statuses), ())
        start = shards.start * ticket.entries[0].group.spec.chunk_bytes
        return PutGrant(ticket.id, ttl_ms, tuple(statuses), tuple(entry.offset + start for entry in ticket.entries))

    def reserve_in_steps(
        self, fingerprint: bytes, runs: Sequence[BlockRun], shards: ShardRange, ttl_s: float, owner: Owner = NOBODY
    ) -> Steps[tuple[Ticket, list[PutStatus]]]:
        """As `put_start`, uncounted. Returns a ticket, which is live if it covers any block, and each block's status.

        Args:
            ttl_s: `math.inf`: the caller, in this process, is certain to end the ticket.
        """
        namespace, group = self._namespaces.one_group(fingerprint, runs)
        shards.check(group.spec.num_shards)
        self._check_chunks(runs, shards)
        now = self.expire()
        self._mark_used(namespace, now)
        self._check_tickets(owner)
        if self.arena.num_surplus(namespace.tenant):
            self.rebalance()
        ticket = Ticket(self.new_id(), now + ttl_s, [], shards, owner=owner)
        statuses: list[PutStatus] = []
        is_reserved = has_claims = False
        self._writing.append(ticket)
        try:
            for part in in_parts(runs, STEP_BLOCKS):
                if statuses:
                    yield
                while (reserved := self.entry_table.reserve(group, part, ticket)) is None:
                    if not has_claims:
                        self.arena.start_claims(group.tenant)
                        has_claims = True
                    while not self.arena.zero_some(group.tenant):
                        yield
                statuses += reserved
            is_reserved = True
        except NoRoomError as error:
            raise error.because(self._holders(group.tenant, now, error.account)) from None
        finally:
            self._writing.remove(ticket)
            if has_claims:
                self.arena.end_claims(group.tenant)
            if not is_reserved and ticket.entries:
                self._ended.add_ticket(ticket, self.entry_table.revoke)
                self._ended.settle(SETTLED_PER_CALL)
        if ticket.entries:
            self.tickets.add(ticket)
        return ticket, statuses

    def _check_tickets(self, owner: Owner) -> None:
        """Raises OutOfSpaceError if the owner may not have another ticket."""
        if owner.tenant:
            # Puts whose steps are under way are not in the table.
            under_way = sum(ticket.owner.name == owner.name for ticket in self._writing)
            most = self.limits_of(owner.name).tickets
            if not self.tickets.is_within(owner, 0, most - under_way):
                raise OutOfSpaceError(f"{most} puts of {owner.name} are under way, its limit; try again later")
        most = self.limits.max_tickets
        if len(self.tickets) >= most or (owner.name and not self.tickets.has_room(owner, 0, most)):
            raise OutOfSpaceError(
                f"{len(self.tickets)} puts are under way; the limit is {most}, and one client may have as many as are "
                "left; try again later"
            )

    def _holders(self, tenant: str, now: float, account: Account | None) -> str:
        """What holds a tenant's slots, or those that count towards a quota of it; other tenants' are not told of."""
        leases = [lease for lease in self.leases.values() if _tenant(lease) == tenant]
        tickets = [ticket for ticket in self.tickets.values() if _tenant(ticket) == tenant]
        counts = account.groups.__contains__ if account is not None else lambda group: group.tenant == tenant
        return describe_holders(leases, tickets, self._unfinished, self._quarantine, now, counts)

    def _check_chunks(self, runs: Sequence[BlockRun], shards: ShardRange) -> None:
        count, most = sum(map(len, runs)), self.limits.max_batch_chunks
        if count * shards.count > most:
            raise InvalidRequestError(
                f"{count} blocks x {shards.count} shards; give at most {most} chunks, and split larger batches"
            )

    def put_end(self, ticket_id: int, checksums: Sequence[int]) -> PutReceipt:
        """Commits the blocks that a ticket covers; none of them if bytes are still being written under the ticket.

        Args:
            checksums: xxh3-64 of each chunk: entries x shards, entry-major.

        Raises:
            LeaseExpiredError: the ticket is not live, or another tenant's.
            InvalidRequestError: there is not one checksum for each chunk; the ticket stays live.
        """
        return finish(self.put_end_in_steps(ticket_id, checksums))

    def put_end_in_steps(self, ticket_id: int, checksums: Sequence[int], owner: Owner = NOBODY) -> Steps[PutReceipt]:
        """As `put_end`: each step makes some of the blocks readable."""
        ticket = self.tickets.live(ticket_id, owner, self.expire())
        count = ticket.shards.count
        if len(checksums) != len(ticket.entries) * count:
            raise InvalidRequestError(
                f"put_end has {len(checksums)} checksums; the ticket covers {len(ticket.entries)} blocks "
                f"x {count} shards"
            )
        self.tickets.pop(ticket_id)
        if not self._unfinished.end(ticket):
            self._ended.add_ticket(self._pinned(ticket), self._abandon)
            self._ended.settle(SETTLED_PER_CALL)
            return PutReceipt(0, 0)
        committed = completed = 0
        self._writing.append(ticket)
        entries = ticket.entries
        for idx, entry in enumerate(entries):
            if idx and not idx % STEP_BLOCKS:
                ticket.entries = entries[idx:]
                yield
            committed += self.entry_table.commit(entry, ticket, checksums[idx * count : (idx + 1) * count])
            completed += entry.live and entry.complete
        self._writing.remove(ticket)
        self.counters["put_completed_blocks"] += completed
        return PutReceipt(committed, completed)

    def put_revoke(self, ticket_id: int, owner: Owner = NOBODY) -> bool:
        """Ends a ticket whose writer has stopped writing, without committing; False if it was not live."""
        now = self.expire()
        ticket = self.tickets.find(ticket_id, owner)
        if ticket is None:
            return False
        self.tickets.pop(ticket_id)
        if ticket.deadline <= now:
            self.counters["expired_tickets"] += 1
            self._end_ticket(ticket, self.entry_table.expire)
            return False
        self.counters["revoked_tickets"] += 1
        self._end_ticket(ticket, self.entry_table.revoke, self._abandon)
        return True

    def writable(self, ticket_id: int, offset: int, nbytes: int, owner: Owner = NOBODY) -> None:
        """Raises unless a live ticket covers [offset, offset + nbytes)."""
        ticket = self.tickets.live(ticket_id, owner, self.expire())
        entry = self.arena.owner(offset)
        if entry is not None and entry.live and ticket.covers(entry):
            chunk_bytes = entry.group.spec.chunk_bytes
            start = entry.offset + ticket.shards.start * chunk_bytes
            if start <= offset and offset + nbytes <= start + ticket.shards.count * chunk_bytes:
                return
        raise InvalidRequestError(f"[{offset}, {offset + nbytes}) is in no region of ticket {ticket_id:#x}")

    def get(
        self,
        lease_id: int,
        fingerprint: bytes,
        runs: Sequence[BlockRun],
        shards: ShardRange,
        owner: Owner = NOBODY,
    ) -> Located:
        """Where leased blocks lie; one that was dropped, or is not leased, is not present. Raises LeaseExpiredError."""
        _, group = self._namespaces.one_group(fingerprint, runs)
        shards.check(group.spec.num_shards)
        self._check_chunks(runs, shards)
        now = self.expire()
        lease = self.leases.live(lease_id, owner, now)
        if lease.unrecorded is not None:
            found, lease.unrecorded = lease.unrecorded, None
            self.record_use(found)
        held = lease.entry_ids
        present: list[bool] = []
        offsets: list[int] = []
        checksums = array("Q")
        first, stop, full_mask = shards.start, shards.start + shards.count, group.full_mask
        start = first * group.spec.chunk_bytes
        for entry in group.index.get_all(block_hash for run in runs for block_hash in run.block_hashes):
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

    def readable(self, lease_id: int, offset: int, nbytes: int, owner: Owner = NOBODY) -> None:
        """Raises unless a live lease covers [offset, offset + nbytes)."""
        lease = self.leases.live(lease_id, owner, self.expire())
        entry = self.arena.owner(offset)
        if entry is None or not lease.covers(entry) or offset + nbytes > entry.offset + entry.group.spec.slot_bytes:
            raise InvalidRequestError(f"[{offset}, {offset + nbytes}) is in no block of lease {lease_id:#x}")

    def release(self, lease_ids: Sequence[int], owner: Owner = NOBODY) -> int:
        """Ends leases; returns how many were live. Those of other tenants count as not live."""
        now = self.expire()
        released = 0
        for lease_id in lease_ids:
            if (lease := self.leases.find(lease_id, owner)) is not None:
                self.leases.pop(lease_id)
                self._end_lease(lease)
                released += lease.deadline > now
        self._ended.settle(SETTLED_PER_CALL)
        return released

    def complete(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> list[Entry]:
        """The complete entries of these blocks, each once."""
        _, group = self._namespaces.one_group(fingerprint, runs)
        self.expire()
        entries, _ = group.find(runs)
        return [entry for entry in entries if entry.complete]

    def drop_corrupt_in_steps(self, entries: Sequence[Entry]) -> Steps[int]:
        """Drops entries whose bytes differ from their checksums; returns how many had not been dropped before."""
        dropped = yield from self._drop_in_steps(entries)
        self.counters["corrupt_blocks"] += dropped
        return dropped

    def verify(self, fingerprint: bytes, runs: Sequence[BlockRun], read: Read) -> tuple[int, int]:
        """Recomputes the checksums of complete blocks, and drops those that differ; returns (checked, dropped)."""
        entries = self.complete(fingerprint, runs)
        return len(entries), finish(self.drop_corrupt_in_steps([entry for entry in entries if is_corrupt(entry, read)]))

    def remove(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> int:
        """Drops blocks; returns how many were present. Clients that hold a lease on them finish their loads."""
        return finish(self.remove_in_steps(fingerprint, runs))

    def remove_in_steps(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> Steps[int]:
        """As `remove`."""
        _, group = self._namespaces.one_group(fingerprint, runs)
        self.expire()
        entries, _ = group.find(runs)
        removed = yield from self._drop_in_steps(entries)
        self.counters["removed_blocks"] += removed
        return removed

    def _drop_in_steps(self, entries: Sequence[Entry]) -> Steps[int]:
        dropped = 0
        for idx, entry in enumerate(entries):
            if idx and not idx % STEP_BLOCKS:
                yield
            if entry.live:
                self.entry_table.drop(entry)
                dropped += 1
        return dropped

    def clear(self, fingerprint: bytes = b"") -> int:
        """Drops every block of a namespace, or of all namespaces; returns how many."""
        return finish(self.clear_in_steps(fingerprint))

    def clear_in_steps(self, fingerprint: bytes = b"") -> Steps[int]:
        """As `clear`: no lookup finds any of the blocks from the first step on, and the steps free their slots.

        Blocks that are put meanwhile stay.
        """
        self.expire()
        chosen = [self._namespaces.get(fingerprint)] if fingerprint else self._namespaces.values()
        groups = [group for namespace in chosen for group in namespace.groups]
        while any(group.leaving for group in groups):  # An earlier call has not ended.
            self._drop_leaving(groups)
            yield
        removed = sum(group.start_leaving() for group in groups)
        self.counters["removed_blocks"] += removed
        while self._drop_leaving(groups):
            yield
        return removed

    def _drop_leaving(self, groups: Sequence[Group]) -> bool:
        """Drops some of the entries that have left the indexes of groups; False if there are no more of them."""
        room = STEP_BLOCKS
        for group in groups:
            if group.leaving and room:
                room -= self.entry_table.drop_leaving(group, room)
        return not room

    def expire(self) -> float:
        """Ends leases, tickets and quarantines whose deadline has come; returns the time. Cheap when there is none.

        Where they are many, it ends some of them, and later calls the others.
        """
        now = self._clock()
        self._settle(now, SETTLED_PER_CALL)
        return now

    def expire_owned(self, owners: Container[str]) -> Steps[None]:
        """Ends the leases and tickets of clients that may hold nothing any more, as if their deadlines had come."""
        yield from self.leases.expire_owned(owners, self._clock())
        yield from self.tickets.expire_owned(owners, self._clock())

    def settle(self) -> bool:
        """Does some of what is left to do since holds ended or a namespace was closed; False if nothing is."""
        return self._settle(self._clock(), SETTLED_PER_CALL) > 0 or self.placement.requeue()

    def _settle(self, now: float, count: int) -> int:
        """As `expire`, for up to about `count` entries; returns how many holds, entries or slots it has ended."""
        ended = 0
        while ended < count and (lease := self.leases.pop_expired(now)) is not None:
            self.counters["expired_leases"] += 1
            self._end_lease(lease)
            ended += 1
        for hold in self._unfinished.pop_finished():
            self._ended.add_lease(hold)
        while ended < count and (ticket := self.tickets.pop_expired(now)) is not None:
            self.counters["expired_tickets"] += 1
            self._end_ticket(ticket, self.entry_table.expire)
            ended += 1
        ended += self._ended.settle(count)
        ended += self.entry_table.free_expired(now, count)
        if self._namespaces.closing:
            ended += self._drop_closed(count)
        return ended

    def _drop_closed(self, count: int) -> int:
        """Drops up to `count` entries of namespaces that were closed, and forgets those that are empty."""
        dropped = 0
        for namespace in list(self._namespaces.closing.values()):
            for group in namespace.groups:
                if group.index and not group.leaving:
                    group.start_leaving()
                dropped += self.entry_table.drop_leaving(group, count - dropped)
            if not namespace.is_empty:
                break
            self.placement.remove(namespace.groups)
            del self._namespaces.closing[namespace.fingerprint]
        return dropped

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
        namespaces = (*self._namespaces.values(), *self._namespaces.closing.values())
        entries = [entry for namespace in namespaces for entry in namespace.entries()]
        entry_table = self.entry_table
        quarantined = self._quarantine.by_offset()
        check_slots(self.arena, entries, quarantined)
        tickets = (*self.tickets.values(), *self._writing, *self._ended.tickets())
        leasing = [Lease(0, 0.0, entries) for entries in self._leasing]
        leases = (*self.leases.values(), *self._unfinished, *self._ended.leases(), *leasing)
        check_holds(entries, list(quarantined.values()), leases, tickets)
        check_prefixes(entries)
        assert len(entries) == entry_table.num_live, "the count of entries is off"
        assert sum(entry.complete for entry in entries) == entry_table.num_complete, "the count of the complete is off"

    def _end_lease(self, lease: Lease) -> None:
        if self._unfinished.end(lease):
            self._ended.add_lease(lease)

    def _end_ticket(self, ticket: Ticket, end: EndOfEntry, end_unfinished: EndOfEntry | None = None) -> None:
        """Ends a ticket.

        Args:
            end: what becomes of its entries.
            end_unfinished: instead, if bytes are being written under one of its permits. The entries also stay pinned
                until that has ended.
        """
        if not self._unfinished.end(ticket):
            ticket, end = self._pinned(ticket), end_unfinished or end
        self._ended.add_ticket(ticket, end)
        self._ended.settle(SETTLED_PER_CALL)

    def _pinned(self, ticket: Ticket) -> Ticket:
        """Pins the entries of an unfinished ticket; returns a ticket on them that can be ended."""
        for entry in ticket.entries:
            entry.leases += 1
        return dataclasses.replace(ticket, entries=list(ticket.entries))

    def _abandon(self, entry: Entry, ticket: Ticket) -> None:
        """Drops an entry of an unfinished ticket: else another writer could get its shards while bytes arrive."""
        self.entry_table.abandon(entry, ticket, 0.0)


def _tenant(hold: Hold) -> str | None:
    return hold.entries[0].group.tenant if hold.entries else None


def is_corrupt(entry: Entry, read: Read) -> bool:
    """Whether a complete entry's bytes differ from its checksums."""
    size = entry.group.spec.chunk_bytes
    return any(
        checksum(read(entry.offset + shard * size, size)) != expected for shard, expected in enumerate(entry.checksums)
    )
