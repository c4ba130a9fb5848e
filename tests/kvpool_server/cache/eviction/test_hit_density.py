"""What the hit-density policy learns, and which victims follow from it."""

import random

import pytest

from kvpool_server.cache.entry import Entry
from kvpool_server.cache.eviction import TICK, Evictor
from kvpool_server.cache.eviction.evictor import Chosen
from kvpool_server.cache.eviction.hit_density import MAX_BUCKETS, MAX_TURN, MIN_GHOSTS, HitDensity, turn_of
from tests.support.clock import FakeClock
from tests.support.entries import drop, evict, make_entry


class Traffic:
    """Calls of a pool, one after the other, in which everything fits until `evict`."""

    def __init__(self) -> None:
        self.policy = HitDensity()
        self.evictor = Evictor(self.policy, FakeClock())
        self.call = 0

    def store(self, name: object, num_blocks: int, parent: Entry | None = None) -> list[Entry]:
        self.call += 1
        entries: list[Entry] = []
        for nth in range(num_blocks):
            entries.append(make_entry((name, nth), 0, entries[-1] if entries else parent))
        self.evictor.stored(entries, self.call * TICK)
        self.evictor.add(entries[-1])
        return entries

    def use(self, entries: list[Entry]) -> None:
        self.call += 1
        self.evictor.used(entries, self.call * TICK)

    def wait(self, calls: int) -> None:
        self.call += calls

    def evict(self, count: int) -> list[Entry]:
        victims = evict(self.evictor, count) or []
        drop(self.evictor, *victims)
        return victims


def test_a_conversation_that_goes_on_is_told_from_one_that_begins() -> None:
    traffic = Traffic()
    first = traffic.store("a", 8)
    assert [turn_of(each) for each in first] == [0] * 8
    traffic.use(first)
    traffic.use([])
    more = traffic.store("b", 2, first[-1])
    assert {turn_of(each) for each in first + more} == {1}
    for _ in range(5):
        traffic.use(first + more)
    assert turn_of(more[-1]) == MAX_TURN


def test_a_conversation_that_was_evicted_is_known_when_it_comes_back() -> None:
    traffic = Traffic()
    first = traffic.store("a", 8)
    assert traffic.evict(8) == first[::-1]
    again = traffic.store("a", 8)
    assert {turn_of(each) for each in again} == {1}


def test_evicted_blocks_are_not_remembered_for_ever() -> None:
    traffic = Traffic()
    for nth in range(2_000):
        drop(traffic.evictor, *traffic.store(nth, 8)[::-1])
    assert 0 < len(traffic.policy._ghosts) <= MIN_GHOSTS + 1


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


def test_buckets_stay_few_though_nothing_is_evicted() -> None:
    traffic = Traffic()
    for nth in range(20_000):
        traffic.wait(7)
        traffic.store(nth, 1)
        assert len(traffic.policy.queue._buckets) <= 2 * MAX_BUCKETS + 1
    assert len(traffic.evict(20_000)) == 20_000


def test_the_oldest_stamp_is_found_without_visiting_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = Traffic()
    leased, idle = traffic.store("leased", 1), traffic.store("idle", 1)
    leased[0].leases = 1
    monkeypatch.setattr(traffic.policy.queue, "pop", lambda: pytest.fail("a put would pay for every leased candidate"))
    oldest = traffic.evictor.oldest_stamp(Chosen())
    assert oldest is not None and oldest <= min(leased[0].used, idle[0].used)
