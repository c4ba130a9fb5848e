"""What one client may have of a budget, beside others that come earlier and later, and give nothing back."""

from __future__ import annotations

import pytest

from kvpool_server.sharing.shares import LEAST, RESERVE, Shares


def taken(shares: Shares, client: str, most: int) -> int:
    """What a client gets that takes all that it may have, one by one."""
    while shares.has_room(client, 1, most):
        shares.add(client)
    return shares.of(client)


@pytest.mark.parametrize("most", [64, 1_024, 4_096])
def test_clients_that_come_late_find_something(most: int) -> None:
    shares, num_late = Shares(), min(128, most // RESERVE)
    first = taken(shares, "first", most)
    assert first == (most - most // RESERVE) // 2
    for nth in range(num_late):
        assert taken(shares, f"late {nth}", most) >= max(1, most // LEAST)
    assert shares.total <= most


def test_one_client_never_has_all_and_clients_without_a_name_may() -> None:
    shares = Shares()
    assert taken(shares, "", 64) == 64
    assert not shares.has_room("late", 1, 64)


def test_a_clients_own_limit_holds_besides() -> None:
    shares = Shares()
    shares.add("a", 4)
    assert shares.has_room("a", 1, 64, 5) and not shares.has_room("a", 2, 64, 5)
