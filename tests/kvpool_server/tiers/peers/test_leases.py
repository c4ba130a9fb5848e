"""Leases that overlap, and such as end before their blocks can be read."""

import time
from types import SimpleNamespace
from typing import Any

from kvpool_server.tiers.peers.leases import LEASE_MS, READ_MS, Leases

GROUP: Any = SimpleNamespace(fingerprint=b"f", idx=0)


class Owner:
    """A peer that notes which leases are released."""

    def __init__(self) -> None:
        self.released: list[int] = []
        self.peer = SimpleNamespace(release=self.released.append)

    def lease(self, lease_id: int, names: bytes, seconds: float = LEASE_MS / 1000) -> Any:
        indices = {bytes([name]): nth for nth, name in enumerate(names)}
        slots = SimpleNamespace(ends_at=time.monotonic() + seconds)
        return SimpleNamespace(lease_id=lease_id, group_idx=0, indices=indices, slots=slots)


def test_a_lease_that_ends_while_its_blocks_are_read_is_of_no_use() -> None:
    owner: Any = Owner()
    leases = Leases()
    leases.add(GROUP, owner, owner.lease(1, b"ab"))
    leases.add(GROUP, owner, owner.lease(2, b"c", READ_MS / 1000 - 0.1))
    found = leases.of(GROUP, [b"a", b"c", b"d"])
    assert found[0] is not None and found[1:] == [None, None]


def test_a_block_that_was_read_frees_all_of_its_leases() -> None:
    owner: Any = Owner()
    leases = Leases()
    leases.add(GROUP, owner, owner.lease(1, b"ab"))
    (older,) = leases.of(GROUP, [b"a"])
    assert older is not None
    older.num_reads = 1
    leases.add(GROUP, owner, owner.lease(2, b"a"))
    older.num_reads = 0
    leases.forget((b"f", 0, b"a"), older)
    assert owner.released == [2], "b is still to be read"
    leases.forget((b"f", 0, b"b"), older)
    assert owner.released == [2, 1] and leases.of(GROUP, [b"a", b"b"]) == [None, None]
