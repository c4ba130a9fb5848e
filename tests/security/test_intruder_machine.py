"""Two tenants and strangers call any RPC with any ids; each tenant sees what it would see if it were alone.

Every call of a tenant is made twice: to the pool that all share, and to the tenant's own pool, which gets no other
call. The two answers must be the same, but for where bytes lie and how ids are called. A call with what was stolen from
the other tenant names something unknown in the caller's own pool, so its answer must be that for something unknown.
All pools have room for everything, and their clocks go alike: room and time are all that tenants share.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvpool.protocol import wire
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.caller import CALLS
from kvpool_server.rpc import handlers, operators, sessions
from kvpool_server.sharing import Limits
from tests.support.effort import effort
from tests.support.integrity import check_integrity
from tests.support.values import block_hash, group_spec, namespace_spec
from tests.support.wire_service import METHODS, Answer, WireHouse

CHUNK_BYTES, NUM_SHARDS, EXTENT_BYTES, ARENA_BYTES = 16, 2, 256, 1 << 16
SLOT_BYTES = CHUNK_BYTES * NUM_SHARDS
LIMITS = Limits(max_ttl_ms=1_000, grace_ms=50)
TENANTS = {"acme": 0xA0, "umbra": 0xB0}
"""By tenant: the upper half of every byte that it writes."""
EPOCHS = ("1", "2")
NAMES = range(4)
ABOUT_BLOCKS = ("Verify", "Remove", "Explain", "Hint", "Exists")
SHARDS = ((0, 2), (0, 2), (0, 1), (1, 1))
ALONE_IDS = 1 << 40
"""Where the ids of a tenant's own pool begin: none is one of the shared pool."""
SECRET = b"a secret"
HIDDEN = frozenset({"lease_id", "ticket_id", "offsets", "permit"})
"""Fields whose values differ in a pool of one's own, but not whether they are there."""
LEFT_OUT = frozenset({"boot_token", "offset", "uptime_seconds", "remembered_seconds", "half_remembered_seconds"})
"""Fields that may differ in every way."""


def house(first_id: int) -> WireHouse:
    return WireHouse(ARENA_BYTES, EXTENT_BYTES, LIMITS, first_id)


@dataclass(frozen=True)
class Held:
    """A lease or ticket, as the shared pool calls it and as its tenant's own pool does.

    Args:
        names: of the blocks that it covers.
        offsets: of their regions.
        shards: (first, count).
    """

    space: NamespaceSpec
    names: tuple[int, ...]
    shards: tuple[int, int]
    ids: tuple[int, int]
    offsets: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def region_bytes(self) -> int:
        return self.shards[1] * CHUNK_BYTES


@dataclass
class Tenant:
    """One tenant, and what it holds."""

    name: str
    alone: WireHouse = field(default_factory=lambda: house(ALONE_IDS))
    tickets: list[Held] = field(default_factory=list)
    leases: list[Held] = field(default_factory=list)

    def chunk(self, name: int) -> bytes:
        return bytes([TENANTS[self.name] | name]) * CHUNK_BYTES

    def check_bytes(self, answer: Answer) -> None:
        """Every byte of a block that the tenant gets is its own, or was never written."""
        for reply in answer.replies:
            payload = reply.payload + reply.chunk.payload if isinstance(reply, pb.GetChunksResponse) else b""
            foreign = {byte for byte in payload if byte and byte & 0xF0 != TENANTS[self.name]}
            assert not foreign, f"{self.name} reads bytes of another tenant: {foreign}"


def _check_secrets(answer: Answer) -> None:
    """No answer has a secret of a specification, not even the caller's own: listings have digests."""
    told = answer.message.encode() + b"".join(reply.SerializeToString() for reply in answer.replies)
    assert SECRET not in told, "an answer has a secret"


def seen(answer: Answer) -> tuple[Any, ...]:
    """What a caller sees, without ids and places."""
    return (
        answer.code,
        re.sub(r"0x[0-9a-f]+|[0-9a-f]*[0-9][0-9a-f]*", "#", answer.message),
        [_shown(reply) for reply in answer.replies],
    )


def _shown(message: Message) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        if descriptor.name in LEFT_OUT:
            continue
        if descriptor.name in HIDDEN:
            shown[descriptor.name] = len(value) if hasattr(value, "__len__") else "set"
        elif isinstance(value, Message):
            shown[descriptor.name] = _shown(value)
        elif value and hasattr(value, "__getitem__") and isinstance(next(iter(value), None), Message):
            shown[descriptor.name] = [_shown(each) for each in value]
        else:
            shown[descriptor.name] = value if isinstance(value, str | bytes | int | float) else str(value)
    return shown


def space_of(tenant: str, epoch: str) -> NamespaceSpec:
    group = group_spec(chunk_bytes=CHUNK_BYTES, num_shards=NUM_SHARDS)
    secrets = {name: f"{SECRET.decode()} {name} of {tenant}" for name in ("salt", "hash_seed")}
    return namespace_spec(group, tenant=tenant, weights_epoch=epoch, **secrets)


def run_of(names: Sequence[int]) -> pb.BlockRun:
    return pb.BlockRun(block_hashes=b"".join(map(block_hash, names)))


tenants = st.sampled_from(range(len(TENANTS)))
epochs = st.sampled_from(EPOCHS)
blocks = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)
shards = st.sampled_from(SHARDS)
thefts = st.sampled_from([False, False, True])
readers = st.sampled_from([Role.ENGINE_READ, Role.ENGINE_WRITE])


class IntruderMachine(RuleBasedStateMachine):
    """Anybody may call anything at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = house(1)
        self.tenants = [Tenant(name) for name in TENANTS]

    def ask(
        self, tenant: Tenant, role: Role, method: str, shared: Message, alone: Message | None = None
    ) -> list[Answer]:
        """Makes a call in the shared pool and in the tenant's own, and compares the answers.

        Args:
            alone: the request to the tenant's own pool, where it is another.
        """
        principal = Principal(tenant.name, role)
        answers = [
            self.shared.service.call(principal, method, shared),
            tenant.alone.service.call(principal, method, alone or shared),
        ]
        tenant.check_bytes(answers[0])
        _check_secrets(answers[0])
        in_shared, in_alone = map(seen, answers)
        assert in_shared == in_alone, f"{method} of {principal}: {in_shared}; alone: {in_alone}"
        return answers

    def other(self, tenant: Tenant) -> Tenant:
        return next(other for other in self.tenants if other is not tenant)

    def space(self, tenant: Tenant, epoch: str, steals: bool) -> NamespaceSpec:
        return space_of((self.other(tenant) if steals else tenant).name, epoch)

    def held(self, data: st.DataObject, tenant: Tenant, kind: str, steals: bool) -> Held | None:
        """A lease or ticket: the tenant's, or one stolen from the other, unknown to the tenant's own pool."""
        those: list[Held] = getattr(self.other(tenant) if steals else tenant, kind)[-5:]
        if not those:
            return None
        one = data.draw(st.sampled_from(those))
        return Held(one.space, one.names, one.shards, (one.ids[0],) * 2, (one.offsets[0],) * 2) if steals else one

    # Namespaces

    @rule(tenant=tenants, epoch=epochs, steals=thefts, expects=thefts, role=readers)
    def open(self, tenant: int, epoch: str, steals: bool, expects: bool, role: Role) -> None:
        who = self.tenants[tenant]
        request = pb.OpenNamespaceRequest(spec=wire.encode_spec(self.space(who, epoch, steals)))
        if expects:
            request.expected_fingerprint = self.space(who, epoch, True).fingerprint()
        self.ask(who, role, "OpenNamespace", request)

    @initialize()
    def open_one_each(self) -> None:
        for nth in range(len(self.tenants)):
            self.open(nth, EPOCHS[0], False, False, Role.ENGINE_WRITE)

    # Puts

    @rule(tenant=tenants, epoch=epochs, steals=thefts, names=blocks, shards=shards, ttl_ms=st.sampled_from([50, 1_000]))
    def put_start(
        self, tenant: int, epoch: str, steals: bool, names: list[int], shards: tuple[int, int], ttl_ms: int
    ) -> None:
        who = self.tenants[tenant]
        self._put_start(who, self.space(who, epoch, steals), names, shards, ttl_ms)

    def _put_start(
        self, who: Tenant, space: NamespaceSpec, names: Sequence[int], shards: tuple[int, int], ttl_ms: int
    ) -> Held | None:
        first, count = shards
        request = pb.PutStartRequest(namespace=space.fingerprint(), runs=[run_of(names)], ticket_ttl_ms=ttl_ms)
        request.shards.start, request.shards.count = first, count
        answers = self.ask(who, Role.ENGINE_WRITE, "PutStart", request)
        if answers[0].code is not grpc.StatusCode.OK:
            return None
        shared, alone = (answer.replies[0] for answer in answers)
        if not shared.ticket_id:
            return None
        granted = tuple(
            name for name, status in zip(names, shared.statuses, strict=True) if status == pb.PUT_STATUS_GRANTED
        )
        offsets = tuple(shared.offsets), tuple(alone.offsets)
        held = Held(space, granted, shards, (shared.ticket_id, alone.ticket_id), offsets)
        who.tickets.append(held)
        return held

    @rule(tenant=tenants, epoch=epochs, names=blocks, shards=shards)
    def put(self, tenant: int, epoch: str, names: list[int], shards: tuple[int, int]) -> None:
        """A whole put, undisturbed: what most traffic is."""
        who = self.tenants[tenant]
        held = self._put_start(who, self.space(who, epoch, False), names, shards, 1_000)
        if held is not None:
            self._write(who, held)
            self._put_end(who, held)

    @rule(tenant=tenants, data=st.data(), steals=thefts, how=st.sampled_from(["end", "revoke", "write"]))
    def go_on_with_put(self, tenant: int, data: st.DataObject, steals: bool, how: str) -> None:
        who = self.tenants[tenant]
        held = self.held(data, who, "tickets", steals)
        if held is None:
            return
        if how == "revoke":
            requests = [pb.PutRevokeRequest(ticket_id=hold_id) for hold_id in held.ids]
            self.ask(who, Role.ENGINE_WRITE, "PutRevoke", *requests)
            return
        self._write(who, held)
        if how == "end":
            self._put_end(who, held)

    def _write(self, who: Tenant, held: Held) -> None:
        for name, *offsets in zip(held.names, *held.offsets, strict=True):
            payload = who.chunk(name) * held.shards[1]
            requests = [
                pb.PutChunksRequest(ticket_id=hold_id, offset=offset, payload=payload)
                for hold_id, offset in zip(held.ids, offsets, strict=True)
            ]
            self.ask(who, Role.ENGINE_WRITE, "PutChunks", *requests)

    def _put_end(self, who: Tenant, held: Held) -> None:
        sums = [xxhash.xxh3_64_intdigest(who.chunk(name)) for name in held.names for _ in range(held.shards[1])]
        requests = [pb.PutEndRequest(ticket_id=hold_id, checksums=sums) for hold_id in held.ids]
        self.ask(who, Role.ENGINE_WRITE, "PutEnd", *requests)

    @rule(tenant=tenants, epoch=epochs, name=st.sampled_from(NAMES))
    def read_what_was_not_written(self, tenant: int, epoch: str, name: int) -> None:
        who = self.tenants[tenant]
        writer, space = Principal(who.name, Role.ENGINE_WRITE), self.space(who, epoch, False)
        if (held := self._put_start(who, space, [name], (0, NUM_SHARDS), 1_000)) is None:
            return
        for pool, hold_id in zip((self.shared, who.alone), held.ids, strict=True):
            pool.service.call(writer, "PutEnd", pb.PutEndRequest(ticket_id=hold_id, checksums=[0] * NUM_SHARDS))
        lease = self._look_up(who, Role.ENGINE_WRITE, held.space, [name], 1_000, False)
        assert lease is not None
        request = pb.GetChunksRequest(lease_id=lease.ids[0], offsets=lease.offsets[0], region_bytes=SLOT_BYTES)
        who.check_bytes(self.shared.service.call(writer, "GetChunks", request))
        self._release(who, lease)
        request = pb.RemoveRequest(namespace=held.space.fingerprint(), runs=[run_of([name])])
        self.ask(who, Role.TENANT_OPERATOR, "Remove", request)

    # Gets

    @rule(
        tenant=tenants, role=readers, epoch=epochs, steals=thefts, names=blocks, ttl_ms=st.sampled_from([0, 50, 1_000]),
        streams=st.booleans(),
    )  # fmt: skip
    def look_up(
        self, tenant: int, role: Role, epoch: str, steals: bool, names: list[int], ttl_ms: int, streams: bool
    ) -> None:
        who = self.tenants[tenant]
        self._look_up(who, role, self.space(who, epoch, steals), names, ttl_ms, streams)

    def _look_up(
        self, who: Tenant, role: Role, space: NamespaceSpec, names: Sequence[int], ttl_ms: int, streams: bool
    ) -> Held | None:
        request = pb.LookupRequest(
            namespace=space.fingerprint(), runs=[run_of(names)], lease_ttl_ms=ttl_ms, locate=True
        )
        answers = self.ask(who, role, "LookupStream" if streams else "Lookup", request)
        if answers[0].code is not grpc.StatusCode.OK:
            return None
        found = [answer.replies[0].found if streams else answer.replies[0] for answer in answers]
        if not found[0].lease_id:
            return None
        hits = found[0].hits[0]
        there = tuple(name for nth, name in enumerate(names) if hits.complete[nth // 8] >> nth % 8 & 1)
        offsets = tuple(tuple(np.frombuffer(each.hits[0].offsets, "<u8").tolist()) for each in found)
        held = Held(space, there, (0, NUM_SHARDS), (found[0].lease_id, found[1].lease_id), (offsets[0], offsets[1]))
        who.leases.append(held)
        return held

    @rule(tenant=tenants, data=st.data(), steals=thefts, role=readers, how=st.sampled_from(["get", "read", "release"]))
    def go_on_with_get(self, tenant: int, data: st.DataObject, steals: bool, role: Role, how: str) -> None:
        who = self.tenants[tenant]
        held = self.held(data, who, "leases", steals)
        if held is None:
            return
        if how == "release":
            self._release(who, held, data.draw(st.booleans()))
        elif how == "read":
            requests = [
                pb.GetChunksRequest(lease_id=hold_id, offsets=offsets, region_bytes=held.region_bytes)
                for hold_id, offsets in zip(held.ids, held.offsets, strict=True)
            ]
            self.ask(who, role, "GetChunks", *requests)
        else:
            fingerprint = data.draw(st.sampled_from([held.space, self.space(who, EPOCHS[0], True)])).fingerprint()
            requests = []
            for hold_id in held.ids:
                requests.append(pb.GetRequest(lease_id=hold_id, namespace=fingerprint, runs=[run_of(held.names)]))
                requests[-1].shards.count = NUM_SHARDS
            self.ask(who, role, "Get", *requests)

    def _release(self, who: Tenant, held: Held, by_lookup: bool = False) -> None:
        if by_lookup:
            requests: list[Any] = [pb.LookupRequest(release=[hold_id]) for hold_id in held.ids]
        else:
            requests = [pb.ReleaseRequest(lease_ids=[hold_id]) for hold_id in held.ids]
        self.ask(who, Role.ENGINE_READ, "Lookup" if by_lookup else "Release", *requests)

    @rule(tenant=tenants, data=st.data())
    def read_elsewhere(self, tenant: int, data: st.DataObject) -> None:
        """An own lease, and a place that it does not cover: the other tenant's, where there is one."""
        who = self.tenants[tenant]
        held = self.held(data, who, "leases", False)
        if held is None:
            return
        nowhere = ARENA_BYTES - SLOT_BYTES
        foreign = next((each.offsets[0][0] for each in reversed(self.other(who).leases) if each.offsets[0]), nowhere)
        if foreign in held.offsets[0]:  # The other tenant's lease has ended, and the slot has another owner.
            return
        requests = [
            pb.GetChunksRequest(lease_id=hold_id, offsets=[offset], region_bytes=SLOT_BYTES)
            for hold_id, offset in zip(held.ids, (foreign, nowhere), strict=True)
        ]
        self.ask(who, Role.ENGINE_READ, "GetChunks", *requests)

    # Chunks within messages

    @rule(tenant=tenants, epoch=epochs, steals=thefts, name=st.sampled_from(NAMES), shard=st.sampled_from([0, 1]))
    def put_chunk(self, tenant: int, epoch: str, steals: bool, name: int, shard: int) -> None:
        who = self.tenants[tenant]
        payload = who.chunk(name)
        chunk = pb.Chunk(payload=payload, checksum=xxhash.xxh3_64_intdigest(payload))
        chunk.key.CopyFrom(self._key(who, epoch, steals, name, shard))
        self.ask(who, Role.ENGINE_WRITE, "PutChunks", pb.PutChunksRequest(chunks=[chunk]))

    @rule(tenant=tenants, epoch=epochs, steals=thefts, name=st.sampled_from(NAMES), shard=st.sampled_from([0, 1]))
    def get_chunk(self, tenant: int, epoch: str, steals: bool, name: int, shard: int) -> None:
        who = self.tenants[tenant]
        key = self._key(who, epoch, steals, name, shard)
        self.ask(who, Role.ENGINE_READ, "GetChunks", pb.GetChunksRequest(keys=[key]))

    def _key(self, who: Tenant, epoch: str, steals: bool, name: int, shard: int) -> pb.PoolKey:
        namespace = self.space(who, epoch, steals).fingerprint()
        return pb.PoolKey(namespace=namespace, block_hash=block_hash(name), shard=shard)

    # Operators

    @rule(tenant=tenants, epoch=epochs, steals=thefts, names=blocks, method=st.sampled_from(ABOUT_BLOCKS))
    def about_blocks(self, tenant: int, epoch: str, steals: bool, names: list[int], method: str) -> None:
        who = self.tenants[tenant]
        role = next(role for role in (Role.ENGINE_READ, Role.TENANT_OPERATOR) if method in CALLS[role])
        request = GetMessageClass(METHODS[method].input_type)(
            namespace=self.space(who, epoch, steals).fingerprint(), runs=[run_of(names)]
        )
        if method == "Hint":
            request.kind, request.pin_seconds = pb.HINT_KIND_PIN, 1
        self.ask(who, role, method, request)

    @rule(tenant=tenants, epoch=epochs, of=st.sampled_from(["own", "other's", "all"]))
    def clear(self, tenant: int, epoch: str, of: str) -> None:
        who = self.tenants[tenant]
        namespace = b"" if of == "all" else self.space(who, epoch, of == "other's").fingerprint()
        self.ask(who, Role.TENANT_OPERATOR, "Clear", pb.ClearRequest(namespace=namespace))

    @rule(tenant=tenants)
    def look_around(self, tenant: int) -> None:
        who = self.tenants[tenant]
        self.ask(who, Role.TENANT_OPERATOR, "ListNamespaces", pb.ListNamespacesRequest())
        self.ask(who, Role.TENANT_OPERATOR, "ListQuotas", pb.ListQuotasRequest())
        self.ask(who, Role.TENANT_OPERATOR, "Ledger", pb.LedgerRequest())
        self.ask(who, Role.TENANT_OPERATOR, "Value", pb.ValueRequest())
        self.ask(who, Role.ENGINE_READ, "Ping", pb.PingRequest())
        self.ask(who, Role.ENGINE_READ, "WhoAmI", pb.WhoAmIRequest())

    # Strangers, and callers whose role does not do

    @rule(
        method=st.sampled_from(sorted(METHODS)), role=st.none() | st.sampled_from(Role), tenant=tenants, data=st.data()
    )
    def refused(self, method: str, role: Role | None, tenant: int, data: st.DataObject) -> None:
        """Calls that nobody answers change nothing, whatever ids they name; the next calls of the tenants show it."""
        if role is not None and method in CALLS[role]:
            return
        principal = role and Principal(self.tenants[tenant].name if role.has_tenant else ALL_TENANTS, role)
        answer = self.shared.service.send(principal, method, self._any_request(method, data).SerializeToString())
        refusal = grpc.StatusCode.UNAUTHENTICATED if principal is None else grpc.StatusCode.PERMISSION_DENIED
        assert answer.code is refusal and not answer.replies, f"{method} of {principal}: {answer}"

    def _any_request(self, method: str, data: st.DataObject) -> Message:
        """A request that would do harm."""
        holds = [held for tenant in self.tenants for held in (*tenant.tickets, *tenant.leases)]
        held = data.draw(st.sampled_from(holds)) if holds else None
        space = held.space if held is not None else space_of("acme", "1")
        hold_id = held.ids[0] if held is not None else 1
        request = GetMessageClass(METHODS[method].input_type)()
        for name, value in {"ticket_id": hold_id, "lease_id": hold_id, "namespace": space.fingerprint()}.items():
            if name in request.DESCRIPTOR.fields_by_name:
                setattr(request, name, value)
        if "lease_ids" in request.DESCRIPTOR.fields_by_name:
            request.lease_ids.append(hold_id)
        if "runs" in request.DESCRIPTOR.fields_by_name:
            request.runs.append(run_of(held.names if held is not None else NAMES))
        if "quotas" in request.DESCRIPTOR.fields_by_name:
            request.quotas.add(subject="tenant:acme", limit_bytes=1)
        return request

    @rule(seconds=st.sampled_from([0.01, 0.06, 1.0]))
    def advance(self, seconds: float) -> None:
        for pool in (self.shared, *(tenant.alone for tenant in self.tenants)):
            pool.advance(seconds)

    @invariant()
    def holds(self) -> None:
        check_integrity(self.shared.pool)


TestIntruderMachine = IntruderMachine.TestCase
# Without shrinking, which takes minutes; the blob that is printed finds the example again, to shrink it then.
TestIntruderMachine.settings = settings(
    max_examples=effort(60), stateful_step_count=50, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)


def _all_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (handlers, operators):
        monkeypatch.setattr(module, "is_visible", lambda tenant: True)


def _anybody_opens_for_a_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "check_tenant", lambda tenant: None)


def _clear_is_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "check_all_tenants", lambda what: None)


def _tenants_share_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the tenant were not in the fingerprint."""
    whole = NamespaceSpec.fingerprint
    everybodys = {"tenant": "", "salt": "", "hash_seed": ""}
    monkeypatch.setattr(NamespaceSpec, "fingerprint", lambda spec: whole(replace(spec, **everybodys)))
    _all_are_visible(monkeypatch)


BROKEN = (_all_are_visible, _anybody_opens_for_a_tenant, _clear_is_for_all, _tenants_share_namespaces)


@pytest.mark.parametrize("break_it", BROKEN, ids=lambda broken: broken.__name__.strip("_"))
def test_the_machine_catches_a_broken_service(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    quick = settings(max_examples=200, stateful_step_count=50, database=None, phases=[Phase.generate], derandomize=True)
    with pytest.raises(AssertionError, match=r"alone: |another tenant|UNAUTHENTICATED|PERMISSION"):
        run_state_machine_as_test(IntruderMachine, settings=quick)
