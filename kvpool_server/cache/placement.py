"""Slots for new entries: which to allocate, and which entries to evict for them.

A put that would take a subject over its quota first takes slots from that subject: of the same size, then of others.
Slot sizes share the arena fairly. A size that needs slots gets them, in this order:
1. from free slots and extents;
2. from extents of a size whose every use is older than its own oldest candidate (a model that is no longer used);
3. while it has less than its share of extents: the coldest extent of the size that has most; if each of those holds an
   entry that is leased or being written, one is drained for it (`ExtentDrain`);
4. from entries of its own size, as the policies choose.
Where extents belong to tenants, all of these are of the same tenant. Tenants share the arena fairly, too: one with less
than its share of extents first gets the coldest ones of the tenant that has most. A tenant at its quota or its share
evicts nobody else's entries.
Decides only: the entry table evicts the victims, then allocates the slots.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvpool.protocol.errors import OutOfSpaceError
from kvpool.protocol.text import size_text
from kvpool_server.cache.arena import Arena, Extent
from kvpool_server.cache.donations import MAX_DONATED_SLOTS, Donations, ExtentDrain
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.eviction import TICK, Evictor, Policy
from kvpool_server.cache.eviction.partitions import Account, Partitions, Victims

MAX_VICTIMS = 512
"""Entries that one step evicts, or up to twice as many where the last of them empty an extent: within about 4 ms."""
MAX_SURPLUS_SLOTS = 1_024
"""Entries of an extent beyond a tenant's quota that are looked at in one step, to choose some of them."""
REQUEUED_SLOTS = 256
"""Slots that are visited at a time to queue the entries of a group anew."""
_HELD = "too few can be evicted now: others are leased, being written, moved to or from a tier, or in quarantine"


class Placement:
    """The arena, the eviction policies, and the stamp of the last call that used entries.

    Args:
        longest_hold_s: how long a slot can stay held after its entry was dropped.
        clock: of pins, in seconds.
    """

    def __init__(
        self,
        arena: Arena,
        policy: Callable[[], Policy],
        counters: dict[str, int],
        longest_hold_s: float,
        clock: Callable[[], float],
    ):
        self._arena = arena
        self.drain = ExtentDrain(arena, longest_hold_s)
        self._partitions = Partitions(policy, clock)
        self._counters = counters
        self._clock = clock
        self._donations = Donations(arena, self.drain, self._partitions.last_used, clock)
        self.stamp = 0
        self._requeues: deque[Iterator[None]] = deque()

    def evictor(self, group: Group) -> Evictor:
        """Chooses victims among a group's entries, and those that share its slot size and its quotas."""
        return self._partitions.of(group).evictor

    def expire(self, entry: Entry) -> None:
        """Has an entry evicted before others, unless it is used before."""
        partition = self._partitions.of(entry.group)
        partition.evictor.expire(entry)
        partition.forget_worth()

    def next_stamp(self, groups: Iterable[Group]) -> int:
        """The stamp of a call that uses entries of these groups."""
        self.stamp += TICK
        for group in groups:
            self._partitions.of(group).last_used = self.stamp
        return self.stamp

    def policies(self) -> Iterator[tuple[tuple[str, int], Policy]]:
        """The slot class of each policy; of a class's several by quotas, that of most entries first."""
        for slot_class in self._arena.classes():
            for partition in sorted(self._partitions.of_class(slot_class), key=lambda each: -len(each.evictor)):
                yield slot_class, partition.evictor.policy

    def adopt(self, group: Group, entries: Sequence[Entry], learned: bytes) -> None:
        """Queues entries with the stamps of a pool before this one, whose policy of this size had learned this."""
        last = max(entry.used for entry in entries) // TICK * TICK
        self.stamp = max(self.stamp, last)
        partition = self._partitions.of(group)
        if not partition.evictor.num_entries:
            with contextlib.suppress(ValueError):  # Another policy has learned it.
                partition.evictor.policy.relearn(learned)
        partition.last_used = max(partition.last_used, last)
        partition.evictor.move_from(None, len(entries), self.stamp)
        partition.evictor.requeue(entries)

    def assign_quotas(self, assigned: Iterable[tuple[Sequence[Group], tuple[Account, ...]]]) -> None:
        """Says which quotas cover the groups of namespaces. `requeue` has to follow, as long as it returns True."""
        if moved := self._partitions.place(assigned, self.stamp):
            self._requeues.append(self._requeue(moved))

    def requeue(self) -> bool:
        """Queues some entries of groups that have other quotas than before; False if none is left to queue."""
        while self._requeues:
            for _ in self._requeues[0]:
                return True
            self._requeues.popleft()
        return False

    def _requeue(self, groups: set[Group]) -> Iterator[None]:
        # By slots, because an index may change between two steps, and an iteration over it would fail.
        classes = {group.slot_class for group in groups}
        extents = [extent for tenant, size in classes for extent in self._arena.extents(size, tenant)]
        for extent in extents:
            for start in range(0, len(extent.owners), REQUEUED_SLOTS):
                owners = filter(None, extent.owners[start : start + REQUEUED_SLOTS])
                moved = [owner for owner in owners if owner.live and owner.group in groups]
                for entry in sorted(moved, key=lambda entry: entry.used):
                    self.evictor(entry.group).requeue([entry])
                yield

    def remove(self, groups: Sequence[Group]) -> None:
        """Forgets the groups of a namespace that is closed and empty."""
        self._partitions.remove(groups)

    def _slots_of(self, account: Account | None, slot_bytes: int) -> int:
        """How many slots of a size a quota allows (a tenant's counts extents), or the whole arena has."""
        if account is None:
            num_extents = self._arena.num_extents
        elif account.tenant is None:
            return account.limit_bytes // slot_bytes
        else:
            num_extents = self._arena.limit(account.tenant)
        return num_extents * self._arena.slots_per_extent(slot_bytes)

    def most_slots(self, group: Group) -> int:
        """How many slots a group may have at most, in the whole arena and by its quotas."""
        bounds = (None, *self._partitions.accounts(group))
        return min([self._slots_of(account, group.spec.slot_bytes) for account in bounds])

    def check_fits(self, group: Group, count: int) -> None:
        """Raises OutOfSpaceError for more than `most_slots`."""
        for account in (*self._partitions.accounts(group), None):
            if count > self._slots_of(account, group.spec.slot_bytes):
                raise self._no_room(group, count, account)

    def victims(self, group: Group, count: int) -> tuple[list[Entry], bool]:
        """The entries to evict to allocate `count` slots; False if more may have to be evicted, in a later step.

        Raises OutOfSpaceError, or SearchCutError where the search has to go on: nothing has changed then.
        """
        slot_bytes, accounts = group.spec.slot_bytes, self._partitions.accounts(group)
        arena, tenant = self._arena, group.tenant
        bound = next((account for account in accounts if account.tenant is not None), None) if accounts else None
        if bound is not None and arena.num_held(tenant) + arena.num_usable(slot_bytes, tenant) < arena.limit(tenant):
            bound = None  # Its quota allows more extents than it holds and than are unused: the arena is full.
        with Victims(self.evictor) as victims:
            for account in (each for each in accounts if each.tenant is None):
                over = self._choose_for_quota(account, victims, MAX_VICTIMS, slot_bytes, count)
                if over and len(victims.entries) < MAX_VICTIMS:
                    raise self._no_room(group, count, account)
            for_quotas = len(victims.entries)
            if arena.num_surplus(tenant) or not self._choose_for_arena(group.slot_class, count, victims):
                raise self._no_room(group, count, bound)
        self._counters["quota_evicted_blocks"] += for_quotas if bound is None else len(victims.entries)
        return victims.entries, len(victims.entries) < MAX_VICTIMS

    def _no_room(self, group: Group, count: int, account: Account | None) -> OutOfSpaceError:
        """The error of a put for which a quota, or if None the arena, has no room."""
        slot_bytes, arena = group.spec.slot_bytes, self._arena
        blocks = f"{count} blocks of {slot_bytes} bytes"
        if account is None:
            self._counters["out_of_space_puts"] += 1
            return OutOfSpaceError(
                f"no room for {blocks}: {self._why(group, count)}; put fewer at once, try again later, or start "
                "kvpool-server with more --memory"
            )
        self._counters["over_quota_puts"] += 1
        quota = f"quota {account.subject} = {account.limit_bytes} bytes"
        raise_it = f"raise it (`kvpool quota {account.subject}=SIZE`)"
        if slot_bytes > account.limit_bytes:
            return OutOfSpaceError(f"{quota}: a block of {slot_bytes} bytes is larger; {raise_it}")
        if account.tenant is not None:
            quota += f", {account.limit_bytes // arena.extent_bytes} extents of {size_text(arena.extent_bytes)}"
        if count > self._slots_of(account, slot_bytes):
            return OutOfSpaceError(f"{quota}: {blocks} are more; put fewer at once, or {raise_it}")
        return OutOfSpaceError(f"{quota}: no room for {blocks}: {_HELD}; try again later, or {raise_it}")

    def _why(self, group: Group, count: int) -> str:
        """Why too few slots for a group can be freed, and which part of the arena it cannot use."""
        arena, (tenant, slot_bytes) = self._arena, group.slot_class
        if count > (most := self._slots_of(None, slot_bytes)):
            return f"the whole arena of {size_text(arena.arena_bytes)} has {most} slots of this size"
        parts = [_HELD]
        if others := sum(len(arena.extents(size, tenant)) for size in arena.sizes(tenant) if size != slot_bytes):
            parts.append(f"{size_text(others * arena.extent_bytes)} of the arena belong to blocks of other sizes")
        if arena.unbacked_bytes:
            parts.append(f"{size_text(arena.unbacked_bytes)} have no memory yet, for the server has just started")
        return "; ".join(parts)

    def next_victims(self, reserve: float, needs: Mapping[tuple[str, int], int], max_bytes: int) -> list[Entry]:
        """The entries to evict next, so that some of each size's slots are free before a put needs them.

        The policies do not choose them again until they are dropped, or given back with `keep`. Raises SearchCutError.

        Args:
            reserve: the share of each size's slots to keep free.
            needs: slots to keep free beside the reserve, by tenant and slot size.
            max_bytes: of the victims' slots; at least one victim is chosen.
        """
        with Victims(self.evictor) as victims:
            for slot_class, short in self._shortages(reserve, needs):
                if max_bytes > 0:
                    mine, size = self._partitions.of_class(slot_class), slot_class[1]
                    count = min(short, max(1, max_bytes // size), MAX_VICTIMS - len(victims.entries))
                    max_bytes -= size * victims.choose(mine, count, self.stamp)
        return victims.entries

    def _shortages(self, reserve: float, needs: Mapping[tuple[str, int], int]) -> list[tuple[tuple[str, int], int]]:
        """Tenants and slot sizes that have too few free slots, and how many more each needs."""
        short = []
        for tenant, size in self._arena.classes():
            slots = len(self._arena.extents(size, tenant)) * self._arena.slots_per_extent(size)
            wanted = math.ceil(slots * reserve) + needs.get((tenant, size), 0)
            if (count := wanted - self._arena.available(size, tenant)) > 0:
                short.append(((tenant, size), count))
        return short

    def keep(self, entry: Entry, chosen_by: Evictor) -> None:
        """Gives a victim of `next_victims` back to its evictor, unless another evictor has queued it since."""
        if self.evictor(entry.group) is chosen_by:
            chosen_by.restore([entry])

    def over_quota(self, accounts: Iterable[Account], most: int) -> list[Entry]:
        """Up to `most` entries to evict so that no subject exceeds its quota; held ones stay. Raises SearchCutError."""
        with Victims(self.evictor) as victims:
            for account in accounts:
                if len(victims.entries) >= most:
                    break
                if account.tenant is None:
                    self._choose_for_quota(account, victims, most)
                else:
                    self._choose_surplus(account.tenant, victims, most)
        self._counters["quota_evicted_blocks"] += len(victims.entries)
        return victims.entries

    def start_drain(self, now: float, count: int) -> list[Entry]:
        """Starts to drain an extent if a slot size waits for one; up to `count` entries to evict at once."""
        if self.drain.is_active or self.drain.wanted_by is None:
            return []
        extents = self._drainable(*self.drain.wanted_by)
        if len(extents) <= 1:
            self.drain.wanted_by = None
            return []
        self.drain.start(min(extents, key=lambda extent: extent.num_held), now)
        return self.drain.victims(now, count)

    def _drainable(self, tenant: str, slot_bytes: int) -> list[Extent]:
        """Those of the tenant that has most, for one with less than its share; else the tenant's of another size."""
        arena, share = self._arena, self._donations.share(tenant)
        num_held = arena.tenants()
        donor = max(num_held, key=num_held.__getitem__, default=tenant)
        if num_held.get(donor, 0) > share > num_held.get(tenant, 0):
            return list(arena.extents_of(donor))
        sizes = [size for size in arena.sizes(tenant) if size != slot_bytes]
        return max((arena.extents(size, tenant) for size in sizes), key=len, default=[])

    def _choose_for_quota(
        self, account: Account, victims: Victims, most: int, slot_bytes: int = 0, count: int = 0
    ) -> int:
        """Chooses up to `most` victims, so that `count` more slots fit a quota; returns the bytes still too much."""
        over = account.slots_bytes + count * slot_bytes - account.limit_bytes
        if over <= 0:
            return 0
        over -= sum(entry.group.spec.slot_bytes for entry in victims.entries if entry.group in account.groups)
        partitions = self._partitions.of_account(account)
        sizes = sorted({partition.slot_bytes for partition in partitions}, key=lambda size: (size != slot_bytes, -size))
        for choose in (functools.partial(victims.choose_unpinned, stamp=self.stamp), victims.choose_pinned):
            for size in sizes:
                if over <= 0 or (num_left := most - len(victims.entries)) <= 0:
                    break
                alike = [partition for partition in partitions if partition.slot_bytes == size]
                over -= size * choose(alike, min(-(-over // size), num_left))
        return max(over, 0)

    def _choose_surplus(self, tenant: str, victims: Victims, most: int) -> None:
        """Chooses up to about `most` entries in the extents that a tenant has to give up, the emptiest and coldest.

        Leased entries as well, so that the extents are free when the leases have ended, whatever the tenant does.
        """
        extents = sorted(self._arena.extents_of(tenant), key=lambda extent: (extent.num_used, extent.last_use))
        for extent in extents[: self._arena.num_surplus(tenant)]:
            owners = itertools.islice(filter(None, extent.owners), MAX_SURPLUS_SLOTS)
            chosen = (owner for owner in owners if owner.live and not owner.pending)
            victims.add(itertools.islice(chosen, max(0, most - len(victims.entries))))

    def _choose_for_arena(self, slot_class: tuple[str, int], count: int, victims: Victims) -> bool:
        """Chooses until `count` slots of a size can be allocated, or `MAX_VICTIMS`; False if too few can be freed."""
        arena, (tenant, slot_bytes) = self._arena, slot_class
        short = count - arena.num_freed_by(victims.entries, slot_class) - arena.available(slot_bytes, tenant)
        if short <= 0 or len(victims.entries) >= MAX_VICTIMS:
            return True
        mine, per_extent = self._partitions.of_class(slot_class), arena.slots_per_extent(slot_bytes)
        for extent in self._donations.extents(slot_class, mine, victims):
            if short <= 0 or len(victims.entries) >= MAX_VICTIMS:
                return True
            if extent.num_used > MAX_DONATED_SLOTS:
                if not self.drain.is_active:
                    self.drain.wanted_by = slot_class
                break
            if extent.num_used > MAX_VICTIMS:
                self.drain.keep(extent, slot_class, self._clock())
            victims.add(itertools.islice(filter(None, extent.owners), MAX_VICTIMS))
            short -= per_extent
        while short > 0 and len(victims.entries) < MAX_VICTIMS:
            if (num_chosen := victims.choose(mine, short, self.stamp)) < short:
                return False
            short -= arena.num_freed_by(victims.entries[-num_chosen:], slot_class)
        return True
