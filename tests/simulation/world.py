"""A pool, memory with real bytes, clients that write and read it, and an oracle that knows what each may see.

The oracle is a plain dict: block -> what complete put_ends covered of it. It learns from the pool only what a client
learns (grants, hits, regions) and, through the arena it lends the pool, which slots are handed out and given back.
Freed slots are poisoned, so whoever reads one reads garbage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpool.protocol.errors import KVPoolError, OutOfSpaceError
from kvpool.protocol.hashing import checksum
from kvpool.protocol.types import BlockRun, Located, Lookup, PutReceipt, PutStatus, Quota, ShardRange
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.donations import DRAIN_S
from kvpool_server.cache.entry import Entry, Observer
from kvpool_server.cache.eviction import DEFAULT_POLICY, POLICIES
from kvpool_server.cache.steps import finish
from kvpool_server.sharing import Limits
from testbed.pool_at_once import PoolAtOnce
from tests.support.clock import FakeClock
from tests.support.integrity import check_integrity
from tests.support.values import block_hash, group_spec, namespace_spec
from tests.support.verification import verify

EXTENT_BYTES, NUM_EXTENTS = 64, 4
LIMITS = Limits(
    max_batch_blocks=8,
    max_lookup_blocks=8,
    max_ttl_ms=1_000,
    default_ticket_ttl_ms=100,
    grace_ms=200,
    max_leases=20,
    pin_share=0.4,
)
GRACE_S = LIMITS.grace_ms / 1000
POISON = 0xDD

SPECS = (
    namespace_spec(
        group_spec(chunk_bytes=8, num_shards=2), group_spec(chunk_bytes=24), salt="simulation-0", tenant="acme"
    ),
    namespace_spec(group_spec(chunk_bytes=8, num_shards=2), group_spec(chunk_bytes=10, num_shards=4), salt="sim-1"),
    namespace_spec(
        group_spec(chunk_bytes=8, num_shards=2), group_spec(chunk_bytes=24), salt="simulation-0", tenant="acme",
        weights_epoch="newer",
    ),
)  # fmt: skip
OLDER = {2: 0}
"""Namespaces that have newer weights than others."""
SUBJECTS = {
    "tenant:acme": (0, 2),
    f"namespace:{SPECS[0].fingerprint().hex()[:10]}": (0,),
    f"namespace:{SPECS[1].fingerprint().hex()}": (1,),
}
"""Who may have a quota: which namespaces count."""
GROUPS = tuple((space, idx) for space, spec in enumerate(SPECS) for idx in range(len(spec.groups)))
TENANTS = tuple(sorted({spec.tenant for spec in SPECS}))
NAMES = tuple(range(10))

Group = tuple[int, int]
Block = tuple[Group, int]
"""((namespace, group_idx), name)"""


@dataclass(slots=True)
class Stored:
    """What the oracle knows of a block: its slot, and the bytes of each shard that a put_end covered."""

    slot: int
    shards: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class HeldTicket:
    id: int
    deadline: float
    group: Group
    shards: ShardRange
    blocks: list[tuple[int, int]]
    """(name, slot) of each granted block."""


@dataclass(slots=True)
class HeldLease:
    id: int
    deadline: float
    slots: dict[Block, int]


@dataclass(slots=True)
class OpenRead:
    """A reader between `get` and its copy: where it will read, and what it must find there."""

    lease: HeldLease
    offset: int
    expected: bytes


class WatchedArena(Arena):
    """Tells the world which slots are allocated and freed."""

    def __init__(self, world: World):
        super().__init__(EXTENT_BYTES * NUM_EXTENTS, EXTENT_BYTES, zero=world.zero if world.has_tenants else None)
        self._world = world

    def allocate(self, slot_bytes: int, count: int, tenant: str = "") -> list[int] | None:
        offsets = super().allocate(slot_bytes, count, tenant)
        for offset in offsets or ():
            self._world.check_untouchable(offset, slot_bytes, "handed out")
            self._world.check_own(offset, slot_bytes, tenant)
        return offsets

    def free(self, offset: int) -> None:
        extent = self._extents[offset // self.extent_bytes]
        assert extent is not None
        slot_bytes = extent.slot_bytes
        super().free(offset)
        self._world.check_untouchable(offset, slot_bytes, "freed")
        self._world.forget_slot(offset, slot_bytes)


class _Evictions(Observer):
    """Tells the world of evictions: a tenant beyond its quota or share loses even leased blocks."""

    def __init__(self, world: World):
        self._world = world

    def evicted(self, entry: Entry) -> None:
        for block, stored in list(self._world.stored.items()):
            if stored.slot == entry.offset:
                del self._world.stored[block]


class World:
    """Clients, pool and oracle. Every method is one step; a broken promise is an AssertionError.

    Args:
        pool_class: `Pool`, or a broken one that the oracle must catch.
        policy: one of `POLICIES`.
        has_tenants: whether extents belong to tenants.
    """

    def __init__(
        self,
        pool_class: Callable[..., PoolAtOnce] = PoolAtOnce,
        policy: str = DEFAULT_POLICY,
        has_tenants: bool = False,
    ):
        self.clock = FakeClock()
        self.has_tenants = has_tenants
        self.memory = np.full(EXTENT_BYTES * NUM_EXTENTS, POISON, np.uint8)
        self.writers = np.zeros(EXTENT_BYTES * NUM_EXTENTS, np.uint8)
        """Whose byte each is: the number of a tenant in `TENANTS` and 1; 0: nobody's, or zeroed since."""
        self.slots: dict[int, Group] = {}
        """Whose each slot is that was allocated and is not free."""
        self.stored: dict[Block, Stored] = {}
        self.leases: list[HeldLease] = []
        self.tickets: list[HeldTicket] = []
        self.late: list[HeldTicket] = []
        """Expired tickets whose writers may still write."""
        self.reads: list[OpenRead] = []
        self.superseded: set[int] = set()
        self.quotas: dict[str, int] = {}
        self.pins: dict[Block, tuple[int, float]] = {}
        """Of pinned blocks: the slot, and when the pin ends."""
        self.expired: dict[Block, int] = {}
        """Of blocks that a client needs no more and nobody has used since: the slot."""
        self.allowed: dict[str, int] = {}
        """What a subject may hold: its quota, or, where that was lowered under readers and writers, what is left."""
        self._ids = itertools.count(1)
        self._contents = itertools.count(1)
        self.pool = pool_class(WatchedArena(self), self.clock, lambda: next(self._ids), LIMITS, POLICIES[policy])
        if has_tenants:
            self.pool.observe(_Evictions(self))
        self.fingerprints = [spec.fingerprint() for spec in SPECS]
        for space in range(len(SPECS)):
            self.open(space)

    # What the arena reports

    def check_untouchable(self, offset: int, nbytes: int, verb: str) -> None:
        """Asserts that nobody may still read or write [offset, offset + nbytes)."""
        now = self.clock()
        for lease in self.leases:
            if lease.deadline > now:
                assert not any(offset <= slot < offset + nbytes for slot in lease.slots.values()), (
                    f"slot {offset} was {verb} under lease {lease.id}"
                )
        for ticket in [*self.tickets, *self.late]:
            if ticket.deadline + GRACE_S > now:
                assert not any(offset <= slot < offset + nbytes for _, slot in ticket.blocks), (
                    f"slot {offset} was {verb} within the life or grace of ticket {ticket.id}"
                )

    def check_own(self, offset: int, nbytes: int, tenant: str) -> None:
        """Asserts that no byte of another tenant lies in a slot that a tenant gets."""
        if self.has_tenants:
            number = TENANTS.index(tenant) + 1
            there = set(self.writers[offset : offset + nbytes].tolist()) - {0, number}
            assert not there, f"slot {offset} of tenant {tenant!r} has bytes of {[TENANTS[idx - 1] for idx in there]}"

    def zero(self, start: int, nbytes: int) -> None:
        """Zeroes bytes for another tenant."""
        self.check_untouchable(start, nbytes, "zeroed")
        assert not any(start <= slot < start + nbytes for slot in self.slots), "somebody's slot was zeroed"
        self.memory[start : start + nbytes] = 0
        self.writers[start : start + nbytes] = 0

    def forget_slot(self, offset: int, nbytes: int) -> None:
        self.slots.pop(offset, None)
        self.memory[offset : offset + nbytes] = POISON
        self.stored = {block: stored for block, stored in self.stored.items() if stored.slot != offset}

    # Steps

    def open(self, space: int) -> None:
        """An engine opens a namespace; the one with older weights has been replaced."""
        self.pool.open_namespace(SPECS[space])
        self.superseded.discard(space)
        if space in OLDER:
            self.superseded.add(OLDER[space])

    def set_quota(self, subject: str, limit_bytes: int) -> None:
        """Sets a quota, or takes it away."""
        self._expire()
        if not limit_bytes and subject not in self.quotas:
            self._refused(lambda: self.pool.set_quotas([Quota(subject, 0)]))
            return
        self._refused(lambda: self.pool.set_quotas([Quota(subject, limit_bytes + 1), Quota("acme", 1)]))
        if self.has_tenants and subject.startswith("tenant:") and 0 < limit_bytes < EXTENT_BYTES:
            self._refused(lambda: self.pool.set_quotas([Quota(subject, limit_bytes)]))
            return
        self.pool.set_quotas([Quota(subject, limit_bytes)])
        if self.has_tenants and subject.startswith("tenant:"):
            limit_bytes -= limit_bytes % EXTENT_BYTES  # Whole extents count.
        self.quotas[subject] = limit_bytes
        self.allowed[subject] = max(limit_bytes, self.held(subject))
        if not limit_bytes:
            del self.quotas[subject], self.allowed[subject]
        elif not self._busy():
            assert self.held(subject) <= limit_bytes, f"{subject} keeps more than its quota, and nobody uses it"

    def rebalance(self) -> None:
        self._expire()
        self.pool.rebalance()
        for quota in self.pool.quotas():
            held = self.held(quota.subject)
            assert held == quota.used_bytes, f"{quota.subject} holds {held} bytes; the pool says {quota.used_bytes}"
            assert self._busy() or held <= quota.limit_bytes, f"{quota.subject} keeps more than its quota"

    def held(self, subject: str) -> int:
        """Bytes of a subject's slots, or, if extents belong to tenants, of a tenant's extents."""
        slots = {slot: group for slot, group in self.slots.items() if group[0] in SUBJECTS[subject]}
        if self.has_tenants and subject.startswith("tenant:"):
            return len({slot // EXTENT_BYTES for slot in slots}) * EXTENT_BYTES
        return sum(map(self._slot_bytes, slots.values()))

    def _busy(self) -> bool:
        return bool(self.leases or self.tickets or self.late or self.pool.stats().num_quarantined)

    def lookup(self, group: Group, names: Sequence[int], *, ttl_ms: int = 0, prefix_only: bool = False) -> Lookup:
        """Looks up, and keeps the lease if there is one."""
        self._expire()
        leases_before = len(self.leases)
        if ttl_ms:
            self.superseded.discard(group[0])
            self._used(group, names)
        found = self.pool.lookup(
            self.fingerprints[group[0]], [self._run(group, names)], prefix_only=prefix_only, lease_ttl_ms=ttl_ms
        )
        (hits,) = found.hits
        told = {idx for idx in range(len(names)) if hits.complete >> idx & 1}
        if prefix_only:
            assert hits.complete == 0
            told = set(range(hits.num_leading))
        leading = next((idx for idx in range(len(names)) if idx not in told), len(names))
        assert hits.num_leading == leading
        for idx in told:
            self._check_complete((group, names[idx]))
        if found.lease_id:
            assert told and 0 < found.lease_ttl_ms <= min(ttl_ms, LIMITS.max_ttl_ms)
            slots = {(group, names[idx]): self.stored[group, names[idx]].slot for idx in told}
            self.leases.append(HeldLease(found.lease_id, self.clock() + found.lease_ttl_ms / 1000, slots))
        else:
            assert not ttl_ms or not told or leases_before >= LIMITS.max_leases
        return found

    def put_start(
        self, group: Group, names: Sequence[int], shards: ShardRange, *, ttl_ms: int = 100, parent: int | None = None
    ) -> list[PutStatus]:
        self._expire()
        self.pool.expire()  # So that what a refusal changed is not taken for what had expired before it.
        if self.has_tenants:
            self.pool.rebalance()
        idle = not self._busy() and not self.pool.stats().num_quarantined
        before, blocks_before = self._observe(), set(self.stored)
        self.superseded.discard(group[0])
        self._used(group, names)
        candidates = self._candidates(group, names if parent is None else [*names, parent])
        try:
            grant = self.pool.put_start(self.fingerprints[group[0]], [self._run(group, names, parent)], shards, ttl_ms)
        except OutOfSpaceError as error:
            assert self._observe() == before, "a put that found no room changed something"
            self._check_refusal(group, str(error), alone=idle and len(names) == 1 and parent is None)
            raise
        self._check_hints_were_heeded(group, candidates, blocks_before)
        chunk_bytes = self._chunk_bytes(group)
        granted: list[tuple[int, int]] = []
        offsets = iter(grant.offsets)
        wanted = set(range(shards.start, shards.start + shards.count))
        for name, status in zip(names, grant.statuses, strict=True):
            block = group, name
            writers = [t for t in self.tickets if self._writes(t, block, wanted)]
            twice = name in (granted_name for granted_name, _ in granted)
            match status:
                case PutStatus.PRESENT:
                    assert wanted <= self.stored[block].shards.keys(), f"{block} is present and nobody put it"
                case PutStatus.BUSY:
                    assert writers or twice, f"{block} is busy and nobody writes it"
                case PutStatus.GRANTED:
                    assert not writers and not twice, f"{block} has two writers"
                    slot = next(offsets) - shards.start * chunk_bytes
                    self.slots[slot] = group
                    if block not in self.stored or self.stored[block].slot != slot:
                        self.stored[block] = Stored(slot)
                    held = self.stored[block].shards
                    assert not wanted <= held.keys(), f"{block} was present and is written again"
                    for shard in wanted:
                        held.pop(shard, None)
                    granted.append((name, slot))
        assert next(offsets, None) is None
        assert bool(grant.ticket_id) == bool(granted)
        if granted:
            ttl_s = grant.ticket_ttl_ms / 1000
            self.tickets.append(HeldTicket(grant.ticket_id, self.clock() + ttl_s, group, shards, granted))
        return list(grant.statuses)

    def pin(self, group: Group, names: Sequence[int], seconds: int) -> None:
        """Pins blocks, one by one, as a prefix that begins with the first."""
        self._expire()
        for name in names:
            block = group, name
            is_there = self._seen_complete(block)
            steps = self.pool.hints.pin_in_steps(self.fingerprints[group[0]], [self._run(group, [name])], seconds)
            told = finish(steps)
            assert told.num_blocks + told.num_refused == is_there, f"{block} is {is_there * 'not '}there: {told}"
            if told.num_blocks:
                self.pins[block] = self.stored[block].slot, self._entry(block).pinned_until
                self.expired.pop(block, None)

    def unpin(self, group: Group, names: Sequence[int]) -> None:
        """Ends pins, from the end of a prefix."""
        self._expire()
        finish(self.pool.hints.unpin_in_steps(self.fingerprints[group[0]], [self._run(group, names)]))
        for name in names:
            if (group, name) in self.stored and not self._entry((group, name)).pinned_until:
                self.pins.pop((group, name), None)

    def expire(self, group: Group, names: Sequence[int]) -> None:
        """Says that a prefix is needed no more."""
        self._expire()
        expired = [block for block in self.pins if self._is_pinned(block)]
        told = finish(self.pool.hints.expire_in_steps(self.fingerprints[group[0]], [self._run(group, names)]))
        now_expired = [name for name in names if (group, name) in self.stored and self._entry((group, name)).used < 0]
        assert told.num_blocks <= len(now_expired)
        assert not {(group, name) for name in now_expired} & set(expired), "a pinned block was expired"
        for name in now_expired:
            self.expired[group, name] = self.stored[group, name].slot

    def _used(self, group: Group, names: Sequence[int]) -> None:
        for name in names:
            self.expired.pop((group, name), None)

    def _is_pinned(self, block: Block) -> bool:
        slot, until = self.pins.get(block, (-1, 0.0))
        return until > self.clock() and block in self.stored and self.stored[block].slot == slot

    def _entry(self, block: Block) -> Entry:
        namespace = self.pool.namespace(self.fingerprints[block[0][0]])
        assert namespace is not None
        entry = namespace.groups[block[0][1]].index.get(block_hash(block[1]))
        assert entry is not None
        return entry

    def _rank(self, block: Block) -> int:
        """How late a block is evicted, by the hints for it."""
        if self._is_pinned(block):
            return 2
        return 0 if self.expired.get(block) == self.stored[block].slot else 1

    def _candidates(self, group: Group, named: Sequence[int]) -> dict[Block, tuple[int, bool]]:
        """The rank of each block of a slot size, and whether it may be evicted at once, before a put."""
        found = {}
        for block in self.stored:
            if self._slot_bytes(block[0]) == self._slot_bytes(group) and self._shares_arena(block[0], group):
                entry = self._entry(block)
                is_named = block[0] == group and block[1] in named
                found[block] = self._rank(block), entry.movable and not entry.children and not is_named
        return found

    def _shares_arena(self, one: Group, other: Group) -> bool:
        return not self.has_tenants or SPECS[one[0]].tenant == SPECS[other[0]].tenant

    def _check_hints_were_heeded(
        self, group: Group, before: dict[Block, tuple[int, bool]], blocks_before: set[Block]
    ) -> None:
        """Asserts that a put evicted no block while one stayed that hints put before it."""
        if self.quotas or self.pool.placement.drain.is_active:
            return  # Evictions for a quota, or to drain an extent, are of those that hold too much.
        gone = {block for block in before if block not in self.stored}
        stayed = [rank for block, (rank, is_free) in before.items() if is_free and block in self.stored]
        for block in gone & blocks_before:
            assert before[block][0] <= min(stayed, default=2), f"{block} went before others: {before}"

    def put_end(self, ticket: HeldTicket) -> PutReceipt | None:
        """Writes the ticket's bytes and commits them. None if the ticket was not live."""
        self._expire()
        if ticket not in self.tickets:
            self._refused(lambda: self.pool.put_end(ticket.id, []))
            return None
        self._refused(lambda: self.pool.put_end(ticket.id, [0] * (len(ticket.blocks) * ticket.shards.count + 1)))
        chunk_bytes = self._chunk_bytes(ticket.group)
        contents: list[list[bytes]] = []
        for _, slot in ticket.blocks:
            contents.append([self._new_content(chunk_bytes) for _ in range(ticket.shards.count)])
            for nth, content in enumerate(contents[-1]):
                self._write(slot + (ticket.shards.start + nth) * chunk_bytes, content, ticket.group)
        self.tickets.remove(ticket)
        receipt = self.pool.put_end(ticket.id, [checksum(content) for block in contents for content in block])
        committed = completed = 0
        for (name, slot), chunks in zip(ticket.blocks, contents, strict=True):
            stored = self.stored.get((ticket.group, name))
            if stored is None or stored.slot != slot:
                continue  # Removed meanwhile.
            stored.shards.update(enumerate(chunks, ticket.shards.start))
            committed += 1
            completed += len(stored.shards) == self._num_shards(ticket.group)
        assert receipt == PutReceipt(committed, completed)
        return receipt

    def put_revoke(self, ticket: HeldTicket) -> bool:
        self._expire()
        live = ticket in self.tickets
        if live:
            self.tickets.remove(ticket)
        assert self.pool.put_revoke(ticket.id) == live
        return live

    def write_late(self, ticket: HeldTicket) -> None:
        """A writer that does not know that its ticket has expired, or that its blocks are gone."""
        assert ticket.deadline + GRACE_S > self.clock()
        chunk_bytes = self._chunk_bytes(ticket.group)
        for _, slot in ticket.blocks:
            late = b"\xee" * (ticket.shards.count * chunk_bytes)
            self._write(slot + ticket.shards.start * chunk_bytes, late, ticket.group)

    def get(self, lease: HeldLease, group: Group, names: Sequence[int], shards: ShardRange) -> Located | None:
        """Locates blocks and opens reads on them. None if the lease was not live."""
        self._expire()
        fingerprint, run = self.fingerprints[group[0]], self._run(group, names)
        if lease not in self.leases:
            self._refused(lambda: self.pool.get(lease.id, fingerprint, [run], shards))
            return None
        located = self.pool.get(lease.id, fingerprint, [run], shards)
        offsets, sums = iter(located.offsets), iter(located.checksums)
        for name, present in zip(names, located.present, strict=True):
            block = group, name
            stored = self.stored.get(block)
            covered = stored is not None and lease.slots.get(block) == stored.slot
            assert present == covered, f"lease {lease.id} and {block}: present is {present}"
            if not present:
                continue
            assert stored is not None
            self._check_complete(block)
            chunks = [stored.shards[shard] for shard in range(shards.start, shards.start + shards.count)]
            assert [next(sums) for _ in chunks] == [checksum(chunk) for chunk in chunks]
            self.reads.append(OpenRead(lease, next(offsets), b"".join(chunks)))
        assert next(offsets, None) is None and next(sums, None) is None
        assert located.lease_remaining_ms <= (lease.deadline - self.clock()) * 1000
        self.check_reads()
        return located

    def check_reads(self) -> None:
        """Every reader whose lease lives finds what was put, whatever happened since its `get`."""
        self.reads = [read for read in self.reads if read.lease in self.leases and read.lease.deadline > self.clock()]
        for read in self.reads:
            found = self.memory[read.offset : read.offset + len(read.expected)].tobytes()
            assert found == read.expected, f"a reader under lease {read.lease.id} sees bytes that nobody committed"

    def release(self, lease: HeldLease) -> None:
        self._expire()
        live = lease in self.leases
        if live:
            self.leases.remove(lease)
        assert self.pool.release([lease.id]) == live

    def verify(self, group: Group, names: Sequence[int], corrupt: int | None = None) -> None:
        """Has blocks checked where they lie, one of them with a flipped bit."""
        self._expire()
        known = {name for name in names if self._complete((group, name))}
        there = {name for name in known if self._seen_complete((group, name))}
        bad = corrupt if corrupt in there and not self._read_now((group, corrupt)) else None
        if bad is not None:
            self.memory[self.stored[group, bad].slot] ^= 0x10
        checked, dropped = verify(self.pool, self.fingerprints[group[0]], [self._run(group, names)], self.memory)
        assert (checked, dropped) == (len(there), int(bad is not None))
        if bad is not None:
            self.stored.pop((group, bad), None)

    def remove(self, group: Group, names: Sequence[int]) -> None:
        self._expire()
        self.pool.remove(self.fingerprints[group[0]], [self._run(group, names)])
        for name in names:
            self.stored.pop((group, name), None)

    def clear(self, space: int | None) -> None:
        self._expire()
        self.pool.clear(b"" if space is None else self.fingerprints[space])
        for block in list(self.stored):
            if space is None or block[0][0] == space:
                del self.stored[block]

    def advance(self, seconds: float, *, tell_pool: bool) -> None:
        self.clock.advance(seconds)
        self._expire()
        if tell_pool:
            self.pool.expire()

    def bad_calls(self) -> None:
        """Malformed and outdated requests are refused and change nothing."""
        self._expire()
        self.pool.expire()
        good, run = self.fingerprints[0], self._run((0, 0), [0])
        too_many = BlockRun(0, [block_hash(0)] * (LIMITS.max_batch_blocks + 1))
        other_group = BlockRun(len(SPECS[0].groups), [block_hash(0)])
        both = [run, BlockRun(1, [block_hash(0)])]
        whole = ShardRange(0, 1)
        for call in (
            lambda: self.pool.lookup(bytes(32), [run], prefix_only=True, lease_ttl_ms=100),
            lambda: self.pool.lookup(good, [too_many], prefix_only=True, lease_ttl_ms=100),
            lambda: self.pool.lookup(good, [run, other_group], prefix_only=True, lease_ttl_ms=100),
            lambda: self.pool.put_start(bytes(32), [run], whole),
            lambda: self.pool.put_start(good, [too_many], whole),
            lambda: self.pool.put_start(good, both, whole),
            lambda: self.pool.put_start(good, [other_group], whole),
            lambda: self.pool.put_start(good, [run], ShardRange(1, 2)),
            lambda: self.pool.put_start(good, [run], ShardRange(0, 0)),
            lambda: self.pool.put_end(1 << 60, [1]),
            lambda: self.pool.get(1 << 60, good, [run], whole),
            lambda: self.pool.writable(1 << 60, 0, 1),
            lambda: self.pool.readable(1 << 60, 0, 1),
            lambda: self.pool.remove(bytes(32), [run]),
            lambda: self.pool.clear(bytes(32)),
        ):
            self._refused(call)

    # Checks

    def _check_refusal(self, group: Group, says: str, *, alone: bool) -> None:
        """Asserts that a put was refused for no other's quota, and for none of its own that would let it in."""
        bounds = {subject: limit for subject, limit in self.quotas.items() if group[0] in SUBJECTS[subject]}
        assert "quota" not in says or any(f"quota {subject} =" in says for subject in bounds), f"whose quota? {says}"
        fits = self._slot_bytes(group) <= min(bounds.values(), default=EXTENT_BYTES)
        assert not (alone and fits), f"no room, though nothing is held: {says}"

    def check_quotas(self) -> None:
        """Nobody holds more than its quota, but for what was held already when that was lowered."""
        told = {quota.subject: quota for quota in self.pool.quotas()}
        assert {subject: quota.limit_bytes for subject, quota in told.items()} == self.quotas
        for subject, limit_bytes in self.quotas.items():
            held = self.held(subject)
            assert held <= self.allowed[subject], f"{subject} holds {held} bytes; its quota is {limit_bytes}"
            assert held <= told[subject].used_bytes, f"{subject} holds {held} bytes, and {told[subject]} is told"
            self.allowed[subject] = max(limit_bytes, held)

    def check_pins(self) -> None:
        """No tenant has pinned more than its budget."""
        for tenant in TENANTS:
            pinned = [each for each, _ in filter(self._is_pinned, self.pins) if SPECS[each[0]].tenant == tenant]
            nbytes, most = sum(map(self._slot_bytes, pinned)), LIMITS.pin_share * EXTENT_BYTES * NUM_EXTENTS
            assert nbytes <= most, f"tenant {tenant!r} has pinned {nbytes} of {most} bytes"

    def check(self) -> None:
        """What holds after every step."""
        self.check_pins()
        self.check_quotas()
        check_integrity(self.pool)
        assert {idx for idx, each in enumerate(self.pool.open_namespaces()) if each.superseded} == self.superseded
        self.check_reads()
        for lease in self.leases:
            for block, slot in lease.slots.items():
                stored = self.stored.get(block)
                if lease.deadline > self.clock() and stored is not None and stored.slot == slot:
                    assert self._seen_complete(block), f"{block} is gone under lease {lease.id}"
        for group in GROUPS:
            for name in self.seen(group):
                self._check_complete((group, name))

    def check_nothing_leaks(self) -> None:
        """Everything dropped and expired: all of the arena is free, and every byte of it can be had again."""
        self.clear(None)
        self.advance((LIMITS.max_ttl_ms + LIMITS.grace_ms) / 1000 + DRAIN_S, tell_pool=True)
        self.check()
        stats = self.pool.stats()
        assert stats.free_bytes == stats.arena_bytes, f"{stats.arena_bytes - stats.free_bytes} bytes leaked"
        held = (stats.num_entries, stats.num_incomplete, stats.num_quarantined, stats.num_leases, stats.num_tickets)
        assert held == (0, 0, 0, 0, 0)
        if not self.quotas:
            assert self.pool.arena.available(EXTENT_BYTES, "acme" if self.has_tenants else "") == NUM_EXTENTS

    # Helpers

    def _expire(self) -> None:
        """What the passing of time does, as a client would reckon it."""
        now = self.clock()
        self.leases = [lease for lease in self.leases if lease.deadline > now]
        for ticket in [ticket for ticket in self.tickets if ticket.deadline <= now]:
            self.tickets.remove(ticket)
            self.late.append(ticket)
            for name, slot in ticket.blocks:
                stored = self.stored.get((ticket.group, name))
                if stored is not None and stored.slot == slot:
                    del self.stored[ticket.group, name]
        self.late = [ticket for ticket in self.late if ticket.deadline + GRACE_S > now]

    def _refused(self, call: object) -> None:
        self.pool.expire()
        before = self._observe()
        try:
            call()  # type: ignore[operator]
        except KVPoolError:
            assert self._observe() == before, "a refused call changed something"
            return
        raise AssertionError("a bad call was not refused")

    def _observe(self) -> object:
        """What can be seen of the pool's state from outside."""
        stats = self.pool.stats()
        gauges = (stats.free_bytes, stats.num_entries, stats.num_incomplete, stats.num_quarantined)
        return gauges, stats.num_leases, stats.num_tickets, [self.seen(group) for group in GROUPS]

    def seen(self, group: Group) -> list[int]:
        """Names that an existence check calls complete."""
        seen: list[int] = []
        for start in range(0, len(NAMES), LIMITS.max_batch_blocks):
            names = NAMES[start : start + LIMITS.max_batch_blocks]
            run = self._run(group, names)
            hits = self.pool.lookup(self.fingerprints[group[0]], [run], prefix_only=False).hits[0]
            seen += [name for idx, name in enumerate(names) if hits.complete >> idx & 1]
        return seen

    def _seen_complete(self, block: Block) -> bool:
        return block[1] in self.seen(block[0])

    def _check_complete(self, block: Block) -> None:
        """Asserts that every shard was covered by a put_end, and that its bytes lie in the memory."""
        assert self._complete(block), f"{block} is readable, and not every shard of it was put"
        stored = self.stored[block]
        expected = b"".join(stored.shards[shard] for shard in range(self._num_shards(block[0])))
        found = self.memory[stored.slot : stored.slot + len(expected)].tobytes()
        assert found == expected, f"{block} is readable, and its bytes are not those that were put"

    def _complete(self, block: Block) -> bool:
        stored = self.stored.get(block)
        return stored is not None and len(stored.shards) == self._num_shards(block[0])

    def _read_now(self, block: Block) -> bool:
        return any(self.stored[block].slot in lease.slots.values() for lease in self.leases)

    def _writes(self, ticket: HeldTicket, block: Block, wanted: set[int]) -> bool:
        stored = self.stored.get(block)
        shards = range(ticket.shards.start, ticket.shards.start + ticket.shards.count)
        return (
            ticket.group == block[0]
            and stored is not None
            and (block[1], stored.slot) in ticket.blocks
            and bool(wanted & set(shards))
        )

    def _write(self, offset: int, content: bytes, group: Group) -> None:
        self.memory[offset : offset + len(content)] = np.frombuffer(content, np.uint8)
        self.writers[offset : offset + len(content)] = TENANTS.index(SPECS[group[0]].tenant) + 1

    def _new_content(self, chunk_bytes: int) -> bytes:
        """Bytes that were never stored before, so that stale and mixed ones show."""
        return next(self._contents).to_bytes(4, "little").ljust(chunk_bytes, b"\x5a")

    @staticmethod
    def _run(group: Group, names: Sequence[int], parent: int | None = None) -> BlockRun:
        return BlockRun(group[1], [block_hash(name) for name in names], b"" if parent is None else block_hash(parent))

    @staticmethod
    def _slot_bytes(group: Group) -> int:
        return SPECS[group[0]].groups[group[1]].slot_bytes

    @staticmethod
    def _chunk_bytes(group: Group) -> int:
        return SPECS[group[0]].groups[group[1]].chunk_bytes

    @staticmethod
    def _num_shards(group: Group) -> int:
        return SPECS[group[0]].groups[group[1]].num_shards
