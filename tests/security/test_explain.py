"""What `Explain` tells of other tenants: nothing but that one of them took the room."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.client.client import Client, Namespace
from kvpool.protocol.errors import OutOfSpaceError, UnknownNamespaceError
from kvpool.protocol.types import BlockRun
from kvpool.security.principal import Role
from kvpool.v1 import pool_pb2 as pb
from tests.security.conftest import Deployment
from tests.support.processes import wait_for
from tests.support.values import group_spec, namespace_spec, payload, run_of

BLOCK_BYTES = 1 << 20
NAMES = list(range(10))


def stored(client: Client, namespace: Namespace, run: BlockRun, block: Any) -> bool:
    """Stores a block; False if there is no room yet: an extent of another tenant is being drained."""
    try:
        client.put_blocks(namespace, run, [block])
    except OutOfSpaceError:
        return False
    return True


@pytest.fixture(scope="module")
def evicted(deployment: Deployment) -> bytes:
    """The namespace of acme, whose blocks have in part made room for umbra's."""
    fingerprints = {}
    for tenant, count in (("acme", 10), ("umbra", 6)):
        spec = namespace_spec(group_spec(chunk_bytes=BLOCK_BYTES), tenant=tenant, model=f"{tenant}/model")
        with deployment.client(Role.ENGINE_WRITE, tenant) as client:
            namespace = client.open_namespace(spec)
            for name in NAMES[:count]:
                parent = name - 1 if name else None
                block = payload((tenant, name), BLOCK_BYTES)
                wait_for(lambda: stored(client, namespace, run_of(name, parent=parent), block), "room")  # noqa: B023
            fingerprints[tenant] = namespace.fingerprint
    return fingerprints["acme"]


def missing(deployment: Deployment, role: Role, tenant: str, fingerprint: bytes) -> list[pb.BlockRange]:
    with deployment.client(role, tenant) as client:
        (run,) = client.admin.explain(fingerprint, [run_of(*NAMES)]).runs
    return [part for part in run.ranges if part.state == pb.BLOCK_STATE_MISSING]


def test_a_tenant_is_told_that_another_took_the_room_and_not_which(deployment: Deployment, evicted: bytes) -> None:
    told = missing(deployment, Role.TENANT_OPERATOR, "acme", evicted)
    assert told
    whose = {(part.evicted_for.tenant, part.evicted_for.model, part.evicted_for.is_hidden) for part in told}
    assert ("", "", True) in whose
    assert whose <= {("", "", True), ("acme", "acme/model", False), ("", "", False)}


def test_the_operator_of_all_is_told_which(deployment: Deployment, evicted: bytes) -> None:
    told = missing(deployment, Role.OPERATOR, "acme", evicted)
    assert "umbra/model" in {part.evicted_for.model for part in told if part.evicted_for.tenant == "umbra"}


def test_of_another_tenants_namespace_nothing_is_told(deployment: Deployment, evicted: bytes) -> None:
    with pytest.raises(UnknownNamespaceError):
        missing(deployment, Role.TENANT_OPERATOR, "umbra", evicted)
