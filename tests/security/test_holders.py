"""Leases and tickets of another tenant in the pool: a caller that knows their ids gets the answer for unknown ids.

`test_intruder_machine.py` makes the same calls through the services.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool.protocol.errors import LeaseExpiredError, OutOfSpaceError
from kvpool.protocol.types import ShardRange
from kvpool_server.cache.allocator.arena import Arena
from kvpool_server.cache.leases import Owner
from kvpool_server.cache.limits import IdentityLimits, Limits
from kvpool_server.cache.steps import finish
from testbed.pool_at_once import PoolAtOnce
from tests.support.clock import FakeClock
from tests.support.effort import effort
from tests.support.integrity import check_integrity
from tests.support.values import group_spec, namespace_spec, run_of

WHOLE = ShardRange(0, 1)
UNKNOWN_ID = 0x1234_5678_9ABC
NAMES = st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)
OWNERS = [Owner("acme 1", "acme"), Owner("acme 2", "acme"), Owner("umbra", "umbra"), Owner("a connection"), Owner()]
OWN = IdentityLimits(leases=3, leased_blocks=5, tickets=2)


class HoldersMachine(RuleBasedStateMachine):
    """Owners of several tenants, who know every id. Each call does what it does for its tenant's ids alone."""

    def __init__(self) -> None:
        super().__init__()
        ids = iter(range(1, 1 << 30))
        self.clock = FakeClock()
        limits = Limits(max_leases=100, max_tickets=100, grace_ms=0)
        arena = Arena(64 * 64, 16 * 64)
        self.pool = PoolAtOnce(arena, self.clock, lambda: next(ids), limits, limits_of=lambda _: OWN)
        self.name = self.pool.open_namespace(namespace_spec(group_spec(chunk_bytes=64)))[0].fingerprint
        self.leases: dict[int, tuple[Owner, list[int], float]] = {}
        self.tickets: dict[int, tuple[Owner, int, float]] = {}

    def _is_live(self, hold_id: int, owner: Owner, table: dict[int, tuple[Owner, object, float]]) -> bool:
        holder, _, ends_at = table.get(hold_id, (None, None, 0.0))
        return holder is not None and holder.tenant == owner.tenant and ends_at > self.clock()

    @rule(owner=st.sampled_from(OWNERS), names=NAMES, ttl_ms=st.sampled_from([50, 5_000]))
    def lookup(self, owner: Owner, names: list[int], ttl_ms: int) -> None:
        held = [names for holder, names, ends_at in self.leases.values() if holder == owner and ends_at > self.clock()]
        found = finish(self.pool.lookups.find(self.name, [run_of(*names)], False, ttl_ms, owner))
        hits = [name for nth, name in enumerate(names) if found.hits[0].complete >> nth & 1]
        has_room = len(held) < OWN.leases and sum(map(len, held)) + len(hits) <= OWN.leased_blocks
        assert bool(found.lease_id) == bool(hits and (has_room or not owner.tenant))
        if found.lease_id:
            self.leases[found.lease_id] = owner, hits, self.clock() + ttl_ms / 1000

    @rule(owner=st.sampled_from(OWNERS), names=NAMES, ttl_ms=st.sampled_from([50, 5_000]))
    def put_start(self, owner: Owner, names: list[int], ttl_ms: int) -> None:
        held = [holder for holder, _, ends_at in self.tickets.values() if holder == owner and ends_at > self.clock()]
        put = functools.partial(self.pool.put_start_in_steps, self.name, [run_of(*names)], WHOLE, ttl_ms, owner)
        if owner.tenant and len(held) >= OWN.tickets:
            with pytest.raises(OutOfSpaceError, match=f"{OWN.tickets} puts of {owner.name}"):
                finish(put())
            return
        grant = finish(put())
        if grant.ticket_id:
            self.tickets[grant.ticket_id] = owner, len(grant.offsets), self.clock() + ttl_ms / 1000

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def get(self, data: st.DataObject, owner: Owner) -> None:
        lease_id = data.draw(st.sampled_from([*self.leases, UNKNOWN_ID]))
        expected = self._is_live(lease_id, owner, self.leases)  # type: ignore[arg-type]
        refusal = _refusal(lambda: self.pool.get(lease_id, self.name, [run_of(0)], WHOLE, owner))
        assert not refusal if expected else f"lease {lease_id:#x} is not live" in refusal

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def release(self, data: st.DataObject, owner: Owner) -> None:
        lease_id = data.draw(st.sampled_from([*self.leases, UNKNOWN_ID]))
        expected = self._is_live(lease_id, owner, self.leases)  # type: ignore[arg-type]
        assert self.pool.release([lease_id], owner) == expected
        if expected:
            del self.leases[lease_id]

    @rule(data=st.data(), owner=st.sampled_from(OWNERS), ends=st.sampled_from(["put_end", "put_revoke"]))
    def end_put(self, data: st.DataObject, owner: Owner, ends: str) -> None:
        ticket_id = data.draw(st.sampled_from([*self.tickets, UNKNOWN_ID]))
        expected = self._is_live(ticket_id, owner, self.tickets)  # type: ignore[arg-type]
        if ends == "put_revoke":
            assert self.pool.put_revoke(ticket_id, owner) == expected
        else:
            count = self.tickets[ticket_id][1] if ticket_id in self.tickets else 1
            refusal = _refusal(lambda: finish(self.pool.put_end_in_steps(ticket_id, [0] * count, owner)))
            assert not refusal if expected else f"ticket {ticket_id:#x} is not live" in refusal
        if expected:
            del self.tickets[ticket_id]

    @rule(seconds=st.sampled_from([0.02, 0.1]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def the_pool_is_sound(self) -> None:
        check_integrity(self.pool)


def _refusal(call: Callable[[], object]) -> str:
    """What a call about a lease or ticket is refused with; empty if it is not."""
    try:
        call()
    except LeaseExpiredError as error:
        return str(error)
    return ""


TestHolders = HoldersMachine.TestCase
TestHolders.settings = settings(max_examples=effort(75), stateful_step_count=40)
