"""The pool: a synchronous state machine over entries, leases and tickets. It decides; its callers move the bytes.

`entry_table` keeps the entries, `placement` their slots, `holds` the leases and tickets. The file follows a put. Clock,
ids and arena come from outside, so that a simulation can drive it. Not thread-safe: one event loop owns it.

Invariants (`tests.support.integrity` recomputes them):
- free + reserved + resident + quarantined slots = capacity.
- An entry is readable only when every shard has been covered by a put_end.
- A slot is freed only when no lease covers its entry, no ticket, nor the grace after one, lets anybody write to it, and
  no transfer of a lease or ticket that has ended is under way.
- A call that raises has changed nothing, except that holds may have expired, its namespace counts as used, and a put
  of several steps may have evicted entries.

Calls on many blocks work in steps (`steps.py`). Where many holds end at once, several calls end them: see `settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from kvpool.protocol.errors import InvalidRequestError, OutOfSpaceError
from kvpool.protocol.namespace import GroupSpec, NamespaceSpec
from kvpool.protocol.types import BlockRun, PutGrant, PutReceipt, PutStatus, Quota, RunHits, ShardRange, in_parts
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.counters import COUNTERS, PoolStats
from kvpool_server.cache.departures import Departures
from kvpool_server.cache.entry import Group, Observer
from kvpool_server.cache.entry_table import EntryTable
from kvpool_server.cache.eviction import DEFAULT_POLICY, POLICIES, Policy, SearchCutError
from kvpool_server.cache.explanations import Explanations
from kvpool_server.cache.hints import Hints, Pins
from kvpool_server.cache.holds import Holds, Transfers
from kvpool_server.cache.leases import NOBODY, Owner, Ticket
from kvpool_server.cache.lookups import Lookups, Removals
from kvpool_server.cache.namespaces import Namespaces, PoolNamespace
from kvpool_server.cache.placement import Placement
from kvpool_server.cache.quotas import Quotas
from kvpool_server.cache.steps import LOOKUP_STEP_BLOCKS, SETTLED_PER_CALL, STEP_BLOCKS, Steps
from kvpool_server.sharing import IdentityLimits, Limits, default_limits

TrafficObserver = Callable[[PoolNamespace, Sequence[BlockRun], Sequence[RunHits] | None], None]
"""Called inside a client's call: returns quickly, and does not call the pool. With hits, one for each run, a lookup for
a load has been answered; else a put has begun, and the pool may have some of its blocks. A lookup that waits for a tier
and is repeated is told once. Lookups without a lease are no uses, and are not told."""


class Pool:
    """Entries in an arena, and the leases and tickets on them.

    Args:
        clock: monotonic seconds.
        new_id: unguessable 63-bit ids, never 0, never repeated within a ticket's life, also across restarts.
        policy: makes an eviction policy, for each slot size and each set of quotas.
        transfers: those of the data port.
        limits_of: the limits of an identity.

    Attributes:
        namespaces: the open ones, and those that were closed and still hold entries.
        on_closed: each is called with each namespace that is closed, once it holds nothing any more.
        on_quotas: called when quotas have been set.
        traffic: observers of lookups and puts.
        on_ticket: called with each ticket, before anybody can write under it.
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
        self.pins = Pins(int(arena.arena_bytes * self.limits.pin_share))
        self._departures = Departures(clock)
        grace_s = self.limits.grace_ms / 1000
        self.entry_table = EntryTable(arena, self.placement, self._departures, clock, grace_s, self.counters, self.pins)
        self._holds = Holds(self.entry_table, transfers, self.limits, limits_of, new_id, self.counters)
        self.leases, self.tickets = self._holds.leases, self._holds.tickets
        self.clock = clock
        self.namespaces = Namespaces(self.limits, arena.extent_bytes, arena.has_tenants)
        self.lookups = Lookups(self.namespaces, self._holds, self.placement, self.limits, self.counters, self.expire)
        self.removals = Removals(self.namespaces, self.entry_table, self.counters, self.expire)
        self.hints = Hints(self.namespaces, self.placement, self.pins, clock, self.counters)
        self.explanations = Explanations(self.namespaces, self._departures, clock)
        self._quotas = Quotas(self.limits.max_quotas, arena)
        self.traffic: list[TrafficObserver] = []
        self.on_closed: list[Callable[[PoolNamespace], None]] = []
        self.on_quotas: Callable[[], None] = lambda: None
        self.on_ticket: Callable[[Ticket], None] = lambda ticket: None

    def observe(self, observer: Observer) -> None:
        """Tells an observer of every block that becomes readable, or stops being readable, from now on."""
        self.entry_table.observers.append(observer)

    def tell_traffic(
        self, namespace: PoolNamespace, runs: Sequence[BlockRun], hits: Sequence[RunHits] | None = None
    ) -> None:
        """Tells the observers of a lookup or put, unless it is a measurement's."""
        for observer in () if namespace.is_measurement else self.traffic:
            observer(namespace, runs, hits)

    def open_namespace(
        self, spec: NamespaceSpec, expected_fingerprint: bytes = b"", opener: str = ""
    ) -> tuple[PoolNamespace, bool]:
        """The namespace of a spec, and whether this call opened it, for a client on the host `opener`.

        Raises:
            InvalidRequestError: the spec is malformed, or a block of it does not fit an extent of the arena.
            IncompatibleNamespaceError: the spec's fingerprint is not the expected one.
            OutOfSpaceError: too many namespaces are open, and all of them are in use.
            UnavailableError: the namespace is being closed.
        """
        now = self.clock()
        namespace, created = self.namespaces.open(spec, expected_fingerprint, now, opener)
        if created:
            self._assign_quotas([namespace])
            self._drop_closed(SETTLED_PER_CALL)
        self.namespaces.use(namespace, now)
        self.namespaces.supersede_older(namespace)
        return namespace, created

    def open_namespaces(self) -> list[PoolNamespace]:
        return self.namespaces.values()

    def namespace(self, fingerprint: bytes) -> PoolNamespace | None:
        return self.namespaces.find(fingerprint)

    def group_spec(self, fingerprint: bytes, run: BlockRun) -> GroupSpec:
        """Raises UnknownNamespaceError."""
        return self.namespaces.get(fingerprint).group(run.group_idx).spec

    def quotas(self) -> list[Quota]:
        """All quotas and their usage, by subject."""
        return self._quotas.usage()

    def set_quotas_in_steps(self, quotas: Sequence[Quota]) -> Steps[None]:
        """Sets quotas and deletes those whose limit is 0 bytes, in the first step, then evicts what exceeds them.

        Raises InvalidRequestError if one cannot be set; nothing has changed then.
        """
        self._quotas.set(quotas)
        self._assign_quotas(self.namespaces.values())
        self.on_quotas()
        while self.placement.requeue():
            yield
        while self.rebalance():
            yield

    def _assign_quotas(self, namespaces: Sequence[PoolNamespace]) -> None:
        """Tells the placement which quotas cover each group of these namespaces."""
        covering = [(each.groups, self._quotas.covering(each.spec.tenant, each.fingerprint)) for each in namespaces]
        self.placement.assign_quotas(covering)

    def rebalance(self) -> bool:
        """Evicts some of what exceeds a quota, and starts to drain an extent for a slot size below its share.

        Call it often: entries that are leased or being written stay until a later call. True: more can be evicted now.
        """
        now = self.expire()
        try:
            victims = self.placement.over_quota(self._quotas.accounts(), STEP_BLOCKS)
        except SearchCutError:
            return True
        self.entry_table.evict(victims)
        self.entry_table.evict(self.placement.start_drain(now, STEP_BLOCKS))
        return len(victims) >= STEP_BLOCKS

    def put_start_in_steps(
        self, fingerprint: bytes, runs: Sequence[BlockRun], shards: ShardRange, ttl_ms: int = 0, owner: Owner = NOBODY
    ) -> Steps[PutGrant]:
        """Reserves the shards of every block that is neither present nor being written, under a ticket of the owner.

        Raises OutOfSpaceError if there are too few slots for all of them; no block is reserved then.
        """
        ttl_ms = min(ttl_ms or self.limits.default_ticket_ttl_ms, self.limits.max_ttl_ms)
        ticket, statuses = yield from self.reserve_in_steps(fingerprint, runs, shards, ttl_ms / 1000, owner)
        if not shards.start and (namespace := self.namespace(fingerprint)) is not None:
            self.tell_traffic(namespace, runs)
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
        """As `put_start_in_steps`, uncounted. Returns a ticket, live if it covers any block, and each block's status.

        Args:
            ttl_s: `math.inf`: the caller, in this process, is certain to end the ticket.
        """
        namespace, group = self.namespaces.one_group(fingerprint, runs)
        shards.check(group.spec.num_shards)
        self.limits.check_chunks(runs, shards)
        now = self.expire()
        self.namespaces.use(namespace, now)
        self._holds.check_tickets(owner)
        if self.arena.num_surplus(namespace.tenant):
            self.rebalance()
        ticket, since = Ticket(self.new_id(), now + ttl_s, [], shards, owner=owner), now
        statuses: list[PutStatus] = []
        is_reserved = has_claims = has_waited = False
        self._holds.writing.append(ticket)
        try:
            if sum(map(len, runs)) > self.placement.most_slots(group):
                yield from self._check_fits(group, runs)
            for part in in_parts(runs, STEP_BLOCKS):
                if statuses:
                    yield
                while (reserved := self.entry_table.reserve(group, part, ticket)) is None:
                    has_claims = has_claims or self.arena.start_claims(group.tenant)
                    has_waited = True
                    if self.clock() > since + self.limits.max_ttl_ms / 1000:
                        self.counters["out_of_space_puts"] += 1
                        raise OutOfSpaceError("it takes too long to make room; put fewer at once, or try again later")
                    while self.arena.zero_some(group.tenant):
                        yield
                        since = self.clock()
                    yield
                statuses += reserved
            if has_waited:
                ticket.restart(self.clock() + ttl_s)
            is_reserved = True
        finally:
            self._holds.writing.remove(ticket)
            if has_claims:
                self.arena.end_claims(group.tenant)
            if not is_reserved and ticket.entries:
                self._holds.undo(ticket)
        if ticket.entries:
            self.tickets.add(ticket)
            self.on_ticket(ticket)
        return ticket, statuses

    def _check_fits(self, group: Group, runs: Sequence[BlockRun]) -> Steps[None]:
        """Raises OutOfSpaceError, before anything is evicted, if all that a group may have is too little for a put."""
        new: set[bytes] = set()
        for part in in_parts(runs, LOOKUP_STEP_BLOCKS):
            new.update(name for run in part for name in run.block_hashes if name not in group.index)
            yield
        self.placement.check_fits(group, len(new))

    def put_end_in_steps(self, ticket_id: int, checksums: Sequence[int], owner: Owner = NOBODY) -> Steps[PutReceipt]:
        """Commits the blocks that a ticket covers, some of them in each step; none if bytes are still being written.

        Args:
            checksums: xxh3-64 of each chunk: entries x shards, entry-major.

        Raises:
            LeaseExpiredError: the ticket is not live, or another tenant's.
            InvalidRequestError: there is not one checksum for each chunk; the ticket stays live.
        """
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
        for start in range(0, len(entries), STEP_BLOCKS):
            if start:
                ticket.entries = entries[start:]
                yield
            part = entries[start : start + STEP_BLOCKS]
            done = self.entry_table.commit(part, ticket, checksums[start * count :][: len(part) * count])
            committed, completed = committed + done[0], completed + done[1]
        self._holds.writing.remove(ticket)
        self.counters["put_completed_blocks"] += completed
        if entries and (namespace := self.namespaces.find(entries[0].group.fingerprint)) is not None:
            namespace.stored_bytes += committed * count * entries[0].group.spec.chunk_bytes
        return PutReceipt(committed, completed)

    def put_revoke(self, ticket_id: int, owner: Owner = NOBODY) -> bool:
        """Ends a ticket whose writer has stopped writing, without committing; False if it was not live."""
        return self._holds.revoke(ticket_id, owner, self.expire())

    def writable(self, ticket_id: int, offset: int, nbytes: int, owner: Owner = NOBODY) -> None:
        """Raises unless a live ticket covers [offset, offset + nbytes)."""
        self.tickets.live(ticket_id, owner, self.expire()).check_range(self.arena.owner(offset), offset, nbytes)

    def readable(self, lease_id: int, offset: int, nbytes: int, owner: Owner = NOBODY) -> None:
        """Raises unless a live lease covers [offset, offset + nbytes)."""
        self.leases.live(lease_id, owner, self.expire()).check_range(self.arena.owner(offset), offset, nbytes)

    def release(self, lease_ids: Sequence[int], owner: Owner = NOBODY) -> int:
        """Ends leases; returns how many were live. Those of other tenants count as not live."""
        return self._holds.release(lease_ids, owner, self.expire())

    def expire(self) -> float:
        """Ends leases, tickets and quarantines whose deadline has come, of many only some; returns the time."""
        now = self.clock()
        if now >= self._departures.use_times.next_mark:
            self._departures.use_times.mark(now, self.placement.stamp)
        if now >= self.pins.next_end:
            self.pins.expire(now)
        self._settle(now, SETTLED_PER_CALL)
        return now

    def expire_owned(self, owners: Container[str]) -> Steps[None]:
        """Ends the leases and tickets of clients that may hold nothing any more, as if their deadlines had come."""
        now = self.clock()
        yield from self.leases.expire_owned(owners, now)
        yield from self.tickets.expire_owned(owners, now)

    def settle(self) -> bool:
        """Does some of what is left to do since holds ended or a namespace was closed; False if nothing is."""
        return self._settle(self.clock(), SETTLED_PER_CALL) > 0 or self.placement.requeue()

    def _settle(self, now: float, count: int) -> int:
        """Returns how many holds, entries and slots it visited: about `count` of each at most."""
        ended = self._holds.settle(now, count) + self.entry_table.free_expired(now, count)
        if self.namespaces.closing:
            ended += self._drop_closed(count)
        return ended

    def _drop_closed(self, count: int) -> int:
        """Drops up to `count` entries of namespaces that were closed, and forgets those that are empty."""
        dropped = 0
        for namespace in list(self.namespaces.closing.values()):
            for group in namespace.groups:
                if group.index and not group.leaving:
                    group.start_leaving()
            dropped += self.entry_table.drop_leaving(namespace.groups, count - dropped)
            if not namespace.is_empty:
                break
            self.placement.remove(namespace.groups)
            del self.namespaces.closing[namespace.fingerprint]
            for told in self.on_closed:
                told(namespace)
        return dropped

    def stats(self) -> PoolStats:
        return PoolStats(
            arena_bytes=self.arena.arena_bytes,
            free_bytes=self.arena.arena_bytes - self.arena.used_bytes,
            num_entries=self.entry_table.num_complete,
            num_incomplete=self.entry_table.num_live - self.entry_table.num_complete,
            num_quarantined=len(self.entry_table.quarantine),
            num_leases=len(self.leases),
            num_tickets=len(self.tickets),
            pinned_bytes=self.pins.pinned_bytes(),
            counters=dict(self.counters),
        )
