"""Changes of the pool's blocks, in order, on their way to subscribers."""

from __future__ import annotations

from typing import NamedTuple

from kvpool_server.cache.entry import Group


class Change(NamedTuple):
    """One block became readable (`stored`), or ceased to be."""

    stored: bool
    group: Group
    block_hash: bytes
    parent_hash: bytes


class ChangeBatch(NamedTuple):
    """The content of one message.

    Args:
        seq: its number, one more than that of the message before.
        ts: seconds since the epoch.
        changes: all of one namespace, in the order in which they happened.
        cleared: the pool was empty before these changes.
    """

    seq: int
    ts: float
    changes: list[Change]
    cleared: bool = False


def split(changes: list[Change], max_blocks: int) -> list[list[Change]]:
    """Cuts changes, in their order, into lists of one namespace and at most `max_blocks` each."""
    lists: list[list[Change]] = []
    namespace = None
    for change in changes:
        if change.group.namespace != namespace or len(lists[-1]) == max_blocks:
            namespace = change.group.namespace
            lists.append([])
        lists[-1].append(change)
    return lists
