"""What the policy of hit density learns, and what follows from it."""

import random

from kvpool_server.cache.entry import Entry
from kvpool_server.cache.eviction import hit_density as density
from kvpool_server.cache.eviction.base import TICK
from kvpool_server.cache.eviction.hit_density import HitDensity
from tests.support.entries import drop, evict, make_chain, make_entry


class Traffic:
    """Prefixes that come to a policy as a pool would tell it, a call after the other; everything fits until `evict`."""

    def __init__(self) -> None:
        self.policy = HitDensity()
        self.call = 0

    def store(self, name: object, num_blocks: int, parent: Entry | None = None) -> list[Entry]:
        self.call += 1
        entries: list[Entry] = []
        for nth in range(num_blocks):
            entries.append(make_entry((name, nth), 0, entries[-1] if entries else parent))
        self.policy.stored(entries, parent, self.call * TICK)
        self.policy.add(entries[-1])
        return entries

    def use(self, entries: list[Entry]) -> None:
        self.call += 1
        self.policy.used(entries, self.call * TICK)

    def wait(self, calls: int) -> None:
        self.call += calls

    def evict(self, count: int) -> list[Entry]:
        victims = evict(self.policy, count) or []
        drop(self.policy, *victims)
        return victims


def _turn(each: Entry) -> int:
    return each.used % TICK >> 4


def test_a_conversation_that_goes_on_is_told_from_one_that_begins() -> None:
    traffic = Traffic()
    first = traffic.store("a", 8)
    assert [_turn(each) for each in first] == [0] * 8
    traffic.use(first)
    more = traffic.store("b", 2, first[-1])
    assert {_turn(each) for each in first + more} == {1}
    for _ in range(5):
        traffic.use(first + more)
    assert _turn(more[-1]) == density.MAX_TURN


def test_what_follows_a_shared_beginning_is_a_new_conversation() -> None:
    traffic = Traffic()
    shared = traffic.store("system prompt", 4)
    for nth in range(3):
        traffic.store(nth, 3, shared[-1])
    traffic.use(shared)
    assert _turn(shared[-1]) == 0
    assert _turn(traffic.store("another", 3, shared[-1])[0]) == 0


def test_a_conversation_that_was_evicted_is_known_when_it_comes_back() -> None:
    traffic = Traffic()
    first = traffic.store("a", 8)
    assert traffic.evict(8) == first[::-1]
    again = traffic.store("a", 8)
    assert {_turn(each) for each in again} == {1}


def test_evicted_blocks_are_not_remembered_for_ever() -> None:
    traffic = Traffic()
    for nth in range(2_000):
        drop(traffic.policy, *traffic.store(nth, 8)[::-1])
    assert len(traffic.policy._ghosts) <= density.MIN_GHOSTS + 1


def test_what_comes_back_is_kept_and_what_never_does_goes_though_it_was_used_later() -> None:
    """Long prompts are never asked again, short ones after 300 calls."""
    traffic, due = Traffic(), dict[int, list[Entry]]()
    picks = random.Random(0)
    for nth in range(6_000):
        if entries := due.pop(nth, None):
            traffic.use(entries)
        elif picks.random() < 0.5:
            traffic.store(("long", nth), 40)
        else:
            due[nth + 300] = traffic.store(("short", nth), 4)
    waiting = {id(each) for entries in due.values() for each in entries}
    victims = traffic.evict(10_000)
    assert len(victims) == 10_000
    assert not any(id(each) in waiting for each in victims), "those that were about to be asked for were evicted"


def test_before_it_knows_anything_the_oldest_go_first() -> None:
    traffic = Traffic()
    prefixes = [traffic.store(nth, 4) for nth in range(100)]
    victims = traffic.evict(200)
    old = {id(each) for prefix in prefixes[:60] for each in prefix}
    assert len(victims) == 200 and all(id(each) in old for each in victims)


def test_epochs_grow_so_that_buckets_stay_few() -> None:
    traffic = Traffic()
    for nth in range(30_000):
        traffic.store(nth, 1)
    assert len(traffic.policy) == 30_000
    for count in (1, 29_999):
        traffic.wait(1_000)
        traffic.store(("one more", count), 1)
        assert len(traffic.evict(count)) == count
        assert len(traffic.policy._buckets) <= density.MAX_BUCKETS + 1


def test_buckets_stay_few_though_nothing_is_evicted() -> None:
    traffic = Traffic()
    for nth in range(20_000):
        traffic.wait(7)
        traffic.store(nth, 1)
        assert len(traffic.policy._buckets) <= 2 * density.MAX_BUCKETS + 1
    assert len(traffic.evict(20_000)) == 20_000


def test_a_tail_that_gets_a_child_is_none_any_more() -> None:
    traffic = Traffic()
    first = traffic.store("a", 3)
    assert first[-1].used & density.TAIL
    traffic.store("b", 2, first[-1])
    assert not first[-1].used & density.TAIL


def test_chains_keep_working_with_entries_that_have_no_beginning() -> None:
    orphan = make_chain("x", 0, 0)
    policy = HitDensity()
    policy.stored(orphan[1:], orphan[0], TICK)
    policy.used(orphan[1:], 2 * TICK)
    policy.used([], 3 * TICK)
    policy.add(orphan[1])
    assert evict(policy, 1) == [orphan[1]]
