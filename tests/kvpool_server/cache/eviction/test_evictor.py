"""What an evictor does, whatever its policy."""

from collections import Counter
from contextlib import suppress
from random import Random
from unittest.mock import patch

import pytest

from kvpool_server.cache.entry import Entry
from kvpool_server.cache.eviction import TICK, Evictor, Policy, SearchCutError
from kvpool_server.cache.eviction.evictor import MAX_VISITED, MIN_DEAD_TO_SWEEP, Chosen
from kvpool_server.cache.eviction.policy import PrefixLRU
from tests.support.clock import FakeClock
from tests.support.effort import effort
from tests.support.entries import drop, make_entry


@pytest.fixture
def evictor(policy: type[Policy], clock: FakeClock) -> Evictor:
    clock.now = 100.0
    return Evictor(policy(), clock)


MOST_CHOSEN = 8


class Model:
    """Entries whose uses, leases, pins, expiries and ends come in any order, as a pool tells an evictor of them."""

    def __init__(self, policy: type[Policy], seed: int):
        self.policy, self.dice, self.clock, self.call = policy, Random(seed), FakeClock(100.0), 0
        self.evictor, self.has_expiries = Evictor(policy(), self.clock), seed % 2 == 0
        self.live: list[Entry] = []

    def rank(self, entry: Entry) -> float:
        """Expired entries go first, and pinned ones last, by the ends of their pins."""
        if entry.used < 0:
            return -1
        return entry.pinned_until if entry.pinned_until > self.clock.now else 0

    def stamp(self) -> int:
        self.call += 1
        return self.call * TICK

    def step(self) -> None:
        """Anything but a choice."""
        dice, evictor = self.dice, self.evictor
        entry = dice.choice(self.live) if self.live else None
        kind = dice.randrange(9)
        if entry is None or (kind < 3 and len(self.live) < 16):
            self.store(dice.choice([None, *self.live]), dice.randint(1, 4))
        elif kind == 3:
            evictor.used(_prefix(entry), self.stamp())
        elif kind == 4 and not entry.leases:
            entry.leases = 1
        elif kind < 6 and entry.leases:
            _release(evictor, entry)
        elif kind == 6:
            _pin(entry, dice.choice([0, int(self.clock.now) + 5, int(self.clock.now) + 50]))
            entry.used = entry.used if entry.used >= 0 else self.stamp()
        elif kind == 7 and self.has_expiries and self.rank(entry) <= 0:
            evictor.expire(entry)
        elif kind == 8 and dice.random() < 0.3:
            self.drop(entry)
        self.clock.advance(dice.choice([0, 0, 0, 1, 10]))

    def store(self, parent: Entry | None, count: int) -> None:
        made: list[Entry] = []
        for nth in range(count):
            made.append(make_entry((self.call, nth), 0, made[-1] if made else parent))
        self.evictor.stored(made, self.stamp())
        self.evictor.add(made[-1])
        self.evictor.add(made[-1])
        self.live += made

    def drop(self, *entries: Entry) -> None:
        for each in entries:
            drop(self.evictor, each)
            self.live.remove(each)
            if each.parent is not None and each.parent.live:
                self.evictor.add(each.parent)

    def choose(self) -> None:
        count, pinned = self.dice.randint(1, MOST_CHOSEN), self.dice.random() < 0.5
        with patch("kvpool_server.cache.eviction.evictor.MAX_VISITED", 1_000):
            oldest = self.evictor.oldest_stamp(Chosen())
        gone: Counter[Entry | None] = Counter()  # Victims, and how many of an entry's children are victims.
        victims = _choose(self.evictor, count, pinned)
        for nth in range(len(victims) + 1):
            others = [each for each in self.live if each not in victims[:nth]]
            candidates = [each for each in others if each.movable and each.children == gone[each]]
            allowed = [each for each in candidates if pinned or self.rank(each) <= 0]
            if nth == 0:
                used = [each.used for each in candidates if each.used >= 0 and not each.pinned_until]
                assert not used or (oldest is not None and oldest <= min(used))
            if nth == len(victims):
                assert nth == count or not allowed
                break
            victim, rank = victims[nth], min(map(self.rank, allowed))
            assert victim in allowed and self.rank(victim) == rank
            if self.policy is PrefixLRU and not rank:
                assert victim.used == min(each.used for each in allowed if self.rank(each) == rank)
            gone[victim.parent] += 1
        if self.dice.random() < 0.5:
            self.drop(*victims)
        else:
            self.evictor.restore(victims)

    def end(self) -> None:
        self.drop(*self.live[::-1])
        assert not any(self.evictor._parked.values()) and not self.evictor._unpopped, "dropped entries are kept"
        assert not _choose(self.evictor, 1, pinned=True)
        assert not self.evictor._expired
        assert len(self.evictor) == self.evictor._num_dead, "what is left in the queue is dead"


def _prefix(entry: Entry | None) -> list[Entry]:
    """An entry behind those before it that are there."""
    return [*_prefix(entry.parent), entry] if entry is not None and entry.live else []


@pytest.mark.parametrize("seed", range(effort(20)))
def test_only_candidates_are_chosen_expired_ones_first_and_pinned_ones_last(
    policy: type[Policy], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """However few entries a choice may visit in vain, but for the parents of its victims."""
    monkeypatch.setattr("kvpool_server.cache.eviction.evictor.MAX_VISITED", MOST_CHOSEN + 1)
    model = Model(policy, seed)
    for _ in range(500):
        model.step()
        if model.dice.random() < 0.3:
            model.choose()
    model.end()


def _stored(evictor: Evictor, stamp: int, *prefixes: list[Entry]) -> Evictor:
    for entries in prefixes:
        evictor.stored(entries, stamp)
        evictor.add(entries[-1])
    return evictor


def test_stamps_keep_the_order_of_calls_whatever_the_kind_of_use(evictor: Evictor) -> None:
    prefix = [
        first := make_entry("first"),
        second := make_entry("second", parent=first),
        make_entry("p", parent=second),
    ]
    evictor.stored(prefix, TICK)
    stamps = [prefix[2].used]
    evictor.used(prefix, 2 * TICK)
    stamps.append(prefix[2].used)
    evictor.renewed(prefix, 3 * TICK)
    stamps.append(prefix[2].used)
    assert [stamp // TICK for stamp in stamps] == [1, 2, 3]


def test_entries_dropped_without_being_chosen_do_not_pile_up(evictor: Evictor) -> None:
    for nth in range(20 * MIN_DEAD_TO_SWEEP):
        one = make_entry(nth, nth * TICK)
        evictor.stored([one], nth * TICK)
        evictor.add(one)
        drop(evictor, one)
        assert len(evictor) <= 3 * MIN_DEAD_TO_SWEEP


def _pin(entry: Entry, until: int) -> None:
    before, entry.pinned_until = entry.pinned_until, until
    if entry.queued is not None:
        entry.queued.pin_changed(entry, before)


def _release(evictor: Evictor, entry: Entry) -> None:
    """Ends the only lease of an entry, as the entry table does."""
    entry.leases = 0
    if entry.live:
        evictor.add(entry)


def _choose(evictor: Evictor, count: int, pinned: bool = False) -> list[Entry]:
    """Chooses as often as it takes: each choice goes on where the one before was cut."""
    for _ in range(2 * len(evictor) + 2):
        with suppress(SearchCutError):
            return evictor.choose(count, Chosen(), pinned)
    raise AssertionError("choices that are cut get no further")


def test_many_pins_that_end_at_once_are_queued_some_at_a_time(evictor: Evictor, clock: FakeClock) -> None:
    pinned = [make_entry(nth) for nth in range(1_000)]
    for each in pinned:
        _stored(evictor, TICK, [each])
        _pin(each, 200)
    assert evictor.choose(1, Chosen()) == []
    clock.now = 200.0
    victims = evictor.choose(1, Chosen())
    assert len(victims) == 1 and len(evictor) < 200
    drop(evictor, *victims)
    assert len(evictor.choose(999, Chosen())) == 999, "the others are found when they are needed"


@pytest.mark.parametrize("in_vain", ["leased", "used", "dropped", "expired", "pinned"])
def test_a_choice_that_visits_many_in_vain_is_cut_and_none_visits_them_again(
    evictor: Evictor, monkeypatch: pytest.MonkeyPatch, in_vain: str
) -> None:
    first, many = make_entry("first"), [make_entry(nth) for nth in range(2 * MAX_VISITED)]
    _stored(evictor, TICK, [first], *([each] for each in many))
    last = make_entry("last")
    _stored(evictor, 10_000 * TICK, [last])
    for each in many:
        if in_vain == "dropped":
            each.live = False
        elif in_vain == "used":
            evictor.used([each], 20_000 * TICK)
        elif in_vain == "pinned":
            _pin(each, 200)
        else:
            each.leases = 1
            if in_vain == "expired":
                evictor.expire(each)
    visits, visited = 0, Chosen.visited_in_vain

    def counted(chosen: Chosen) -> None:
        nonlocal visits
        visits += 1
        visited(chosen)

    monkeypatch.setattr(Chosen, "visited_in_vain", counted)
    with pytest.raises(SearchCutError):
        evictor.choose(2, Chosen())
    assert visits == MAX_VISITED + 1
    victims = _choose(evictor, 2)
    assert set(victims) == {first, last}, "what the first choice had found was lost"
    for nth in range(100):
        drop(evictor, *victims)
        _stored(evictor, (10_001 + nth) * TICK, [make_entry(f"fresh {nth}")])
        assert evictor.least_worth(Chosen(), 30_000 * TICK) is not None
        victims = _choose(evictor, 1)
        assert len(victims) == 1
    visits_of_each = 2 if in_vain == "expired" else 1  # As an expired one, and in the queue.
    assert visits <= visits_of_each * len(many) + 10
    if in_vain == "pinned":
        evictor.restore(evictor.choose(len(many), Chosen(), pinned=True))
        before = visits
        assert not evictor.choose(1, Chosen()) and visits == before, "what was given back is visited again"
    if in_vain in ("leased", "expired"):
        for each in many[:400]:
            _release(evictor, each)
        assert set(many[:400]) <= {*victims, *_choose(evictor, 500)}
