import math

from kvpool_server.cache.leases import HoldTable, Lease


def test_holds_with_a_deadline_are_counted_without_a_visit() -> None:
    table: HoldTable[Lease] = HoldTable("lease", "look up again")
    for nth, deadline in enumerate((5.0, math.inf, 9.0, math.inf), 1):
        table.add(Lease(nth, deadline, []))
    counts = [table.num_expiring]
    for each in (2, 1, 7):
        table.pop(each)
        counts.append(table.num_expiring)
    expired = table.pop_expired(9.0)
    assert expired is not None and expired.id == 3 and table.pop_expired(9.0) is None
    assert [*counts, table.num_expiring, len(table)] == [2, 2, 1, 1, 0, 1]
