import math

from kvpool.protocol.types import ShardRange
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.leases import HoldTable, Lease, Ticket
from tests.support.values import block_hash, group_spec

GROUP = Group(group_spec())


def _lease(id: int, deadline: float, *entries: Entry) -> Lease:
    return Lease(id, deadline, list(entries))


def _table(*leases: Lease) -> HoldTable[Lease]:
    table: HoldTable[Lease] = HoldTable("lease", "look up again")
    for lease in leases:
        table.add(lease)
    return table


def _expired(table: HoldTable[Lease], now: float) -> list[int]:
    return [hold.id for hold in iter(lambda: table.pop_expired(now), None)]


def test_holds_end_at_their_deadline_and_not_before() -> None:
    table = _table(_lease(1, 5.0), _lease(2, 3.0), _lease(3, 9.0))
    assert table.pop_expired(2.999) is None
    assert _expired(table, 5.0) == [2, 1]
    assert [hold.id for hold in table.values()] == [3]
    assert table.pop_expired(5.0) is None


def test_what_was_given_back_does_not_expire() -> None:
    first = _lease(1, 5.0)
    table = _table(first, _lease(2, 5.0))
    assert table.pop(1) is first
    assert table.pop(1) is None and table.get(1) is None
    assert _expired(table, 5.0) == [2]
    assert len(table) == 0


def test_what_was_added_is_found_until_it_ends() -> None:
    lease = _lease(7, 1.0)
    table = _table(lease)
    assert table.get(7) is lease and table.get(8) is None and len(table) == 1
    table.pop_expired(1.0)
    assert table.get(7) is None


def test_holds_with_a_deadline_are_counted_without_a_visit() -> None:
    table = _table(_lease(1, 5.0), _lease(2, math.inf), _lease(3, 9.0), _lease(4, math.inf))
    counts = [table.num_expiring]
    for each in (2, 1, 7):
        table.pop(each)
        counts.append(table.num_expiring)
    assert _expired(table, 9.0) == [3]
    assert [*counts, table.num_expiring, len(table)] == [2, 2, 1, 1, 0, 1]


def test_a_hold_covers_its_entries_by_identity_not_by_name() -> None:
    ours, same_name = (Entry(GROUP, block_hash("a"), None, offset, 0) for offset in (0, 256))
    lease = _lease(1, 1.0, ours)
    assert lease.covers(ours)
    assert not lease.covers(same_name), "a block that was dropped and stored anew is not under the old lease"


def test_a_ticket_is_for_certain_shards() -> None:
    assert Ticket(1, 2.0, [], ShardRange(1, 2)).shards.mask == 0b110
