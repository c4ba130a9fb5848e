"""What an evictor does, whatever its policy."""

import pytest

from kvpool_server.cache.entry import Entry
from kvpool_server.cache.eviction import DEFAULT_POLICY, POLICIES, TICK, Evictor, check_policy
from kvpool_server.cache.eviction.evictor import MIN_DEAD_TO_SWEEP
from tests.support.entries import drop, evict, make_chain, make_entry, queued


@pytest.fixture(params=POLICIES)
def evictor(request: pytest.FixtureRequest) -> Evictor:
    return Evictor(POLICIES[request.param]())


def test_a_policy_is_checked_by_name() -> None:
    assert check_policy(DEFAULT_POLICY) == DEFAULT_POLICY
    with pytest.raises(ValueError, match=f"unknown policy 'best'; choose {' or '.join(POLICIES)}"):
        check_policy("best")


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
    a.leases = 0
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
    assert evictor.oldest_stamp({}) is None
    a, b = make_entry("a"), make_entry("b")
    _stored(evictor, 8 * TICK, [a])
    _stored(evictor, 800 * TICK, [b])
    first = evictor.oldest_stamp({})
    assert first is not None and first <= a.used and first % TICK == 0
    assert evictor.oldest_stamp({}) == first, "looking has changed something"
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
