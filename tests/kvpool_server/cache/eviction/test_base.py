"""What every policy does."""

from collections.abc import Callable

import pytest

from kvpool_server.cache.entry import Entry
from kvpool_server.cache.eviction import DEFAULT_POLICY, POLICIES, Policy
from kvpool_server.cache.eviction.base import SWEEP_AT_LEAST, TICK
from tests.support.entries import drop, evict, make_chain, make_entry, queued


@pytest.fixture(params=POLICIES)
def make(request: pytest.FixtureRequest) -> Callable[[], Policy]:
    return POLICIES[request.param]


def test_the_default_is_one_of_them() -> None:
    assert DEFAULT_POLICY in POLICIES


def _stored(policy: Policy, stamp: int, *prefixes: list[Entry]) -> Policy:
    for entries in prefixes:
        policy.stored(entries, None, stamp)
        policy.add(entries[-1])
    return policy


def test_all_or_nothing(make: Callable[[], Policy]) -> None:
    prefix = make_chain("p", 0, 0, 0)
    policy = _stored(make(), TICK, prefix)
    assert evict(policy, 4) is None
    assert evict(policy, 3) == prefix[::-1], "the failure changed the queue"


def test_a_prefix_is_eaten_from_its_end(make: Callable[[], Policy]) -> None:
    prefixes = [make_chain(name, 0, 0, 0) for name in "abcd"]
    policy = make()
    for nth, prefix in enumerate(prefixes, 1):
        _stored(policy, nth * TICK, prefix)
    victims = evict(policy, 12) or []
    assert len(set(victims)) == 12
    for prefix in prefixes:
        assert [each for each in victims if each in prefix] == prefix[::-1]


def test_leased_entries_are_skipped_and_kept(make: Callable[[], Policy]) -> None:
    a, b, c = make_entry("a"), make_entry("b"), make_entry("c")
    policy = _stored(make(), TICK, [a], [b], [c])
    a.leases = 1
    assert evict(policy, 3) is None
    first = evict(policy, 2)
    assert first is not None and set(first) == {b, c}
    drop(policy, *first)
    a.leases = 0
    assert evict(policy, 1) == [a]


def test_a_leased_leaf_protects_its_whole_prefix(make: Callable[[], Policy]) -> None:
    prefix = make_chain("p", 0, 0, 0)
    prefix[2].leases = 1
    assert evict(_stored(make(), TICK, prefix), 1) is None


def test_entries_that_are_written_or_dropped_are_no_candidates(make: Callable[[], Policy]) -> None:
    written, dropped, idle = make_entry("w"), make_entry("d"), make_entry("i")
    policy = _stored(make(), TICK, [written], [dropped], [idle])
    written.pending, dropped.live = 1, False
    assert evict(policy, 1) == [idle]


def test_no_candidate_is_older_than_the_oldest_stamp(make: Callable[[], Policy]) -> None:
    policy = make()
    assert policy.oldest_stamp({}) is None
    a, b = make_entry("a"), make_entry("b")
    _stored(policy, 8 * TICK, [a])
    _stored(policy, 800 * TICK, [b])
    first = policy.oldest_stamp({})
    assert first is not None and first <= a.used and first % TICK == 0
    assert policy.oldest_stamp({}) == first, "looking has changed something"
    assert set(evict(policy, 2) or ()) == {a, b}


def test_adding_twice_queues_once(make: Callable[[], Policy]) -> None:
    one = make_entry("a")
    policy = queued(make(), one, one)
    assert len(policy) == 1
    assert evict(policy, 2) is None
    assert evict(policy, 1) == [one]


def test_victims_are_not_queued_again_while_they_are_dropped(make: Callable[[], Policy]) -> None:
    prefix = make_chain("p", 0, 0, 0)
    policy = _stored(make(), TICK, prefix)
    victims = evict(policy, 3) or []
    for victim in victims:
        drop(policy, victim)
        if victim.parent is not None:
            policy.add(victim.parent)
    assert len(policy) == 0


def test_stamps_keep_the_order_of_calls_whatever_the_kind_of_use(make: Callable[[], Policy]) -> None:
    policy = make()
    prefix = make_chain("p", 0, 0, 0)
    policy.stored(prefix, None, TICK)
    stamps = [prefix[2].used]
    policy.used(prefix, 2 * TICK)
    stamps.append(prefix[2].used)
    policy.renewed(prefix, 3 * TICK)
    stamps.append(prefix[2].used)
    assert [stamp // TICK for stamp in stamps] == [1, 2, 3]


def test_what_was_dropped_elsewhere_does_not_pile_up(make: Callable[[], Policy]) -> None:
    policy = make()
    for nth in range(20 * SWEEP_AT_LEAST):
        one = make_entry(nth, nth * TICK)
        policy.stored([one], None, nth * TICK)
        policy.add(one)
        drop(policy, one)
        assert len(policy) <= 3 * SWEEP_AT_LEAST
