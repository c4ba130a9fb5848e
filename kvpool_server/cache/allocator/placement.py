"""Room for new entries: which slots to take, and whom to evict for them.

A put that would take a subject over its quota takes room from that subject first: slots of the same size, then others.
Slot sizes share the arena fairly. A size that needs room takes it, in this order:
1. from slots and extents that are free;
2. from superseded namespaces: entries of its own size, then whole extents of others;
3. an extent of a size whose every use is older than our own oldest candidate's (a model that is gone gives way);
4. while it has less than its share of extents: the coldest extent of the size that has most; where somebody reads or
   writes in each of those, one is emptied for it (`claim`);
5. from entries of its own size, as the policies say.
Decides only: `residents` drops the victims, then takes the slots.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

from kvpool.errors import OutOfSpaceError
from kvpool.quotas import size_text
from kvpool_server.cache.allocator.arena import Arena, Extent
from kvpool_server.cache.allocator.extent_drain import ExtentDrain
from kvpool_server.cache.allocator.superseded import Superseded
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.eviction import Policy
from kvpool_server.cache.eviction.partitions import Partition, Partitions, oldest_stamp, take
from kvpool_server.cache.eviction.victims import Victims
from kvpool_server.cache.quotas import Account

SAMPLED_SLOTS = 32
"""How many entries say how cold an extent is: enough to rank extents, few enough for extents of any size."""


class NoRoomError(OutOfSpaceError):
    """No room although less would be enough: what is held stands in the way, and the pool knows who holds it.

    Args:
        what: was wanted.
        elsewhere: what part of the arena is not to be had, for which reason; empty if there is none.
        fix: what to do.
        account: whose quota it is about; None: the arena.
    """

    def __init__(self, what: str, elsewhere: str, fix: str, account: Account | None = None):
        super().__init__(f"{what}; {fix}")
        self._what, self._elsewhere, self._fix = what, elsewhere, fix
        self.account = account

    def because(self, held: str) -> OutOfSpaceError:
        """The whole sentence, with what is held, in words."""
        reasons = "; ".join(filter(None, (held, self._elsewhere)))
        return OutOfSpaceError(f"{self._what}: {reasons}; {self._fix}" if reasons else str(self))


class Placement:
    """The arena, the eviction policies, and the stamp of each slot size's last use.

    Args:
        policy: makes an eviction policy.
        counters: counts refusals and what quotas cost, among others' doings.

    Attributes:
        superseded: groups of superseded namespaces.
        claim: of a size on an extent that cannot be given up at once.
    """

    def __init__(self, arena: Arena, policy: Callable[[], Policy], counters: Counter[str]):
        self.arena = arena
        self.superseded = Superseded()
        self.drain = ExtentDrain(arena)
        self._partitions = Partitions(policy)
        self._counters = counters
        self._last_used: dict[int, int] = {}
        self._stamp = 0

    def policy(self, group: Group) -> Policy:
        """The one that a group's entries are under."""
        return self._partitions.policy(group)

    def place(self, placed: Iterable[tuple[Group, tuple[Account, ...]]]) -> None:
        """Says under which quotas groups are from now on."""
        self._partitions.place(placed, self._stamp)

    def remove(self, groups: Sequence[Group]) -> None:
        """Forgets the groups of a namespace that is closed and empty."""
        self.superseded.remove(groups)
        for group in groups:
            self._partitions.remove(group)

    def touch(self, slot_bytes: int, stamp: int) -> None:
        self._last_used[slot_bytes] = self._stamp = stamp

    def victims(self, group: Group, count: int) -> list[Entry]:
        """Who must go so that `count` slots can be taken for a group.

        Raises:
            OutOfSpaceError: that cannot be; nothing has changed.
        """
        slot_bytes = group.spec.slot_bytes
        victims = Victims()
        for account in self._partitions.of(group).accounts:
            if self._settle(account, victims, slot_bytes, count):
                self._counters["over_quota_puts"] += 1
                victims.undo(self.policy)
                raise _over_quota(account, slot_bytes, count)
        for_quotas = len(victims.entries)
        if not self._make_room(slot_bytes, count, victims):
            self._counters["out_of_space_puts"] += 1
            victims.undo(self.policy)
            raise NoRoomError(
                f"no room for {count} blocks of {slot_bytes} bytes",
                self._elsewhere(slot_bytes, count),
                "put fewer at once, try again later, or start kvpool-server with more --memory",
            )
        self._counters["quota_evicted_blocks"] += for_quotas
        return victims.entries

    def _elsewhere(self, slot_bytes: int, count: int) -> str:
        """Why there is less than the whole arena for a slot size; empty if there is not."""
        arena = self.arena
        most = arena.num_extents * arena.slots_per_extent(slot_bytes)
        if count > most:
            return f"the whole arena of {size_text(arena.arena_bytes)} has {most} slots of this size"
        others = sum(len(arena.extents(size)) for size in arena.sizes() if size != slot_bytes) * arena.extent_bytes
        parts = [f"{size_text(others)} of the arena belong to blocks of other sizes"] if others else []
        if arena.unbacked_bytes:
            parts.append(f"{size_text(arena.unbacked_bytes)} have no memory yet, for the server has just started")
        return "; ".join(parts)

    def next_victims(self, reserve: float, needs: Mapping[int, int], max_bytes: int) -> Victims:
        """Who should go soon, as the policies say, so that a share of each slot size's slots is free for puts.

        They are out of the policies' hands until they are dropped, or given back with `spare`.

        Args:
            needs: of a slot size, how many more slots should be free.
            max_bytes: of all their slots; of one, if that is more.
        """
        victims = Victims()
        for size, short in self._shortages(reserve, needs):
            if max_bytes > 0:
                count = min(short, max(1, max_bytes // size))
                max_bytes -= size * take(self._partitions.of_size(size), count, victims, self._stamp)
        return victims

    def superseded_ahead(self, reserve: float, needs: Mapping[int, int]) -> list[Entry]:
        """As `next_victims`, of superseded namespaces: they come first, and nobody needs their bytes."""
        victims = Victims()
        for size, short in self._shortages(reserve, needs) if self.superseded else ():
            groups = {group for partition in self._partitions.of_size(size) for group in partition.groups}
            self.superseded.take(groups, short, victims)
        return victims.entries

    def _shortages(self, reserve: float, needs: Mapping[int, int]) -> list[tuple[int, int]]:
        """Slot sizes of which fewer slots are free than should be, and by how many."""
        short = []
        for size in self.arena.sizes():
            slots = len(self.arena.extents(size)) * self.arena.slots_per_extent(size)
            short.append((size, math.ceil(slots * reserve) + needs.get(size, 0) - self.arena.available(size)))
        return [(size, count) for size, count in short if count > 0]

    def spare(self, entry: Entry, chosen_by: Policy) -> None:
        """Takes back who does not go after all, unless it is under another policy by now, which has queued it."""
        if self.policy(entry.group) is chosen_by:
            chosen_by.restore([entry])

    def surplus(self, accounts: Iterable[Account]) -> list[Entry]:
        """Who must go so that no subject has more than its quota, as far as they may."""
        victims = Victims()
        for account in accounts:
            self._settle(account, victims)
        self._counters["quota_evicted_blocks"] += len(victims.entries)
        return victims.entries

    def vacate(self, now: float) -> list[Entry]:
        """Who must go for a size that has less than its share of extents, and found none that could be given up."""
        if self.drain.held or not self.drain.wanted_by:
            return []
        sizes = [size for size in self.arena.sizes() if size != self.drain.wanted_by]
        most = max((self.arena.extents(size) for size in sizes), key=len, default=[])
        if len(most) <= 1:
            self.drain.wanted_by = 0
            return []
        self.drain.begin(min(most, key=_num_in_use), now)
        return self.drain.idle(now)

    def _settle(self, account: Account, victims: Victims, slot_bytes: int = 0, count: int = 0) -> int:
        """Chooses among a subject's own so that `count` more slots fit its quota; by how many bytes they do not."""
        over = account.used_bytes + count * slot_bytes - account.limit_bytes
        if over <= 0:
            return 0
        over -= victims.nbytes(account.groups.__contains__)
        partitions = self._partitions.of_account(account)
        sizes = sorted({partition.slot_bytes for partition in partitions}, key=lambda size: (size != slot_bytes, -size))
        for size in sizes:
            if over <= 0:
                break
            alike = [partition for partition in partitions if partition.slot_bytes == size]
            over -= size * self._take(alike, -(-over // size), victims)
        return max(over, 0)

    def _take(self, partitions: Sequence[Partition], count: int, victims: Victims) -> int:
        """Adds up to `count` victims of partitions of one slot size, the superseded first; how many there were."""
        groups = {group for partition in partitions for group in partition.groups} if self.superseded else ()
        taken = self.superseded.take(groups, count, victims)
        return taken + take(partitions, count - taken, victims, self._stamp) if taken < count else taken

    def _make_room(self, slot_bytes: int, count: int, victims: Victims) -> bool:
        """Chooses until `count` slots of this size can be taken; whether they can."""
        freed = sum(entry.group.spec.slot_bytes == slot_bytes for entry in victims.entries)
        short = count - freed - self.arena.available(slot_bytes)
        if short <= 0:
            return True
        mine = self._partitions.of_size(slot_bytes)
        if self.superseded:
            short -= self.superseded.take({group for partition in mine for group in partition.groups}, short, victims)
        per_extent = self.arena.slots_per_extent(slot_bytes)
        for extent in self._donations(slot_bytes, mine, victims):
            if short <= 0:
                return True
            victims.add(owner for owner in extent.owners if owner is not None)
            short -= per_extent
        return short <= 0 or take(mine, short, victims, self._stamp) == short

    def _donations(self, slot_bytes: int, mine: Sequence[Partition], victims: Victims) -> Iterator[Extent]:
        """Extents that other sizes give up to this one, coldest first. Looks at a size only when it is to give."""
        held = {size: len(self.arena.extents(size)) for size in self.arena.sizes() if size != slot_bytes}
        if not held:
            return
        num_mine = len(self.arena.extents(slot_bytes))
        given: set[int] = set()
        for extent in self.superseded.extents(self.arena, slot_bytes):
            given.add(extent.start)
            held[extent.slot_bytes] -= 1
            num_mine += 1
            yield extent
        share, held_before = max(1, self.arena.num_extents // (len(held) + 1)), dict(held)
        our_oldest = oldest_stamp(mine, victims)
        colder = [] if our_oldest is None else [size for size in held if self._last_used.get(size, 0) < our_oldest]
        for size in sorted(colder, key=lambda size: self._last_used.get(size, 0)):
            del held[size]
            for extent in self._movable(size, given):
                num_mine += 1
                yield extent
        stocks: dict[int, list[Extent]] = {}
        while num_mine < share and held:
            size = max(held, key=held.__getitem__)
            if held[size] <= share:
                break
            stock = stocks[size] if size in stocks else stocks.setdefault(size, self._movable(size, given))
            if not stock:
                del held[size]
                continue
            held[size] -= 1
            num_mine += 1
            yield stock.pop(0)
        if num_mine < share and any(count > share for count in held_before.values()) and not self.drain.held:
            self.drain.wanted_by = slot_bytes  # In each of theirs somebody reads or writes.
        if num_mine == 0 and held:  # More sizes than extents: whoever was idle longest makes way.
            for size in sorted(held, key=lambda size: self._last_used.get(size, 0)):
                yield from self._movable(size, given)

    def _movable(self, slot_bytes: int, given: Container[int]) -> list[Extent]:
        """Extents in which nobody reads or writes, coldest first, but for those that are given already."""
        extents = [
            extent
            for extent in self.arena.extents(slot_bytes)
            if extent.start not in given
            and all(owner is None or (owner.live and owner.movable) for owner in extent.owners)
        ]
        return sorted(extents, key=_heat)


def _heat(extent: Extent) -> int:
    step = max(1, len(extent.owners) // SAMPLED_SLOTS)
    return max((owner.used for owner in extent.owners[::step] if owner is not None), default=0)


def _num_in_use(extent: Extent) -> int:
    return sum(owner is not None and not (owner.live and owner.movable) for owner in extent.owners)


def _over_quota(account: Account, slot_bytes: int, count: int) -> OutOfSpaceError:
    quota = f"quota {account.subject} = {account.limit_bytes} bytes"
    raise_it = f"raise it (`kvpool quota {account.subject}=SIZE`)"
    if slot_bytes > account.limit_bytes:
        return OutOfSpaceError(f"{quota}: a block of {slot_bytes} bytes is larger; {raise_it}")
    if count * slot_bytes > account.limit_bytes:
        return OutOfSpaceError(
            f"{quota}: {count} blocks of {slot_bytes} bytes are more; put fewer at once, or {raise_it}"
        )
    what = f"{quota}: no room for {count} blocks of {slot_bytes} bytes"
    return NoRoomError(what, "", f"try again later, or {raise_it}", account)
