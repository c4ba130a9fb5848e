"""Pool entries without a pool, for tests of eviction policies."""

from __future__ import annotations

from typing import TypeVar

from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.eviction.base import Policy
from tests.support.values import block_hash, group_spec

GROUP = Group(group_spec())

P = TypeVar("P", bound=Policy)


def make_entry(name: object, used: int = 0, parent: Entry | None = None) -> Entry:
    """A complete entry, as the child of `parent` where one is given."""
    made = Entry(GROUP, block_hash(name), parent, 0, used)
    made.present = GROUP.full_mask
    if parent is not None:
        parent.children += 1
    return made


def make_chain(name: str, *used: int) -> list[Entry]:
    """A prefix: each entry the parent of the next."""
    made: list[Entry] = []
    for depth, stamp in enumerate(used):
        made.append(make_entry(f"{name}{depth}", stamp, made[-1] if made else None))
    return made


def drop(policy: Policy, *gone: Entry) -> None:
    """Drops entries as the pool does, in the order of its calls."""
    for each in gone:
        each.live = False
        if each.parent is not None:
            each.parent.children -= 1
        policy.dropped(each)


def queued(policy: P, *entries: Entry) -> P:
    for each in entries:
        policy.add(each)
    return policy


def evict(policy: Policy, count: int) -> list[Entry] | None:
    """`count` victims; None if there are fewer, and nothing has changed."""
    chosen = policy.choose(count, {})
    if len(chosen) == count:
        return chosen
    policy.restore(chosen)
    return None
