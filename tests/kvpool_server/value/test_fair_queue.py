"""The queue of the live simulation: its bound, and what each tenant gets of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvpool_server.value.fair_queue import MAX_SHARES, FairQueue


def test_the_tenant_with_most_loses_its_newest() -> None:
    queue: FairQueue[str] = FairQueue(10)
    assert [queue.push("a", f"a{nth}", 2, 0.0) for nth in range(6)] == [0, 0, 0, 0, 0, 1]
    assert queue.push("b", "b0", 3, 0.0) == 2
    assert sorted(iter(queue.pop, None)) == ["a0", "a1", "a2", "b0"]


def test_the_tenant_that_was_served_least_is_next() -> None:
    queue: FairQueue[str] = FairQueue(100)
    for _ in range(3):
        queue.push("a", "a", 1, 0.0)
    for _ in range(3):
        queue.push("b", "b", 1, 0.0)
    order = []
    while (item := queue.pop()) is not None:
        order.append(item)
        queue.charge(3.0 if item == "a" else 1.0)
    assert order == ["a", "b", "b", "b", "a", "a"]


def test_a_tenant_that_was_away_has_no_claim_to_the_time_before() -> None:
    queue: FairQueue[str] = FairQueue(100)
    for _ in range(20):
        queue.push("a", "a", 1, 0.0)
    for _ in range(10):
        queue.pop()
        queue.charge(1.0)
    for _ in range(10):
        queue.push("b", "b", 1, 0.0)
    order = []
    while (item := queue.pop()) is not None:
        order.append(item)
        queue.charge(1.0)
    assert set(order[:4]) == {"a", "b"}


def test_all_have_lost_only_if_each_active_tenant_has() -> None:
    queue: FairQueue[str] = FairQueue(4)
    queue.push("a", "a", 1, 1.0)
    assert not queue.have_all_lost(0.0, 0.0)
    queue.push("b", "b", 4, 2.0)
    assert not queue.have_all_lost(0.0, 0.0)
    assert queue.have_all_lost(0.0, 1.5)  # Tenant a has sent nothing since.
    for _ in range(4):
        queue.push("a", "a", 1, 3.0)
    assert queue.have_all_lost(0.0, 0.0)
    assert not queue.have_all_lost(2.5, 0.0)


@given(st.lists(st.tuples(st.integers(0, 3 * MAX_SHARES), st.integers(1, 30)), max_size=300))
def test_it_is_bounded_and_nothing_gets_lost_unseen(pushes: list[tuple[int, int]]) -> None:
    queue: FairQueue[tuple[int, int]] = FairQueue(60)
    kept: list[tuple[int, int]] = []
    num_left_out = 0
    for nth, (tenant, cost) in enumerate(pushes):
        num_left_out += queue.push(f"tenant {tenant}", (nth, cost), cost, float(nth))
    num_queued = len(queue)
    while (item := queue.pop()) is not None:
        kept.append(item)
    assert num_queued == len(kept) and sum(cost for _, cost in kept) <= 60
    assert len(kept) + num_left_out == len(pushes)
    assert not queue
