"""Upper bounds on what tenants and namespaces hold."""

from __future__ import annotations

import pytest

from kvpool.protocol.errors import InvalidRequestError, OutOfSpaceError
from kvpool.protocol.types import Quota
from kvpool_server.cache import placement
from kvpool_server.cache.eviction import Policy
from kvpool_server.cache.server_access import pin_next_victims, unpin_victims
from kvpool_server.cache.steps import SETTLED_PER_CALL, STEP_BLOCKS, finish
from tests.support.integrity import check_integrity
from tests.support.tenants import House


@pytest.fixture
def house(policy: type[Policy]) -> House:
    return House(8, policy)


def test_a_subject_beyond_its_quota_evicts_its_own_least_recently_used_and_nobody_elses() -> None:
    house = House(8)
    acme, other, third = house.owner(tenant="acme"), house.owner(tenant="other"), house.owner()
    house.quota("tenant:acme", 1_000)
    kept = other.store(30), third.store(30)
    names = acme.store(10)
    acme.use(*names[:3])
    names += acme.store(4)
    assert acme.present(*names) == [*names[:3], *names[7:]]
    assert (other.present(*kept[0]), third.present(*kept[1])) == kept
    assert house.used("tenant:acme") == acme.nbytes == 1_000
    assert house.pool.counters["quota_evicted_blocks"] == house.pool.counters["evicted_blocks"] == 4


def test_a_put_beyond_a_quota_that_was_lowered_evicts_no_more_than_a_step_may(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "MAX_VICTIMS", 300)
    acme = house.owner(1, tenant="acme")
    house.quota("tenant:acme", 2_000)
    for first in range(0, 2_000, 100):
        acme.put(*range(first, first + 100))
    steps = house.pool.set_quotas_in_steps([Quota("tenant:acme", 100)])
    next(steps)
    assert max(acme.evictions("new")) <= 300 + STEP_BLOCKS + SETTLED_PER_CALL
    finish(steps)
    assert acme.store() and acme.nbytes == 100


def test_a_put_of_large_blocks_finds_room_among_many_small_ones_of_its_subject(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "MAX_VICTIMS", 300)
    small, large = house.owner(1, tenant="acme"), house.owner(1_000, tenant="acme")
    house.quota("tenant:acme", 2_000)
    for first in range(0, 2_000, 100):
        small.put(*range(first, first + 100))
    evicted = large.evictions("large")
    assert large.present("large") and max(evicted) <= 300 and sum(evicted) == 1_000
    assert house.used("tenant:acme") <= 2_000


def test_all_victims_that_were_pinned_are_dropped_at_once(house: House) -> None:
    """Beside a released lease that lets its entries go over several calls; the last blocks of a prefix first."""
    acme = house.owner(1)
    acme.put(*(f"leased {nth}" for nth in range(600)))
    lease_id = acme.lease(*(f"leased {nth}" for nth in range(600)))
    for first in range(0, 7_400, 200):
        acme.put(*range(first, first + 200))
    house.pool.release([lease_id])
    victims = pin_next_victims(house.pool, 0.05, {}, 1 << 30)
    assert len(victims.entries) > SETTLED_PER_CALL
    assert unpin_victims(house.pool, victims, drop=True) == len(victims.entries)
    check_integrity(house.pool)


def test_what_is_leased_is_not_evicted_for_a_quota_and_a_refusal_changes_nothing(house: House) -> None:
    acme = house.owner(tenant="acme")
    house.quota("tenant:acme", 1_000)
    names = acme.store(10)
    lease_id = acme.lease(*names[:8])
    acme.put("fits")
    before = [name for name in names if acme.present(name)]
    assert len(before) == 9
    with pytest.raises(
        OutOfSpaceError, match=r"quota tenant:acme = 1000 bytes: no room for 3 blocks .*others are leased"
    ) as caught:
        acme.put("a", "b", "c")
    assert str(caught.value).endswith("try again later, or raise it (`kvpool quota tenant:acme=SIZE`)")
    assert acme.present(*names) == before and acme.present("fits")
    check_integrity(house.pool)
    assert house.pool.counters["over_quota_puts"] == 1 and house.pool.counters["out_of_space_puts"] == 0
    house.pool.release([lease_id])
    acme.put("a", "b", "c")
    assert acme.nbytes == 1_000


def test_what_can_never_fit_is_told_so() -> None:
    house = House(8)
    acme = house.owner(tenant="acme")
    for limit, count, says in (
        (99, 1, r"a block of 100 bytes is larger; raise it \(`kvpool quota"),
        (299, 3, "3 blocks of 100 bytes are more; put fewer at once, or raise it"),
    ):
        house.quota("tenant:acme", limit)
        with pytest.raises(OutOfSpaceError, match=f"quota tenant:acme = {limit} bytes: {says}"):
            acme.put(*range(count))


def test_its_own_slots_of_the_same_size_go_before_those_of_others(house: House) -> None:
    large, small = house.owner(200, tenant="acme"), house.owner(100, tenant="acme")
    house.quota("tenant:acme", 1_000)
    first, second = large.store(3), small.store(4)
    small.store(2)
    assert large.present(*first) == first and second
    assert small.nbytes == 400
    small.put(*(f"new {idx}" for idx in range(9)))
    assert house.used("tenant:acme") == 900 + large.nbytes == 900


def test_a_quota_binds_namespaces_that_open_later_and_those_that_were_closed_count_no_more(house: House) -> None:
    house.quota("tenant:acme", 300)
    acme = house.owner(tenant="acme")
    acme.store(10)
    assert acme.nbytes == 300
    house.pool.clear(acme.fingerprint)
    for _ in range(house.pool.limits.max_namespaces - 1):
        house.owner()
    house.clock.advance(house.pool.limits.namespace_idle_ms / 1000)
    house.owner()
    assert house.pool.namespace(acme.fingerprint) is None
    check_integrity(house.pool)
    assert house.used("tenant:acme") == 0
    acme.open()
    acme.store(5)
    assert house.used("tenant:acme") == 300


def test_full_arenas_are_shared_by_recency_with_and_without_quotas() -> None:
    house = House(4)
    acme, other = house.owner(tenant="acme"), house.owner()
    house.quota("tenant:acme", 3_000)
    old, older = acme.store(20), other.store(20)
    acme.use(*old[10:])
    house.owner().store(20)
    assert acme.present(*old) == old[10:], "not only the others make way"
    assert other.present(*older) == older[10:], "nor it alone"


def test_setting_is_all_or_nothing_and_bounded() -> None:
    house = House(8)
    acme = house.owner(tenant="acme")
    acme.store(5)
    house.quota("tenant:acme", 1_000)
    before = house.pool.quotas()
    good = Quota("tenant:acme", 100)
    for bad, says in (
        (Quota("acme", 1), "quota subject 'acme' is neither tenant:NAME nor namespace:FINGERPRINT"),
        (Quota("tenant:", 1), "quota subject 'tenant:' is neither"),
        (Quota("namespace:abc", 1), "namespace:abc'.*first 8 characters"),
        (Quota("namespace:not-hexadecimal", 1), "first 8 characters"),
        (Quota("tenant:nobody", 0), "no quota tenant:nobody to delete; `kvpool quota` lists all"),
        (Quota("tenant:acme", 7), "quota tenant:acme is given twice"),
    ):
        with pytest.raises(InvalidRequestError, match=says):
            house.pool.set_quotas([good, bad])
        assert house.pool.quotas() == before
    assert acme.nbytes == 500
    most = house.pool.limits.max_quotas
    house.pool.set_quotas([Quota(f"tenant:{idx}", 1) for idx in range(most - 1)])
    with pytest.raises(InvalidRequestError, match=f"{most + 1} quotas are more than the limit of {most}"):
        house.quota("tenant:one more", 1)
    assert len(house.pool.quotas()) == most
