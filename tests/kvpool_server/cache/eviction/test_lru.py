from kvpool_server.cache.eviction import Evictor
from kvpool_server.cache.eviction.lru import PrefixLRU
from tests.support.clock import FakeClock
from tests.support.entries import evict, make_entry, queued


def test_least_recently_used_first() -> None:
    a, b, c = make_entry("a", 2), make_entry("b", 1), make_entry("c", 3)
    assert evict(queued(Evictor(PrefixLRU(), FakeClock()), a, b, c), 3) == [b, a, c]


def test_a_use_after_queueing_counts() -> None:
    a, b = make_entry("a", 1), make_entry("b", 2)
    evictor = queued(Evictor(PrefixLRU(), FakeClock()), a, b)
    a.used = 3
    assert evictor.oldest_stamp({}) == 2
    assert evict(evictor, 2) == [b, a]


def test_a_parent_follows_its_last_child_in_one_eviction() -> None:
    root = make_entry("root", 1)
    left, right = make_entry("left", 2, root), make_entry("right", 3, root)
    assert evict(queued(Evictor(PrefixLRU(), FakeClock()), root, left, right), 3) == [left, right, root]
