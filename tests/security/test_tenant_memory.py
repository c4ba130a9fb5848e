"""No tenant gets another's bytes with a slot, nor takes more of the arena than its quota, whatever it asks for."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from kvpool.client.client import Client
from kvpool.protocol import wire
from kvpool.protocol.errors import OutOfSpaceError
from kvpool.protocol.types import ShardRange
from kvpool.security.principal import Role
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.sharing import Limits
from tests.security.conftest import Deploy
from tests.support.in_process_server import InProcessServer
from tests.support.tenants import EXTENT, WHOLE, House
from tests.support.values import group_spec, namespace_spec, payload, run_of

MIB = 1 << 20
TIMEOUT_S = 20.0


def test_slots_that_nobody_has_written_are_empty_for_another_tenant(deploy: Deploy) -> None:
    """Both in extents that were given up for a tenant below its share, and in those that became free."""
    deployment = deploy("--grace-ms", "100")

    def unwritten(client: Client, tenant: str, chunk_bytes: int) -> bytes:
        """What lies in slots that a tenant gets, does not write, and commits."""
        spec = namespace_spec(group_spec(chunk_bytes=chunk_bytes), tenant=tenant)
        namespace, run = client.open_namespace(spec), run_of(*range(8))
        grant = client.rpc.put_start(namespace, [run], ShardRange(0, 1))
        assert client.rpc.put_end(grant.ticket_id, [7] * 8).num_complete == 8
        lease_id = client.lookup(namespace, [run]).lease_id
        read = pb.GetChunksRequest(lease_id=lease_id, offsets=grant.offsets, region_bytes=chunk_bytes)
        found = b"".join(piece.payload for piece in client.rpc.stub.GetChunks(read, timeout=TIMEOUT_S))
        client.release([lease_id])
        assert len(found) == 8 * chunk_bytes
        return found

    with (
        deployment.client(Role.ENGINE_WRITE, "acme", transport="grpc") as acme,
        deployment.client(Role.ENGINE_WRITE, "umbra", transport="grpc") as umbra,
        deployment.client(Role.OPERATOR) as operator,
    ):
        operator.admin.clear()
        namespace = acme.open_namespace(namespace_spec(group_spec(chunk_bytes=MIB), tenant="acme"))
        for start in range(0, 16, 4):  # They fill the arena, whose extents have 4 MiB.
            names = range(start, start + 4)
            acme.put_blocks(namespace, run_of(*names), [payload(f"acme {name}", MIB) for name in names])
        assert not any(unwritten(umbra, "umbra", MIB)), "bytes of blocks that were evicted"
        assert operator.admin.clear(namespace.fingerprint)
        assert any(unwritten(acme, "acme", MIB // 2)), "a tenant's own slots are not zeroed"
        assert not any(unwritten(umbra, "umbra", MIB // 2)), "bytes of blocks that were cleared"


def test_zeroing_an_extent_for_another_tenant_does_not_hold_the_loop() -> None:
    extent_bytes = 256 * MIB
    with contextlib.ExitStack() as stack:
        server = InProcessServer(extent_bytes, extent_bytes, has_tenants=True)
        stack.callback(server.close)
        names = [
            server.on_loop(
                lambda tenant=tenant: (
                    server.pool.open_namespace(  # type: ignore[misc]
                        namespace_spec(group_spec(chunk_bytes=extent_bytes // 8), tenant=tenant)
                    )[0].fingerprint
                )
            )
            for tenant in ("acme", "umbra")
        ]

        def put_start(name: bytes) -> None:
            request = pb.PutStartRequest(
                namespace=name, runs=wire.encode_runs([run_of(*range(8))]), shards=wire.encode_shards(WHOLE)
            )
            grant = server.stub.PutStart(request, timeout=60)
            server.stub.PutEnd(pb.PutEndRequest(ticket_id=grant.ticket_id, checksums=[0] * 8), timeout=60)
            server.stub.Clear(pb.ClearRequest(namespace=name), timeout=60)

        server.on_loop(server.probe.reset)
        put_start(names[0])
        server.memory[:] = 0xEE
        put_start(names[1])
        seconds = server.on_loop(lambda: server.probe.longest_s)
        assert not np.count_nonzero(server.memory), "another tenant has the extent"
        assert seconds < 0.030, f"{seconds * 1000:.1f} ms: {server.probe.culprit}"


def _house(**limits: int) -> House:
    return House(8, limits=Limits(**limits), has_tenants=True)


def _held(house: House, tenant: str) -> int:
    return house.pool.arena.num_held(tenant)


# Shares: tenants without quotas


def test_a_tenant_below_its_share_takes_extents_of_the_largest_and_no_more() -> None:
    house = _house()
    umbra, acme = house.owner(tenant="umbra"), house.owner(tenant="acme")
    umbra.fill_extents(8)
    names = acme.fill_extents(4)
    assert acme.present(*names) == names
    for size in (50, 200, 250, 500):
        house.owner(size, tenant="umbra").store(40)
    umbra.store(100)
    assert acme.present(*names) == names, "it evicted a tenant that has its share"
    acme.store(100)
    assert (_held(house, "acme"), _held(house, "umbra")) == (4, 4)


def test_a_tenant_that_leases_all_it_has_without_end_starves_nobody() -> None:
    house = _house(max_ttl_ms=60_000, grace_ms=1_000)
    umbra, acme = house.owner(tenant="umbra"), house.owner(tenant="acme")
    names = umbra.fill_extents(8)
    umbra.lease(*names)
    with pytest.raises(OutOfSpaceError) as caught:
        acme.put("block")
    assert str(caught.value) == (
        "no room for 1 blocks of 100 bytes: too few can be evicted now: others are leased, being written, moved to or "
        "from a tier, or in quarantine; put fewer at once, try again later, or start kvpool-server with more --memory"
    ), "what another tenant does is nobody's business"
    for _ in range(16):  # For 80 s: leases of 60 s, the grace, and some.
        house.clock.advance(5)
        umbra.lease(*names)
        house.pool.rebalance()
    acme.put("block")
    assert acme.present("block") == ["block"]


def test_more_tenants_than_extents_get_room_from_the_one_idle_longest() -> None:
    house = House(2, has_tenants=True)
    owners = [house.owner(tenant=f"tenant {nth}") for nth in range(4)]
    for owner in owners:
        owner.put("block")
        assert owner.present("block") == ["block"]
    assert [len(owner.present("block")) for owner in owners] == [0, 0, 1, 1]
    newest = house.owner(tenant="newest")
    with pytest.raises(OutOfSpaceError):
        newest.put(*range(20))
    assert [len(owner.present("block")) for owner in owners] == [0, 0, 1, 1], "it may have one extent, not two"


# Namespaces


def test_a_tenant_closes_its_own_namespaces_only() -> None:
    house = _house(max_tenant_namespaces=4, namespace_idle_ms=1_000)
    acme = [house.owner(tenant="acme") for _ in range(4)]
    house.clock.advance(10)
    for _ in range(4):
        house.owner(tenant="umbra")
    with pytest.raises(OutOfSpaceError, match=r"tenant 'umbra' has 4 of them, with .* and may have 4, "):
        house.owner(tenant="umbra")
    house.clock.advance(2)
    house.owner(tenant="umbra")
    assert all(house.pool.namespace(owner.fingerprint) for owner in acme)
    assert house.pool.namespace(house.owner(tenant="acme").fingerprint)
    assert sum(house.pool.namespace(owner.fingerprint) is not None for owner in acme) == 3


def test_where_all_have_too_many_those_with_most_close_theirs() -> None:
    house = _house(max_namespaces=8, namespace_idle_ms=1_000)
    tenants = ["acme"] * 3 + ["umbra"] * 2 + ["third", "fourth", "fifth"]
    owners = [house.owner(tenant=tenant) for tenant in tenants]
    for tenant in ("acme", "umbra", "third"):
        with pytest.raises(OutOfSpaceError, match=f"tenant '{tenant}' has . of them, .* and no more than are left"):
            house.owner(tenant=tenant)
    house.clock.advance(2)
    owners.append(house.owner(tenant="sixth"))
    are_open = [house.pool.namespace(owner.fingerprint) is not None for owner in owners]
    assert are_open == [False] + [True] * 8, "the oldest of those of acme, which has most, is closed"


def test_tenants_leave_bytes_of_specifications_to_others() -> None:
    house = _house(max_specs_bytes=256 << 10)

    def fill(tenant: str) -> int:
        """How many namespaces with large specifications a tenant can open."""
        with contextlib.suppress(OutOfSpaceError):
            for nth in range(house.pool.limits.max_tenant_namespaces):
                house.pool.open_namespace(namespace_spec(tenant=tenant, salt=f"{nth}" + "x" * 4_000))
        return sum(namespace.tenant == tenant for namespace in house.pool.open_namespaces())

    counts = [fill(f"tenant {nth}") for nth in range(5)]
    assert counts == sorted(counts, reverse=True) and counts[0] <= 32 and counts[-1] > 0


def test_a_lowered_quota_takes_extents_back_even_if_their_blocks_are_leased_all_the_time() -> None:
    house = _house(max_ttl_ms=60_000)
    umbra, acme = house.owner(tenant="umbra"), house.owner(tenant="acme")
    names = umbra.fill_extents(8)
    umbra.lease(*names)
    house.quota("tenant:umbra", 2 * EXTENT)
    for _ in range(20):
        house.clock.advance(5)
        umbra.lease(*names)
        house.pool.rebalance()
    assert _held(house, "umbra") == 2
    assert len(acme.fill_extents(6)) == 60
