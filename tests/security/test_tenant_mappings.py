"""Engines of two tenants map memory of one server: neither ever maps a byte of the other, however extents change hands.

Every byte that a tenant writes has the tenant's number in its upper half, so one look at a mapping says whose bytes lie
there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpool.certificates import Authority
from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.errors import OutOfSpaceError
from kvpool.principal import ALL_TENANTS, Principal, Role
from kvpool.rpc import Namespace
from kvpool.segment import TRAILER_BYTES
from kvpool.transport.shm import ShmTransport
from kvpool.types import ShardRange
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.tenant_memory import MAX_TENANTS
from tests.support.certificates import files_in, server_flags
from tests.support.memory_files import arena_file, memory_files
from tests.support.processes import ServerProcess, wait_for
from tests.support.values import group_spec, namespace_spec, run_of
from tests.support.workers import workers_of

MIB = 1 << 20
ARENA_BYTES = 16 * MIB
NUM_BLOCKS = 16
"""Of 1 MiB each: they fill the arena, whose extents have 4 MiB."""
TENANTS = {"acme": 0xA0, "umbra": 0xB0}
WAYS = ("shm", "tcp", "grpc")
Bytes = npt.NDArray[np.uint8]


class Engines:
    """A server, and for each tenant an engine that uses shared memory, one of the data port, and one of gRPC."""

    def __init__(self, directory: Path, socket_path: Path, stack: contextlib.ExitStack):
        authority = Authority.create(directory / "pki")

        def identity(role: Role, tenant: str = ALL_TENANTS) -> dict[str, Any]:
            return {"tls": files_in(authority.issue_principal(Principal(tenant, role)))}

        self.server = ServerProcess(
            directory, "--memory", str(ARENA_BYTES), "--unix-listen", str(socket_path), "--tenant-memory",
            "--grace-ms", "100",
            *server_flags(authority.issue_server([])), **identity(Role.OPERATOR),
        )  # fmt: skip
        stack.callback(self.server.stop)
        endpoints = {"shm": f"unix:{socket_path}", "tcp": self.server.endpoint, "grpc": self.server.endpoint}
        self.clients = {}
        for tenant, way in itertools.product(TENANTS, WAYS):
            config = ClientConfig(endpoints[way], way, timeout_ms=20_000, **identity(Role.ENGINE_WRITE, tenant))
            self.clients[tenant, way] = stack.enter_context(Client(config))
        operator = ClientConfig(self.server.endpoint, timeout_ms=20_000, **identity(Role.OPERATOR))
        self.operator = stack.enter_context(Client(operator))
        self._fillings = itertools.count()

    def open(self, tenant: str, way: str) -> Namespace:
        spec = namespace_spec(group_spec(chunk_bytes=MIB), tenant=tenant, salt="mappings")
        namespace = self.clients[tenant, way].open_namespace(spec)
        assert namespace.transport.name == way
        return namespace

    def mapping(self, tenant: str) -> Bytes:
        """What an engine has mapped."""
        transport = self.open(tenant, "shm").transport
        assert isinstance(transport, ShmTransport)
        return transport.segment.bytes

    def fill(self, tenant: str, way: str) -> dict[int, Bytes]:
        """Has all of the arena hold a tenant's blocks; returns them by name."""
        self.operator.admin.clear()
        nth = next(self._fillings)
        rng = np.random.default_rng(nth)
        blocks = {
            NUM_BLOCKS * nth + at: TENANTS[tenant] | rng.integers(1, 16, MIB, np.uint8) for at in range(NUM_BLOCKS)
        }
        client, namespace = self.clients[tenant, way], self.open(tenant, way)
        names = list(blocks)
        for start in range(0, NUM_BLOCKS, 4):
            part = names[start : start + 4]
            wait_for(lambda part=part: self._put(client, namespace, {name: blocks[name] for name in part}), "room", 20)  # type: ignore[misc]
        return blocks

    def _put(self, client: Client, namespace: Namespace, blocks: dict[int, Bytes]) -> bool:
        with contextlib.suppress(OutOfSpaceError):  # What was cleared is in use for a moment.
            client.put_blocks(namespace, run_of(*blocks), list(blocks.values()))
        return client.lookup(namespace, [run_of(*blocks)], lease=False).hits[0].num_leading == len(blocks)

    def check(self, tenant: str, blocks: dict[int, Bytes], ways: tuple[str, ...] = WAYS) -> None:
        """Each of a tenant's engines finds its blocks."""
        run = run_of(*blocks)
        for way in ways:
            client, namespace = self.clients[tenant, way], self.open(tenant, way)
            lease_id = client.lookup(namespace, [run]).lease_id
            found = client.get_blocks(namespace, lease_id, run)
            client.release([lease_id])
            for name, got in zip(blocks, found, strict=True):
                assert got is not None and (got == blocks[name]).all(), f"block {name} over {way}"

    def check_mappings(self) -> None:
        """No tenant has mapped a byte of another."""
        for tenant, number in TENANTS.items():
            mapping = self.mapping(tenant)
            assert not (mapping[mapping != 0] & 0xF0 != number).any(), f"{tenant} sees another's bytes"

    def backed_bytes(self) -> int:
        """Of the arena, over all files, of which each has a page for its nonce."""
        sizes = [os.stat(path).st_blocks * 512 for path in memory_files(self.server.pid)]
        assert len(sizes) == 1 + MAX_TENANTS
        return sum(sizes) - TRAILER_BYTES * len(sizes)


@pytest.fixture(scope="module")
def _engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    directory = tmp_path_factory.mktemp("mappings")
    with contextlib.ExitStack() as stack:
        yield Engines(directory, directory / "socket", stack)


@pytest.fixture
def engines(_engines: Engines) -> Engines:
    _engines.operator.admin.clear()
    return _engines


@pytest.mark.parametrize("way", WAYS)
def test_a_tenants_engines_find_what_others_of_it_stored_however_often_extents_change_hands(
    engines: Engines, way: str
) -> None:
    for tenant in ("acme", "umbra", "acme", "umbra"):
        blocks = engines.fill(tenant, way)
        engines.check(tenant, blocks)
        engines.check_mappings()


def test_memory_stays_within_the_arena_whatever_engines_touch(engines: Engines) -> None:
    engines.fill("acme", "shm")
    assert engines.backed_bytes() == ARENA_BYTES
    engines.mapping("umbra")[:] = TENANTS["umbra"] | 7
    wait_for(lambda: engines.backed_bytes() == ARENA_BYTES, "the end of pages that umbra has no extents for", 30)
    engines.check_mappings()
    engines.fill("umbra", "tcp")
    engines.fill("acme", "tcp")
    wait_for(lambda: engines.backed_bytes() == ARENA_BYTES, "the end of pages that were looked at", 30)


def test_what_an_engine_writes_to_extents_that_it_has_lost_reaches_nobody(engines: Engines) -> None:
    engines.fill("acme", "shm")
    lost = engines.mapping("acme")
    assert lost.all()
    blocks = engines.fill("umbra", "tcp")
    assert not lost.any(), "an extent that changed hands is empty for its last owner"
    lost[:] = TENANTS["acme"] | 5
    engines.check("umbra", blocks)
    engines.check_mappings()
    blocks = engines.fill("acme", "grpc")
    engines.check("acme", blocks)


def test_slots_that_nobody_has_written_are_empty(engines: Engines) -> None:
    engines.fill("acme", "shm")
    engines.mapping("umbra")[:] = TENANTS["umbra"] | 3
    client, namespace, run = engines.clients["umbra", "shm"], engines.open("umbra", "shm"), run_of(*range(8))
    grant = client.rpc.put_start(namespace, [run], ShardRange(0, 1))
    mapping = engines.mapping("umbra")
    assert not any(mapping[offset : offset + MIB].any() for offset in grant.offsets)
    client.rpc.stub.PutRevoke(pb.PutRevokeRequest(ticket_id=grant.ticket_id), timeout=20)


def test_a_data_worker_that_replaces_another_finds_each_tenants_memory(engines: Engines) -> None:
    engines.fill("umbra", "shm")
    blocks = engines.fill("acme", "shm")
    engines.check("acme", blocks, ("tcp",))
    (killed,) = workers_of(engines.server)
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: workers_of(engines.server) not in ([], [killed]), "the next worker")
    with contextlib.suppress(Exception):  # The client finds that its connections have ended.
        engines.check("acme", blocks, ("tcp",))
    engines.check("acme", blocks, ("tcp",))
    engines.check("umbra", engines.fill("umbra", "tcp"))
    engines.check_mappings()


def test_each_tenant_maps_a_file_of_its_own_and_none_of_them_the_arenas(engines: Engines) -> None:
    arena = os.stat(arena_file(engines.server.pid)).st_ino
    inodes = {arena}
    for tenant in TENANTS:
        transport = engines.open(tenant, "shm").transport
        assert isinstance(transport, ShmTransport)
        inodes.add(os.fstat(transport.segment.fd).st_ino)
    assert len(inodes) == 1 + len(TENANTS)
