"""Pool entries without a pool, for tests of eviction policies."""

from __future__ import annotations

from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.eviction import Evictor
from kvpool_server.cache.eviction.evictor import Chosen
from tests.support.values import block_hash, group_spec

GROUP = Group(group_spec())


def make_entry(name: object, used: int = 0, parent: Entry | None = None) -> Entry:
    """A complete entry, as the child of `parent` where one is given."""
    depth = 0 if parent is None else parent.depth + 1
    made = Entry(GROUP, block_hash(name), parent, 0, used, depth=depth, present=GROUP.full_mask)
    if parent is not None:
        parent.children += 1
    return made


def drop(evictor: Evictor, *dropped: Entry) -> None:
    """Drops entries as the pool does, in the order of its calls."""
    for each in dropped:
        each.live = False
        if each.parent is not None:
            each.parent.children -= 1
        evictor.dropped(each)


def evict(evictor: Evictor, count: int) -> list[Entry] | None:
    """`count` victims; None if there are fewer, and nothing has changed."""
    victims = evictor.choose(count, Chosen())
    if len(victims) == count:
        return victims
    evictor.restore(victims)
    return None
