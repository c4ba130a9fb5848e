"""Which blocks have left the pool, when, why, and for whose blocks: a table of fixed size.

Later departures replace earlier ones. A block is known by 64 bits of its name, mixed with a secret of its group: nobody
can choose which departures are forgotten, and one group's blocks are not another's. Of the departures between a block's
and now, each replaces it with a chance of one in `NUM_SLOTS`: half of what left 700,000 departures ago is still known.

A slot has 13 bytes. Of a block's 64 bits, 20 are its slot's number, which need not be in the slot:

    word     44 bits of the block | 8 bits: seconds since its last use, by their logarithm | 12 bits: for whose blocks
    note     28 bits: seconds from the pool's start until it left | 4 bits: the cause; 0 in an empty slot
    charged  1 byte: the departure was charged to the one for whose blocks it made room
"""

from __future__ import annotations

import itertools
import operator
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.protocol.types import MissCause
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.eviction.policy import TICK
from kvpool_server.cache.steps import Steps

_FOR_BITS, _AGE_BITS, _CAUSE_BITS = 12, 8, 4
NUM_SLOTS = 1 << _FOR_BITS + _AGE_BITS
"""13 bytes each, which take memory once blocks have left."""
BATCH, MAX_WAITING_GROUPS = 1024, 64
"""Departures are entered once so many wait, or of so many groups (10 us each), or when somebody asks."""
MAX_MODELS_PER_TENANT = 64
"""Further models of a tenant have one name, which is empty, where blocks made room for theirs."""
MAX_NAME_CHARS = 128
"""Of a tenant or model for whose blocks others made room."""
SLOTS_PER_STEP = 1 << 16
"""Slots of one step that looks at the whole table, which takes 0.1 ms."""
SAMPLED_SLOTS = 4_096
_CAUSES = (1 << _CAUSE_BITS) - 1
_MAX_LEFT = (1 << 32 - _CAUSE_BITS) - 1
_MASK = np.uint64(NUM_SLOTS - 1)
_FOR = (1 << _FOR_BITS) - 1
_UNUSED = (1 << _AGE_BITS) - 1
"""Code of a last use that is unknown, and the largest of all codes."""
_CODES_PER_DOUBLING = 8
MAX_MARKS, MARKS_PER_AGE = 2_048, 64
"""Of `UseTimes`: beyond so many, those are left out that are nearer to the one behind them than 1/64 of their age."""
UNKNOWN = -1.0


class UseTimes:
    """When a stamp was given: entries record their last use as a stamp (`eviction/policy.py`), people ask for seconds.

    A mark is a stamp and the time at which it was the latest one. There is one for each second at most, and fewer of
    long ago, so that the error is about 3 % of a use's age, and 1 s at least.
    """

    def __init__(self, now: float):
        self.next_mark = now  # From then on, `mark` is worth a call.
        self._marks: list[tuple[float, int]] = []
        self._ascending: tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]] | None = None  # Made once after a mark.

    def mark(self, now: float, stamp: int) -> None:
        """No later stamp has been given before `now`. Call it before a call's stamp is given, from `next_mark` on."""
        self.next_mark = now + 1
        self._ascending = None
        stamp |= TICK - 1  # Whatever the kinds of its uses.
        if self._marks and self._marks[-1][1] == stamp:
            del self._marks[-1]  # The pool was idle: what it uses from now on is not older than this.
        self._marks.append((now, stamp))
        if len(self._marks) > MAX_MARKS:
            kept = self._marks[-1:]
            for mark in self._marks[-2:0:-1]:
                if kept[-1][0] - mark[0] >= (now - mark[0]) / MARKS_PER_AGE:
                    kept.append(mark)
            self._marks = [self._marks[0], *kept[::-1]]

    def ages(self, stamps: Sequence[int], now: float) -> npt.NDArray[np.float64]:
        """Seconds since each stamp was given; `UNKNOWN` for a stamp older than all marks."""
        if self._ascending is None:
            times, stamps_then = [time for time, _ in self._marks], [stamp for _, stamp in self._marks]
            self._ascending = np.array(times, np.float64), np.array(stamps_then, np.int64)
        marked_at, marked = self._ascending
        found = np.searchsorted(marked, np.asarray(stamps, np.int64)) - 1
        ages = np.full(len(stamps), UNKNOWN)
        known = found >= 0
        ages[known] = np.maximum(now - marked_at[found[known]], 0.0)
        return ages


@dataclass(frozen=True, slots=True)
class EvictedFor:
    """Whose put a block made room for.

    Args:
        tenant: as its namespace declares it: clients choose the names of tenants and models.
        model: empty if the tenant has too many.
        is_hidden: another tenant's than that of the caller that is told of it; the names are empty then.
    """

    tenant: str = ""
    model: str = ""
    is_hidden: bool = False


class Departure(NamedTuple):
    """What is known of a block that has left.

    Args:
        unused_seconds: from its last use until it left, to 9 %; None if unknown.
        evicted_for: None if it was not evicted, or not for a single put.
    """

    cause: MissCause
    seconds_ago: int
    unused_seconds: float | None = None
    evicted_for: EvictedFor | None = None


class Memory(NamedTuple):
    """How far back the table reaches.

    Args:
        num_departures: that are remembered.
        oldest_seconds: since the first of these; 0 if there is none.
        half_seconds: of the blocks that left so long ago, at least half are remembered, and more of the later ones.
    """

    num_departures: int
    oldest_seconds: int
    half_seconds: int


class Departures:
    """The blocks that have left one pool, and (`use_times`) when the blocks of the pool were used."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._started_at = clock()
        self.use_times = UseTimes(clock())
        self._secret = secrets.randbits(64)
        self._words = np.zeros(0, np.uint64)  # Of `NUM_SLOTS` from the first departure on.
        self._notes = np.zeros(0, np.uint32)
        self._charged = np.zeros(0, np.bool_)
        self._waiting: defaultdict[tuple[Group, int, int], list[Entry]] = defaultdict(list)
        self._num_waiting = 0
        self._evicted_for: list[EvictedFor | None] = [None]
        self._codes: dict[EvictedFor, int] = {}
        self._num_models: Counter[str] = Counter()

    def left(self, entries: Sequence[Entry], cause: MissCause, evicted_for: Group | None = None) -> None:
        """Entries have left, or are about to, for a put into the group `evicted_for`; None: for no single put."""
        if not entries:
            return
        note = min(int(self._clock() - self._started_at), _MAX_LEFT) << _CAUSE_BITS | cause
        code = 0 if evicted_for is None else self._code(evicted_for)
        for group, members in itertools.groupby(entries, operator.attrgetter("group")):
            self._waiting[group, note, code] += members
        self._num_waiting += len(entries)
        if self._num_waiting >= BATCH or len(self._waiting) >= MAX_WAITING_GROUPS:
            self._enter()

    def _code(self, group: Group) -> int:
        """The number of a group's tenant and model; 0 if there are too many."""
        tenant, model = group.declared_tenant[:MAX_NAME_CHARS], group.namespace.partition("@")[2][:MAX_NAME_CHARS]
        whose = EvictedFor(tenant, model)
        if (code := self._codes.get(whose)) is None:
            if self._num_models[tenant] >= MAX_MODELS_PER_TENANT:
                whose = EvictedFor(tenant, "")
            code = self._codes.get(whose, 0)
            if not code and len(self._evicted_for) <= _FOR:
                code = self._codes[whose] = len(self._evicted_for)
                self._evicted_for.append(whose)
                self._num_models[tenant] += 1
        return code

    def _enter(self) -> None:
        if not self._waiting:
            return
        if not len(self._words):
            self._words, self._notes = np.zeros(NUM_SLOTS, np.uint64), np.zeros(NUM_SLOTS, np.uint32)
            self._charged = np.zeros(NUM_SLOTS, np.bool_)
        waiting, self._waiting = self._waiting, defaultdict(list)
        self._num_waiting = 0
        for (group, note, code), entries in waiting.items():
            tags = self._tags_of(group, [entry.block_hash for entry in entries])
            left_at = self._started_at + (note >> _CAUSE_BITS)
            ages = _age_codes(self.use_times.ages([entry.used for entry in entries], left_at))
            slots = tags & _MASK
            self._words[slots] = tags & ~_MASK | ages << np.uint64(_FOR_BITS) | np.uint64(code)
            self._notes[slots] = note
            self._charged[slots] = False

    def departure(self, group: Group, name: bytes) -> Departure | None:
        """What is known of a block's departure; None if it is not known to have left."""
        self._enter()
        if not len(self._words):
            return None
        tag = int.from_bytes(name[:8], "little") ^ self._salt(group)
        slot = tag & NUM_SLOTS - 1
        word, note = int(self._words[slot]), int(self._notes[slot])
        return self._departure(word, note) if note and not (word ^ tag) >> _FOR_BITS + _AGE_BITS else None

    def _departure(self, word: int, note: int) -> Departure:
        age = word >> _FOR_BITS & _UNUSED
        seconds_ago = max(int(self._clock() - self._started_at) - (note >> _CAUSE_BITS), 0)
        unused = None if age == _UNUSED else 2 ** (age / _CODES_PER_DOUBLING) - 1
        return Departure(MissCause(note & _CAUSES), seconds_ago, unused, self._evicted_for[word & _FOR])

    def causes(self, group: Group, names: Sequence[bytes]) -> npt.NDArray[np.uint32]:
        """The cause of each block's departure, of blocks of one prefix of which the first is known to have left.

        0 (`NEVER_STORED`) from the first block on behind which none is known to have left. A block before that was
        stored, too, for nobody stores a block without those before it: if its departure is forgotten, it counts for
        the cause of the block before it.
        """
        slots, last = self._slots(group, names)
        causes = np.zeros(len(names), np.uint32)
        causes[:last] = self._notes[slots[:last]] & _CAUSES
        return causes

    def departures(self, group: Group, names: Sequence[bytes], is_prefix: bool) -> list[tuple[Departure | None, int]]:
        """What is known of the departures of successive blocks, and of how many blocks it is known.

        With `is_prefix` blocks are known as in `causes`, and one None stands for all blocks behind the last known one.
        Else None stands for each block that is not known to have left.
        """
        if not is_prefix or len(names) == 1:
            each = [self.departure(group, name) for name in names]
            return [(found, len(list(same))) for found, same in itertools.groupby(each)]
        slots, last = self._slots(group, names)
        if not last:
            return [(None, len(names))]
        words, notes = self._words[slots[:last]] & _MASK, self._notes[slots[:last]]
        changed = np.flatnonzero((np.diff(words) != 0) | (np.diff(notes) != 0)) + 1
        ends = [*changed.tolist(), last]
        found: list[tuple[Departure | None, int]] = [
            (self._departure(int(words[start]), int(notes[start])), stop - start)
            for start, stop in zip([0, *ends], ends, strict=False)
        ]
        return [*found, (None, len(names) - last)] if last < len(names) else found

    def charge(self, group: Group, names: Sequence[bytes], payer: str) -> tuple[Counter[EvictedFor], bool]:
        """Charges the departures of some blocks to those for whose puts they made room, each once; not to `payer`.

        Returns the number of departures that were charged now, for each that is known; and whether there were any that
        were charged now or before.
        """
        slots, last = self._slots(group, names)
        slots = np.unique(slots[:last])
        codes = (self._words[slots] & np.uint64(_FOR)).astype(np.intp)
        others = np.array(
            [whose is not None and whose.tenant != payer[:MAX_NAME_CHARS] for whose in self._evicted_for], np.bool_
        )
        slots, codes = slots[others[codes]], codes[others[codes]]
        is_new = ~self._charged[slots]
        self._charged[slots] = True
        counts = np.bincount(codes[is_new])
        charged = zip(self._evicted_for, counts.tolist(), strict=False)
        return Counter({whose: count for whose, count in charged if whose and count}), len(slots) > 0

    def _slots(self, group: Group, names: Sequence[bytes]) -> tuple[npt.NDArray[np.uint64], int]:
        """The slot that tells of each block, and of how many of the first blocks one does."""
        self._enter()
        if not len(self._words):
            return np.zeros(0, np.uint64), 0
        tags = self._tags_of(group, names)
        slots = tags & _MASK
        known = np.flatnonzero(((self._words[slots] ^ tags) & ~_MASK == 0) & (self._notes[slots] != 0))
        if not len(known):
            return slots, 0
        last = int(known[-1]) + 1
        known_before = np.full(last, known[0])
        known_before[known] = known
        slots[:last] = slots[np.maximum.accumulate(known_before)]
        return slots, last

    def memory_in_steps(self) -> Steps[Memory]:
        self._enter()
        num, oldest = 0, _MAX_LEFT
        for start in range(0, len(self._notes), SLOTS_PER_STEP):
            notes = self._notes[start : start + SLOTS_PER_STEP]
            if filled := int(np.count_nonzero(notes)):
                num += filled
                oldest = min(oldest, int(notes[notes != 0].min()) >> _CAUSE_BITS)
            yield
        if not num:
            return Memory(0, 0, 0)
        now = int(self._clock() - self._started_at)
        # Blocks are known with a chance of exp(-departures since / slots), so in a full table those that left at the
        # median time are known with a chance of one half. A table that is not half full knows more than half of all.
        sampled = np.sort(self._notes[:SAMPLED_SLOTS] >> _CAUSE_BITS)
        half = int(sampled[len(sampled) // 2]) if 2 * num >= NUM_SLOTS else oldest
        return Memory(num, max(now - oldest, 0), max(now - half, 0))

    def _tags_of(self, group: Group, names: Sequence[bytes]) -> npt.NDArray[np.uint64]:
        """A name is `HASH_BYTES` of a hash; the first 8 bytes tell it from others."""
        words = np.frombuffer(b"".join(names), "<u8").reshape(len(names), -1)
        return words[:, 0] ^ np.uint64(self._salt(group))

    def _salt(self, group: Group) -> int:
        return xxhash.xxh3_64_intdigest(group.fingerprint + group.idx.to_bytes(4, "little"), self._secret)


def _age_codes(ages: npt.NDArray[np.float64]) -> npt.NDArray[np.uint64]:
    """Eight codes for each doubling of the age."""
    codes = np.rint(np.log2(1 + np.maximum(ages, 0.0)) * _CODES_PER_DOUBLING)
    return np.where(ages == UNKNOWN, _UNUSED, np.minimum(codes, _UNUSED - 1)).astype(np.uint64)
