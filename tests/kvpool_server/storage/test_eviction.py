from kvpool_server.storage.entry import Entry, Group
from kvpool_server.storage.eviction import SWEEP_AT_LEAST, PrefixLRU
from tests.support.values import block_hash, group_spec

GROUP = Group(group_spec())


def _entry(name: object, used: int, parent: Entry | None = None) -> Entry:
    entry = Entry(GROUP, block_hash(name), parent, 0, used)
    entry.present = GROUP.full_mask
    if parent is not None:
        parent.children += 1
    return entry


def _chain(name: str, *used: int) -> list[Entry]:
    """A prefix: each entry the parent of the next."""
    chain: list[Entry] = []
    for depth, tick in enumerate(used):
        chain.append(_entry(f"{name}{depth}", tick, chain[-1] if chain else None))
    return chain


def _queue(*entries: Entry) -> PrefixLRU:
    queue = PrefixLRU()
    for entry in entries:
        queue.add(entry)
    return queue


def test_least_recently_used_first() -> None:
    a, b, c = _entry("a", 2), _entry("b", 1), _entry("c", 3)
    assert _queue(a, b, c).evict(3) == [b, a, c]


def test_a_use_after_queueing_counts() -> None:
    a, b = _entry("a", 1), _entry("b", 2)
    queue = _queue(a, b)
    a.used = 3
    assert queue.oldest() == 2
    assert queue.evict(2) == [b, a]


def test_of_a_prefix_the_deepest_block_goes_first_though_all_were_used_at_once() -> None:
    chain = _chain("p", 1, 1, 1)
    assert _queue(*chain).evict(2) == [chain[2], chain[1]]


def test_a_parent_stays_while_any_child_lives() -> None:
    root = _entry("root", 1)
    left, right = _entry("left", 2, root), _entry("right", 9, root)
    other = _entry("other", 3)
    assert _queue(root, left, right, other).evict(3) == [left, other, right]


def test_a_parent_follows_its_last_child_in_one_eviction() -> None:
    root = _entry("root", 1)
    left, right = _entry("left", 2, root), _entry("right", 3, root)
    assert _queue(root, left, right).evict(3) == [left, right, root]


def test_all_or_nothing() -> None:
    chain = _chain("p", 1, 2, 3)
    queue = _queue(*chain)
    assert queue.evict(4) is None
    assert queue.evict(3) == [chain[2], chain[1], chain[0]], "the failure changed the queue"


def test_leased_entries_are_skipped_and_kept() -> None:
    a, b, c = _entry("a", 1), _entry("b", 2), _entry("c", 3)
    queue = _queue(a, b, c)
    a.leases = 1
    assert queue.evict(3) is None
    assert queue.evict(1) == [b]
    a.leases = 0
    assert queue.evict(2) == [a, c]


def test_a_leased_leaf_protects_its_whole_prefix() -> None:
    chain = _chain("p", 1, 1, 1)
    chain[2].leases = 1
    assert _queue(*chain).evict(1) is None


def test_entries_that_are_written_or_dropped_are_no_candidates() -> None:
    written, dropped, idle = _entry("w", 1), _entry("d", 2), _entry("i", 3)
    queue = _queue(written, dropped, idle)
    written.pending, dropped.live = 1, False
    assert queue.oldest() == 3
    assert queue.evict(1) == [idle]
    assert queue.evict(1) is None


def test_oldest_looks_without_taking() -> None:
    queue = _queue(_entry("a", 5), _entry("b", 4))
    assert [queue.oldest(), queue.oldest()] == [4, 4]
    assert len(queue.evict(2) or ()) == 2
    assert queue.oldest() is None


def test_adding_twice_queues_once() -> None:
    entry = _entry("a", 1)
    queue = _queue(entry, entry)
    assert len(queue) == 1
    assert queue.evict(2) is None
    assert queue.evict(1) == [entry]


def test_what_was_dropped_elsewhere_does_not_pile_up() -> None:
    lru = PrefixLRU()
    group = Group(group_spec())
    for nth in range(20 * SWEEP_AT_LEAST):
        entry = Entry(group, nth.to_bytes(32, "big"), None, nth, nth)
        lru.add(entry)
        entry.live = False
        lru.note_dropped(entry)
        assert len(lru) <= 3 * SWEEP_AT_LEAST
