from kvpool_server.cache.eviction import Evictor
from kvpool_server.cache.eviction.lru import PrefixLRU
from tests.support.entries import evict, make_chain, make_entry, queued


def test_least_recently_used_first() -> None:
    a, b, c = make_entry("a", 2), make_entry("b", 1), make_entry("c", 3)
    assert evict(queued(Evictor(PrefixLRU()), a, b, c), 3) == [b, a, c]


def test_a_use_after_queueing_counts() -> None:
    a, b = make_entry("a", 1), make_entry("b", 2)
    evictor = queued(Evictor(PrefixLRU()), a, b)
    a.used = 3
    assert evictor.oldest_stamp({}) == 2
    assert evict(evictor, 2) == [b, a]


def test_of_a_prefix_the_deepest_block_goes_first_though_all_were_used_at_once() -> None:
    chain = make_chain("p", 1, 1, 1)
    assert evict(queued(Evictor(PrefixLRU()), *chain), 2) == [chain[2], chain[1]]


def test_a_parent_stays_while_any_child_lives() -> None:
    root = make_entry("root", 1)
    left, right = make_entry("left", 2, root), make_entry("right", 9, root)
    other = make_entry("other", 3)
    assert evict(queued(Evictor(PrefixLRU()), root, left, right, other), 3) == [left, other, right]


def test_a_parent_follows_its_last_child_in_one_eviction() -> None:
    root = make_entry("root", 1)
    left, right = make_entry("left", 2, root), make_entry("right", 3, root)
    assert evict(queued(Evictor(PrefixLRU()), root, left, right), 3) == [left, right, root]
