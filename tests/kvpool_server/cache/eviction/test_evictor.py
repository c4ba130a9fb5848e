"""What an evictor does, whatever its policy."""

import pytest

from kvpool_server.cache.entry import Entry
from kvpool_server.cache.eviction import TICK, Evictor, Policy, SearchCutError
from kvpool_server.cache.eviction.evictor import MAX_VISITED, MIN_DEAD_TO_SWEEP, Chosen
from tests.support.clock import FakeClock
from tests.support.entries import drop, evict, make_chain, make_entry, queued


@pytest.fixture
def evictor(policy: type[Policy], clock: FakeClock) -> Evictor:
    clock.now = 100.0
    return Evictor(policy(), clock)


def _stored(evictor: Evictor, stamp: int, *prefixes: list[Entry]) -> Evictor:
    for entries in prefixes:
        evictor.stored(entries, stamp)
        evictor.add(entries[-1])
    return evictor


def test_all_or_nothing(evictor: Evictor) -> None:
    prefix = make_chain("p", 0, 0, 0)
    _stored(evictor, TICK, prefix)
    assert evict(evictor, 4) is None
    assert evict(evictor, 3) == prefix[::-1], "the failure changed the queue"


def test_a_prefix_is_evicted_from_its_end(evictor: Evictor) -> None:
    prefixes = [make_chain(name, 0, 0, 0) for name in "abcd"]
    for nth, prefix in enumerate(prefixes, 1):
        _stored(evictor, nth * TICK, prefix)
    victims = evict(evictor, 12) or []
    assert len(set(victims)) == 12
    for prefix in prefixes:
        assert [each for each in victims if each in prefix] == prefix[::-1]


def test_leased_entries_are_skipped_and_kept(evictor: Evictor) -> None:
    a, b, c = make_entry("a"), make_entry("b"), make_entry("c")
    _stored(evictor, TICK, [a], [b], [c])
    a.leases = 1
    assert evict(evictor, 3) is None
    first = evict(evictor, 2)
    assert first is not None and set(first) == {b, c}
    drop(evictor, *first)
    _release(evictor, a)
    assert evict(evictor, 1) == [a]


def test_a_leased_leaf_protects_its_whole_prefix(evictor: Evictor) -> None:
    prefix = make_chain("p", 0, 0, 0)
    prefix[2].leases = 1
    assert evict(_stored(evictor, TICK, prefix), 1) is None


def test_entries_that_are_written_or_dropped_are_no_candidates(evictor: Evictor) -> None:
    written, dropped, idle = make_entry("w"), make_entry("d"), make_entry("i")
    _stored(evictor, TICK, [written], [dropped], [idle])
    written.pending, dropped.live = 1, False
    assert evict(evictor, 1) == [idle]


def test_no_candidate_is_older_than_the_oldest_stamp(evictor: Evictor) -> None:
    assert evictor.oldest_stamp(Chosen()) is None
    a, b = make_entry("a"), make_entry("b")
    _stored(evictor, 8 * TICK, [a])
    _stored(evictor, 800 * TICK, [b])
    first = evictor.oldest_stamp(Chosen())
    assert first is not None and first <= a.used and first % TICK == 0
    assert evictor.oldest_stamp(Chosen()) == first, "looking has changed something"
    assert set(evict(evictor, 2) or ()) == {a, b}


def test_an_entry_added_twice_is_queued_once(evictor: Evictor) -> None:
    one = make_entry("a")
    queued(evictor, one, one)
    assert len(evictor) == 1
    assert evict(evictor, 2) is None
    assert evict(evictor, 1) == [one]


def test_victims_are_not_queued_again_while_they_are_dropped(evictor: Evictor) -> None:
    prefix = make_chain("p", 0, 0, 0)
    _stored(evictor, TICK, prefix)
    victims = evict(evictor, 3) or []
    for victim in victims:
        drop(evictor, victim)
        if victim.parent is not None:
            evictor.add(victim.parent)
    assert len(evictor) == 0


def test_stamps_keep_the_order_of_calls_whatever_the_kind_of_use(evictor: Evictor) -> None:
    prefix = make_chain("p", 0, 0, 0)
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


def _choose(evictor: Evictor, count: int) -> list[Entry]:
    """Chooses as often as it takes."""
    while True:
        try:
            return evictor.choose(count, Chosen())
        except SearchCutError:
            continue


def test_pinned_entries_are_chosen_last_and_only_if_asked_for(evictor: Evictor) -> None:
    a, b, c = make_entry("a"), make_entry("b"), make_entry("c")
    _stored(evictor, TICK, [a], [b], [c])
    _pin(a, 200)
    _pin(b, 150)
    assert evictor.choose(3, Chosen()) == [c]
    assert evictor.choose(3, Chosen(), pinned=True) == [b, a], "the pin that ends first is given back first"


def test_a_pin_can_be_prolonged_and_ended_while_its_entry_is_parked(evictor: Evictor, clock: FakeClock) -> None:
    a, b = make_entry("a"), make_entry("b")
    _stored(evictor, TICK, [a], [b])
    _pin(a, 200)
    _pin(b, 200)
    assert evict(evictor, 1) is None
    _pin(a, 300)
    clock.now = 250.0
    assert evict(evictor, 2) is None
    assert evict(evictor, 1) == [b]
    _pin(a, 0)
    assert evict(evictor, 1) == [a]


def test_parked_entries_that_are_leased_or_dropped_are_not_chosen(evictor: Evictor) -> None:
    a, b, c = make_entry("a"), make_entry("b"), make_entry("c")
    _stored(evictor, TICK, [a], [b], [c])
    for each in (a, b, c):
        _pin(each, 200)
    assert evictor.choose(1, Chosen()) == []
    a.leases = 1
    drop(evictor, b)
    assert evictor.choose(3, Chosen(), pinned=True) == [c]
    _release(evictor, a)
    assert evictor.choose(3, Chosen(), pinned=True) == [a]


def test_choosing_visits_each_pinned_entry_once(evictor: Evictor, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = [make_entry(nth) for nth in range(5_000)]
    for each in pinned:
        _stored(evictor, TICK, [each])
        _pin(each, 200)
    pops = 0
    pop = evictor._queue.pop

    def counted() -> object:
        nonlocal pops
        pops += 1
        return pop()

    monkeypatch.setattr(evictor._queue, "pop", counted)
    for nth in range(100):
        fresh = make_entry(f"fresh{nth}")
        _stored(evictor, (2 + nth) * TICK, [fresh])
        assert _choose(evictor, 1) == [fresh]
        drop(evictor, fresh)
    assert pops < len(pinned) + 1_000


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


def test_expired_entries_are_chosen_first(evictor: Evictor) -> None:
    a, b, c = make_entry("a"), make_entry("b"), make_entry("c")
    _stored(evictor, TICK, [a])
    _stored(evictor, 2 * TICK, [b])
    _stored(evictor, 3 * TICK, [c])
    evictor.expire(c)
    assert evictor.least_worth(Chosen(), 4 * TICK) == float("-inf")
    victims = evict(evictor, 1)
    assert victims == [c]
    evictor.restore([c])
    assert evict(evictor, 3) is not None
    drop(evictor, a, b, c)
    assert len(evictor) == evictor._num_dead, "what is left in the queue is dead"


def test_no_hint_has_an_entry_chosen_before_a_child_that_it_has_got_since(evictor: Evictor) -> None:
    pinned, expired = make_entry("p"), make_entry("e")
    _stored(evictor, TICK, [pinned])
    _pin(pinned, 200)
    assert evictor.choose(1, Chosen()) == []
    _stored(evictor, TICK, [expired])
    evictor.expire(expired)
    leased, child = make_entry("l", parent=pinned), make_entry("c", parent=expired)
    leased.leases = 1
    _stored(evictor, 2 * TICK, [leased], [child])
    assert evictor.choose(4, Chosen(), pinned=True) == [child, expired]


def test_leased_expired_entries_are_skipped_and_kept(evictor: Evictor) -> None:
    a, b = make_entry("a"), make_entry("b")
    _stored(evictor, TICK, [a], [b])
    evictor.expire(a)
    a.leases = 1
    assert evict(evictor, 1) == [b]
    _release(evictor, a)
    assert evict(evictor, 1) == [a]


@pytest.mark.parametrize("expired", [False, True])
def test_choosing_visits_each_leased_entry_once(
    evictor: Evictor, monkeypatch: pytest.MonkeyPatch, *, expired: bool
) -> None:
    leased, others = [make_entry(nth) for nth in range(500)], [make_entry(f"o{nth}") for nth in range(100)]
    _stored(evictor, TICK, *([each] for each in [*leased, *others]))
    for each in leased:
        if expired:
            evictor.expire(each)
        each.leases = 1
    popped: list[object] = []
    pop_expired, pop = evictor._pop_expired, evictor._queue.pop
    monkeypatch.setattr(evictor, "_pop_expired", lambda *args: popped.append(1) or pop_expired(*args))  # type: ignore[func-returns-value]
    monkeypatch.setattr(evictor._queue, "pop", lambda: popped.append(1) or pop())  # type: ignore[func-returns-value]
    chosen: list[Entry] = []
    for _ in range(100):
        assert evictor.least_worth(Chosen(), 2 * TICK) is not None
        victims = evictor.choose(1, Chosen())
        drop(evictor, *victims)
        chosen += victims
    assert set(chosen) == set(others) and not evictor._expired
    assert len(popped) < 2 * (500 + 4 * 100), "leased entries were visited by each choice"
    for each in leased[:400]:
        _release(evictor, each)
    assert set(evictor.choose(500, Chosen())) == set(leased[:400])


@pytest.mark.parametrize("in_vain", ["leased", "used", "dropped", "expired"])
def test_a_choice_that_visits_many_in_vain_is_cut_and_the_next_one_goes_on(
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
    assert set(_choose(evictor, 2)) == {first, last}, "what the first choice had found was lost"
    visits_of_each = 2 if in_vain == "expired" else 1  # As an expired one, and in the queue.
    assert visits <= visits_of_each * len(many) + 10


def test_victims_that_were_chosen_already_are_not_visited_in_vain(evictor: Evictor) -> None:
    expired, others = ([make_entry((name, nth)) for nth in range(2 * MAX_VISITED)] for name in "eo")
    for nth, each in enumerate([*expired, *others], 1):
        _stored(evictor, nth * TICK, [each])
    for each in expired:
        evictor.expire(each)
    victims = evictor.choose(3 * MAX_VISITED, Chosen())
    assert set(victims[: 2 * MAX_VISITED]) == set(expired) and set(victims) < {*expired, *others}
    drop(evictor, *victims)
    assert len(evictor.choose(MAX_VISITED, Chosen())) == MAX_VISITED


def test_pinned_victims_that_are_given_back_are_not_visited_in_vain_again(evictor: Evictor) -> None:
    pinned = [make_entry(nth) for nth in range(2 * MAX_VISITED)]
    _stored(evictor, TICK, *([each] for each in pinned))
    for each in pinned:
        _pin(each, 200)
    assert not _choose(evictor, 1)
    for _ in range(2):
        victims = evictor.choose(len(pinned), Chosen(), pinned=True)
        assert set(victims) == set(pinned)
        evictor.restore(victims)
    _pin(pinned[0], 0)
    assert evictor.choose(1, Chosen()) == pinned[:1]


def test_what_was_put_aside_may_be_used_or_dropped_or_moved(evictor: Evictor, clock: FakeClock) -> None:
    used, dropped, moved, hinted = entries = [make_entry(name) for name in ("used", "dropped", "moved", "hinted")]
    _stored(evictor, TICK, *([each] for each in entries))
    for each in entries:
        evictor.expire(each)
        each.leases = 1
    assert not evictor.choose(4, Chosen())
    evictor.used([used], 2 * TICK)
    drop(evictor, dropped)
    other = Evictor(type(evictor.policy)(), clock)
    other.move_from(evictor, 1, 2 * TICK)
    other.requeue([moved])
    evictor.expire(hinted)
    assert not evictor.choose(4, Chosen()) and not other.choose(4, Chosen())
    for each in entries:
        _release(other if each is moved else evictor, each)
    assert other.choose(4, Chosen()) == [moved] and evictor.choose(4, Chosen()) == [hinted, used]
    drop(evictor, hinted, used)
    assert len(evictor) == evictor._num_dead


def test_hints_leave_nothing_behind(evictor: Evictor, clock: FakeClock) -> None:
    for nth in range(3_000):
        one = make_entry(nth)
        evictor.stored([one], nth * TICK + TICK)
        evictor.add(one)
        if nth % 3 == 0:
            _pin(one, int(clock.now) + 1 + nth % 5)
        elif nth % 3 == 1:
            evictor.expire(one)
        if nth % 7 == 0:
            evictor.restore(evictor.choose(1, Chosen()))
        clock.now += 0.5
        drop(evictor, one)
    evictor.choose(1, Chosen(), pinned=True)
    assert not evictor._expired and not evictor._unpopped and not any(evictor._parked.values())
    assert len(evictor._pin_ends) == len(evictor._parked) <= 3
