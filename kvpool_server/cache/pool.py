"""The pool: a synchronous state machine over entries, leases and tickets. It decides; its callers move the bytes.

The pool answers requests; `entry_table` keeps the entries, `placement` their slots, `holds` the leases and tickets. The
file stands in the order of its paths: lookup; put_start, put_end, put_revoke; get, release; verify, remove, clear.
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

from array import array
from collections.abc import Callable, Container, Sequence

from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import (
    BlockRun,
    Located,
    Lookup,
    MissCause,
    PutGrant,
    PutReceipt,
    PutStatus,
    Quota,
    ShardRange,
    in_parts,
)
from kvpool_server.cache.allocator.arena import Arena
from kvpool_server.cache.allocator.placement import NoRoomError, Placement
from kvpool_server.cache.counters import COUNTERS, PoolStats
from kvpool_server.cache.departures import Departures
from kvpool_server.cache.entry import Entry, Group, Observer
from kvpool_server.cache.entry_table import EntryTable
from kvpool_server.cache.eviction import DEFAULT_POLICY, POLICIES, Policy
from kvpool_server.cache.explanations import Explanations
from kvpool_server.cache.hints import Hints
from kvpool_server.cache.holds import Holds
from kvpool_server.cache.integrity import check_holds, check_prefixes, check_slots
from kvpool_server.cache.leases import NOBODY, Found, Owner, Ticket
from kvpool_server.cache.limits import IdentityLimits, Limits, default_limits
from kvpool_server.cache.lookups import Lookups
from kvpool_server.cache.misses import Misses
from kvpool_server.cache.namespaces import Namespaces, PoolNamespace
from kvpool_server.cache.pins import Pins
from kvpool_server.cache.quarantine import Quarantine
from kvpool_server.cache.quotas import Quotas
from kvpool_server.cache.steps import LOOKUP_STEP_BLOCKS, SETTLED_PER_CALL, STEP_BLOCKS, Steps, finish
from kvpool_server.cache.traffic import TrafficObserver
from kvpool_server.cache.transfers import NoTransfers, Transfers
from kvpool_server.cache.use_times import UseTimes


class Pool:
    """See the module.

    Args:
        clock: monotonic seconds.
        new_id: unguessable 63-bit ids, never 0, never repeated within a ticket's life, also across restarts.
        policy: makes an eviction policy, for each slot size and each set of quotas.
        transfers: those of the data port; none by default.
        limits_of: of an identity.

    Attributes:
        placement: where entries lie, and which are evicted.
        entry_table: the entries.
        leases, tickets: the live ones.
        lookups: finds blocks, and records their use.
        misses: says why blocks are not found.
        explanations: say what is known of a prompt's blocks.
        use_times: when a stamp of an entry's use was given.
        pins: what clients have pinned.
        hints: what clients say of prefixes.
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
        self.placement = Placement(arena, policy, self.counters, longest_hold_s, clock)
        self._quarantine = Quarantine()
        self.use_times = UseTimes(clock())
        self.pins = Pins(int(arena.arena_bytes * self.limits.pin_share))
        departures = Departures(clock, self.use_times)
        self.entry_table = EntryTable(
            arena, self.placement, self._quarantine, departures, clock, self.limits.grace_ms, self.counters, self.pins
        )
        self._holds = Holds(self.entry_table, transfers or NoTransfers(), self.limits, limits_of, new_id, self.counters)
        self.leases, self.tickets = self._holds.leases, self._holds.tickets
        self._clock = clock
        self._namespaces = Namespaces(self.limits, self.placement, arena.extent_bytes, arena.has_tenants)
        self.lookups = Lookups(self._namespaces, self._holds, self.placement, self.counters, self.expire)
        self.hints = Hints(self._namespaces, self.placement, self.pins, clock, self.counters)
        self.misses = Misses(self._namespaces, departures)
        self.explanations = Explanations(self._namespaces, departures, self.misses, self.use_times, clock)
        self._quotas = Quotas(self.limits.max_quotas, arena)
        self._traffic_observers: list[TrafficObserver] = []
        self._on_closed: list[Callable[[PoolNamespace], None]] = []

    def observe(self, observer: Observer) -> None:
        """Tells an observer of every block that becomes readable, or stops being readable, from now on."""
        self.entry_table.observe(observer)

    def observe_traffic(self, observer: TrafficObserver) -> None:
        """Tells an observer of every lookup for a load and every put of engines from now on."""
        self._traffic_observers.append(observer)

    def tell_lookup(self, found: Found, runs: Sequence[BlockRun]) -> None:
        """Tells the observers of traffic that a lookup for a load has been answered."""
        for observer in () if found.namespace.is_measurement else self._traffic_observers:
            observer.looked_up(found.namespace, runs, found.hits)

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
        now = self._clock()
        namespace, created = self._namespaces.open(spec, expected_fingerprint, now, opener)
        if created:
            self._assign_quotas([namespace])
            self._drop_closed(SETTLED_PER_CALL)
        self._namespaces.use(namespace, now)
        self._namespaces.supersede_older(namespace)
        return namespace, created

    def now(self) -> float:
        """The time by the pool's clock, seconds."""
        return self._clock()

    def num_opened(self, tenant: str | None = None) -> int:
        """Namespaces opened since the start, of one tenant or of all."""
        return self._namespaces.num_opened(tenant)

    def open_namespaces(self) -> list[PoolNamespace]:
        return self._namespaces.values()

    def all_namespaces(self) -> list[PoolNamespace]:
        """The open ones, and those that were closed and still hold entries."""
        return [*self._namespaces.values(), *self._namespaces.closing.values()]

    def when_closed(self, listener: Callable[[PoolNamespace], None]) -> None:
        """Has a listener called with each namespace that is closed, once it holds nothing any more."""
        self._on_closed.append(listener)

    def namespace(self, fingerprint: bytes) -> PoolNamespace | None:
        return self._namespaces.find(fingerprint)

    def chunk_bytes(self, fingerprint: bytes, run: BlockRun) -> int:
        return self._namespaces.get(fingerprint).group(run.group_idx).spec.chunk_bytes

    def slot_bytes(self, fingerprint: bytes, run: BlockRun) -> int:
        return self._namespaces.get(fingerprint).group(run.group_idx).spec.slot_bytes

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
        found = finish(self.lookups.find(fingerprint, runs, prefix_only, lease_ttl_ms))
        self.lookups.record_use(found)
        if lease_ttl_ms:
            self.tell_lookup(found, runs)
        return Lookup(found.hits, found.lease_id, found.lease_ttl_ms)

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
        if self._traffic_observers and not shards.start and (namespace := self.namespace(fingerprint)) is not None:
            for observer in () if namespace.is_measurement else self._traffic_observers:
                observer.put(namespace, runs)
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
        self._namespaces.use(namespace, now)
        self._holds.check_tickets(owner)
        if self.arena.num_surplus(namespace.tenant):
            self.rebalance()
        ticket = Ticket(self.new_id(), now + ttl_s, [], shards, owner=owner)
        statuses: list[PutStatus] = []
        is_reserved = has_claims = False
        self._holds.writing.append(ticket)
        try:
            if sum(map(len, runs)) > self.placement.most_slots(group):
                yield from self._check_fits(group, runs)
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
            if has_claims:
                ticket.restart(self._clock() + ttl_s)
            is_reserved = True
        except NoRoomError as error:
            holders = self._holds.describe(group.tenant, self._quarantine, now, error.account)
            raise error.because(holders) from None
        finally:
            self._holds.writing.remove(ticket)
            if has_claims:
                self.arena.end_claims(group.tenant)
            if not is_reserved and ticket.entries:
                self._holds.undo(ticket)
        if ticket.entries:
            self.tickets.add(ticket)
        return ticket, statuses

    def _check_fits(self, group: Group, runs: Sequence[BlockRun]) -> Steps[None]:
        """Raises OutOfSpaceError, before anything is evicted, if all that a group may have is too little for a put."""
        new: set[bytes] = set()
        for part in in_parts(runs, LOOKUP_STEP_BLOCKS):
            new.update(name for run in part for name in run.block_hashes if name not in group.index)
            yield
        self.placement.check_fits(group, len(new))

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
        if not self._holds.finish_writing(ticket):
            return PutReceipt(0, 0)
        committed = completed = 0
        self._holds.writing.append(ticket)
        entries = ticket.entries
        for idx, entry in enumerate(entries):
            if idx and not idx % STEP_BLOCKS:
                ticket.entries = entries[idx:]
                yield
            committed += self.entry_table.commit(entry, ticket, checksums[idx * count : (idx + 1) * count])
            completed += entry.live and entry.complete
        self._holds.writing.remove(ticket)
        self.counters["put_completed_blocks"] += completed
        if entries and (namespace := self._namespaces.find(entries[0].group.fingerprint)) is not None:
            namespace.stored_bytes += committed * count * entries[0].group.spec.chunk_bytes
        return PutReceipt(committed, completed)

    def put_revoke(self, ticket_id: int, owner: Owner = NOBODY) -> bool:
        """Ends a ticket whose writer has stopped writing, without committing; False if it was not live."""
        return self._holds.revoke(ticket_id, owner, self.expire())

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
        return finish(self.get_in_steps(lease_id, fingerprint, runs, shards, owner))

    def get_in_steps(
        self,
        lease_id: int,
        fingerprint: bytes,
        runs: Sequence[BlockRun],
        shards: ShardRange,
        owner: Owner = NOBODY,
    ) -> Steps[Located]:
        """As `get`. The lease has to be live when the last step begins, too."""
        namespace, group = self._namespaces.one_group(fingerprint, runs)
        shards.check(group.spec.num_shards)
        self._check_chunks(runs, shards)
        now = self.expire()
        lease = self.leases.live(lease_id, owner, now)
        if lease.unrecorded is not None:
            found, lease.unrecorded = lease.unrecorded, None
            self.lookups.record_use(found)
        held = lease.entry_ids
        present: list[bool] = []
        offsets: list[int] = []
        checksums = array("Q")
        first, stop, full_mask = shards.start, shards.start + shards.count, group.full_mask
        start = first * group.spec.chunk_bytes
        for part in in_parts(runs, LOOKUP_STEP_BLOCKS):
            if present:
                yield
                now = self.expire()
                self.leases.live(lease_id, owner, now)
            for entry in group.index.get_all(block_hash for run in part for block_hash in run.block_hashes):
                is_present = entry is not None and entry.present == full_mask and id(entry) in held
                present.append(is_present)
                if is_present:
                    assert entry is not None
                    offsets.append(entry.offset + start)
                    checksums += entry.checksums[first:stop]
        self.counters["get_blocks"] += len(present)
        self.counters["get_present_blocks"] += len(offsets)
        namespace.loaded_bytes += len(offsets) * shards.count * group.spec.chunk_bytes
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
        return self._holds.release(lease_ids, owner, self.expire())

    def complete_in_steps(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> Steps[list[Entry]]:
        """The complete entries of these blocks, each once; some may have been dropped since."""
        entries = yield from self._find_in_steps(fingerprint, runs)
        return [entry for entry in entries if entry.complete]

    def _find_in_steps(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> Steps[list[Entry]]:
        """The entries of these blocks, each once; some may have been dropped since."""
        _, group = self._namespaces.one_group(fingerprint, runs)
        self.expire()
        entries: dict[Entry, None] = {}
        for nth, part in enumerate(in_parts(runs, LOOKUP_STEP_BLOCKS)):
            if nth:
                yield
            entries |= dict.fromkeys(group.find(part)[0])
        return list(entries)

    def drop_corrupt_in_steps(self, entries: Sequence[Entry]) -> Steps[int]:
        """Drops entries whose bytes differ from their checksums; returns how many had not been dropped before."""
        dropped = yield from self.entry_table.drop_in_steps(entries, MissCause.CORRUPT)
        self.counters["corrupt_blocks"] += dropped
        return dropped

    def remove(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> int:
        """Drops blocks; returns how many were present. Clients that hold a lease on them finish their loads."""
        return finish(self.remove_in_steps(fingerprint, runs))

    def remove_in_steps(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> Steps[int]:
        """As `remove`."""
        entries = yield from self._find_in_steps(fingerprint, runs)
        removed = yield from self.entry_table.drop_in_steps(entries, MissCause.REMOVED)
        self.counters["removed_blocks"] += removed
        return removed

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
            self.entry_table.drop_leaving(groups, STEP_BLOCKS)
            yield
        removed = sum(group.start_leaving() for group in groups)
        self.counters["removed_blocks"] += removed
        while self.entry_table.drop_leaving(groups, STEP_BLOCKS) == STEP_BLOCKS:
            yield
        return removed

    def expire(self) -> float:
        """Ends leases, tickets and quarantines whose deadline has come; returns the time. Cheap when there is none.

        Where they are many, it ends some of them, and later calls the others.
        """
        now = self._clock()
        if now >= self.use_times.next_mark:
            self.use_times.mark(now, self.placement.stamp)
        if now >= self.pins.next_end:
            self.pins.expire(now)
        self._settle(now, SETTLED_PER_CALL)
        return now

    def expire_owned(self, owners: Container[str]) -> Steps[None]:
        """Ends the leases and tickets of clients that may hold nothing any more, as if their deadlines had come."""
        yield from self._holds.expire_owned(owners, self._clock())

    def settle(self) -> bool:
        """Does some of what is left to do since holds ended or a namespace was closed; False if nothing is."""
        return self._settle(self._clock(), SETTLED_PER_CALL) > 0 or self.placement.requeue()

    def _settle(self, now: float, count: int) -> int:
        """As `expire`, for up to about `count` entries; returns how many holds, entries or slots it has ended."""
        ended = self._holds.settle(now, count)
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
            dropped += self.entry_table.drop_leaving(namespace.groups, count - dropped)
            if not namespace.is_empty:
                break
            self.placement.remove(namespace.groups)
            del self._namespaces.closing[namespace.fingerprint]
            for listener in self._on_closed:
                listener(namespace)
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
            pinned_bytes=self.pins.pinned_bytes(),
            counters=dict(self.counters),
        )

    def check_integrity(self) -> None:
        """Recomputes the invariants from scratch; raises AssertionError. For tests: it visits every slot."""
        namespaces = (*self._namespaces.values(), *self._namespaces.closing.values())
        entries = [entry for namespace in namespaces for entry in namespace.entries()]
        entry_table = self.entry_table
        quarantined = self._quarantine.by_offset()
        check_slots(self.arena, entries, quarantined)
        check_holds(entries, list(quarantined.values()), self._holds.all_leases(), self._holds.all_tickets())
        check_prefixes(entries)
        now = self._clock()
        self.pins.expire(now)
        self.pins.check(entries, now)
        assert len(entries) == entry_table.num_live, "the count of entries is off"
        assert sum(entry.complete for entry in entries) == entry_table.num_complete, "the count of the complete is off"
