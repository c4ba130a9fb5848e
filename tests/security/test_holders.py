"""Leases and tickets of another tenant: whoever knows their ids gets the answer for ids that nobody has."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool import wire
from kvpool.errors import LeaseExpiredError, OutOfSpaceError
from kvpool.hashing import checksum
from kvpool.principal import Role
from kvpool.types import ShardRange
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.permissions import CALLS
from kvpool_server.cache.allocator.arena import Arena
from kvpool_server.cache.leases import Owner
from kvpool_server.cache.limits import IdentityLimits, Limits
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.steps import finish
from tests.security.test_access import Deployment
from tests.support.calls import BLOCK_BYTES, BYTES_BY_ID, METHODS, Outcome, Target, outcome
from tests.support.clock import FakeClock
from tests.support.effort import effort
from tests.support.values import block_hash, group_spec, namespace_spec, payload, run_of

WHOLE = ShardRange(0, 1)
ABOUT_NOTHING = {"Ping", "WhoAmI", "Stats", "ListNamespaces", "ListQuotas", "SetQuotas", "Ledger", "Value", "Drain"}
BY_ID = ("Get", "Release", "PutEnd", "PutRevoke", *BYTES_BY_ID)
UNKNOWN_ID = 0x1234_5678_9ABC
UMBRAS = namespace_spec(group_spec(chunk_bytes=BLOCK_BYTES), tenant="umbra")


@pytest.fixture
def held(deployment: Deployment) -> Iterator[Target]:
    """A lease and a ticket of tenant umbra, which must be as they were when the test ends."""
    with deployment.client(Role.ENGINE_WRITE, "umbra", transport="grpc", lease_ttl_ms=60_000) as client:
        namespace = client.open_namespace(UMBRAS)
        client.put_blocks(namespace, run_of("block"), [payload("umbra", BLOCK_BYTES)])
        found = client.lookup(namespace, [run_of("block")])
        located = client.rpc.stub.Get(
            pb.GetRequest(
                lease_id=found.lease_id,
                namespace=namespace.fingerprint,
                runs=wire.encode_runs([run_of("block")]),
                shards=wire.encode_shards(WHOLE),
            )
        )
        grant = client.rpc.put_start(namespace, [run_of("written")], WHOLE)
        written = payload("written", BLOCK_BYTES)
        client.rpc.stub.PutChunks(
            iter([pb.PutChunksRequest(ticket_id=grant.ticket_id, offset=grant.offsets[0], payload=written.tobytes())]),
            timeout=60,
        )
        yield Target(namespace.fingerprint, found.lease_id, located.offsets[0], grant.ticket_id, grant.offsets[0])
        (block,) = client.get_blocks(namespace, found.lease_id, run_of("block"))
        assert block is not None and bytes(block) == payload("umbra", BLOCK_BYTES).tobytes()
        assert client.rpc.put_end(grant.ticket_id, [checksum(written)]).num_complete == 1
        found = client.lookup(namespace, [run_of("written")])
        (block,) = client.get_blocks(namespace, found.lease_id, run_of("written"))
        assert block is not None and bytes(block) == written.tobytes(), "a stranger has written into the ticket's slot"
    with deployment.client(Role.TENANT_OPERATOR, "umbra") as operator:
        operator.admin.clear(namespace.fingerprint)


def test_every_rpc_is_about_a_namespace_or_an_id_or_nothing() -> None:
    """A new RPC has to be put in its place, so that the test below makes calls of it about another tenant's things."""
    found = {"OpenNamespace", "Lookup", "LookupStream", "PutStart", "PutChunks", "GetChunks", "Verify", "Remove"}
    found |= {"Report", "Explain", "Hint", "Exists"}
    assert found | {"Clear", *BY_ID} | ABOUT_NOTHING == set(METHODS) | set(BYTES_BY_ID)


@pytest.mark.parametrize("method", sorted({*METHODS, *BYTES_BY_ID} - ABOUT_NOTHING))
@pytest.mark.parametrize("role", [role for role in Role if role is not Role.OPERATOR])
def test_what_is_another_tenants_is_as_what_is_not(
    deployment: Deployment, held: Target, role: Role, method: str
) -> None:
    own = namespace_spec(group_spec(chunk_bytes=BLOCK_BYTES), tenant="acme")
    with deployment.client(role, "acme") as client:
        foreign = outcome(client, method, replace(held, spec=own))
        unknown = outcome(client, method, Target(block_hash("never opened"), *[UNKNOWN_ID] * 4, spec=own))
    assert foreign == unknown
    if method.split()[0] not in CALLS[role]:
        assert foreign.code is grpc.StatusCode.PERMISSION_DENIED
    elif method in ("Release", "PutRevoke"):
        assert foreign.code is grpc.StatusCode.OK
    elif method in ("PutEnd", *BYTES_BY_ID):
        assert foreign.code is grpc.StatusCode.ABORTED
    else:
        assert foreign.code is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("role", [Role.ENGINE_READ, Role.ENGINE_WRITE, Role.OPERATOR])
@pytest.mark.parametrize("method", [*BY_ID, "Lookup", "LookupStream"])
def test_ids_are_no_good_in_a_namespace_of_ones_own(
    deployment: Deployment, held: Target, role: Role, method: str
) -> None:
    """Operators may call everything about every namespace; but leases and tickets are of those who got them."""
    if method.split()[0] not in CALLS[role]:
        return
    mine = deployment.fingerprints["acme"]
    with deployment.client(role, "acme") as client:
        foreign = replace(held, namespace=mine, lookup_release=True)
        unknown = Target(mine, *[UNKNOWN_ID] * 4, lookup_release=True)
        assert _settled(client, method, foreign) == _settled(client, method, unknown)


def _settled(client: object, method: str, target: Target) -> Outcome:
    found = outcome(client, method, target)  # type: ignore[arg-type]
    if method in BY_ID and method not in ("Release", "PutRevoke"):
        assert found.code is grpc.StatusCode.ABORTED
    else:
        assert found.code is grpc.StatusCode.OK
    return found


def test_engines_of_a_tenant_may_use_each_others(deployment: Deployment, held: Target) -> None:
    """A scheduler takes the lease, and a worker loads under it: by another connection, maybe by another role."""
    with deployment.client(Role.ENGINE_READ, "umbra") as reader:
        assert outcome(reader, "Get", held).code is grpc.StatusCode.OK
        assert outcome(reader, "GetChunks of regions", held).code is grpc.StatusCode.OK
    with deployment.client(Role.ENGINE_WRITE, "umbra") as writer:
        found = writer.rpc.stub.Lookup(
            pb.LookupRequest(namespace=held.namespace, runs=wire.encode_runs([run_of("block")]), lease_ttl_ms=60_000)
        )
    with deployment.client(Role.ENGINE_READ, "umbra") as reader:
        assert reader.release([found.lease_id]) == 1


# The pool alone

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
        self.pool = Pool(arena, self.clock, lambda: next(ids), limits, limits_of=lambda _: OWN)
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
        self.pool.check_integrity()


def _refusal(call: Callable[[], object]) -> str:
    """What a call about a lease or ticket is refused with; empty if it is not."""
    try:
        call()
    except LeaseExpiredError as error:
        return str(error)
    return ""


TestHolders = HoldersMachine.TestCase
TestHolders.settings = settings(max_examples=effort(75), stateful_step_count=40)


def test_a_foreign_id_costs_as_long_as_an_unknown_one() -> None:
    """A large lease of another's is not looked into: that would take a hundred times as long as not finding it."""
    ids = iter(range(1, 1 << 30))
    pool = Pool(Arena(8_192 * 64, 128 * 64), FakeClock(), lambda: next(ids))
    name = pool.open_namespace(namespace_spec(group_spec(chunk_bytes=64)))[0].fingerprint
    run = run_of(*range(4_096))
    pool.put_end(pool.put_start(name, [run], WHOLE).ticket_id, [0] * 4_096)
    mine, stranger = Owner("umbra", "umbra"), Owner("acme", "acme")
    lease_id = finish(pool.lookups.find(name, [run], True, 60_000, mine)).lease_id
    grant = finish(pool.put_start_in_steps(name, [run_of(*range(5_000, 8_000))], WHOLE, 60_000, mine))
    calls: dict[str, Callable[[int], object]] = {
        "get": lambda hold_id: pool.get(hold_id, name, [run_of(0)], WHOLE, stranger),
        "readable": lambda hold_id: pool.readable(hold_id, 0, 64, stranger),
        "release": lambda hold_id: pool.release([hold_id], stranger),
        "put_end": lambda hold_id: finish(pool.put_end_in_steps(hold_id, [0], stranger)),
        "put_revoke": lambda hold_id: pool.put_revoke(hold_id, stranger),
        "writable": lambda hold_id: pool.writable(hold_id, grant.offsets[0], 64, stranger),
    }
    for method, call in calls.items():
        foreign_id = lease_id if method in ("get", "readable", "release") else grant.ticket_id
        fastest = {foreign_id: float("inf"), UNKNOWN_ID: float("inf")}
        for _ in range(300):
            for hold_id in fastest:
                began = time.perf_counter_ns()
                try:
                    call(hold_id)
                except LeaseExpiredError:
                    pass
                fastest[hold_id] = min(fastest[hold_id], time.perf_counter_ns() - began)
        assert fastest[foreign_id] < 3 * fastest[UNKNOWN_ID], method
    assert pool.get(lease_id, name, [run_of(0)], WHOLE, mine).offsets
